"""Cache of fetched models in huggingface_hub's layout, so that it is shared with `hf download`. Models of other sources
are in s3--NAME--DIGEST and oci--NAME--DIGEST, with a pin instead of the commit.

ROOT/models--ORG--NAME/blobs/DIGEST            a complete, verified file; DIGEST.incomplete until then
                      /snapshots/COMMIT/NAME   links to blobs; the path that is loaded
                      /refs/REVISION           commit of a branch or tag at the last query
                      /.trimtab/COMMIT.json    written when all files of a commit are complete
                               /COMMIT.use     locked by every engine that runs it; mtime: the last start
                               /fetching       locked during a download; progress.json: its progress
"""

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trimtab_engine.errors import ModelError
from trimtab_engine.sources.files import RemoteFile
from trimtab_engine.sources.locks import FolderLock
from trimtab_engine.sources.name import RemoteModel, Scheme
from trimtab_engine.sources.progress import Progress, format_bytes
from trimtab_engine.weights.gguf_parts import first_parts, parts_of
from trimtab_engine.weights.safetensors_files import INDEX_FILE, SINGLE_FILE
from trimtab_engine.weights.source import DAMAGE

OWN = ".trimtab"
INCOMPLETE = ".incomplete"
SPARE_BYTES = 64 << 20  # reserve for links, records and other data of the volume


@dataclass(frozen=True, slots=True)
class ModelCache:
    """One model's place in the cache, for all its revisions."""

    folder: Path

    @classmethod
    def of(cls, root: Path, model: RemoteModel) -> "ModelCache":
        return cls(root / model.cache_folder_name)

    @classmethod
    def all_in(cls, root: Path) -> Sequence["ModelCache"]:
        """Every model's place."""
        kinds = ("models", *(scheme.value for scheme in Scheme))
        return [cls(folder) for kind in kinds for folder in root.glob(f"{kind}--*")]

    @property
    def own(self) -> Path:
        return self.folder / OWN

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / _in_names(commit)

    def blob(self, file: RemoteFile) -> Path:
        return self.folder / "blobs" / file.digest

    def incomplete(self, file: RemoteFile) -> Path:
        return self.folder / "blobs" / (file.digest + INCOMPLETE)

    def record(self, commit: str) -> Path:
        return self.own / f"{_in_names(commit)}.json"

    def fetching(self) -> FolderLock:
        """Return the lock that a download of this model holds."""
        return FolderLock(self.own / "fetching")

    def use(self, commit: str) -> FolderLock:
        """Return the lock that engines running this commit share."""
        return FolderLock(self.used(commit))

    def used(self, commit: str) -> Path:
        """Return the file whose mtime is the last start of an engine on it."""
        return self.own / f"{_in_names(commit)}.use"

    # --- reading --------------------------------------------------------------------------------------------------

    def has(self, file: RemoteFile) -> bool:
        """Return True if the file is complete. A blob is renamed to its digest when it is complete and verified."""
        try:
            return self.blob(file).stat().st_size == file.size
        except OSError:
            return False

    def begun_bytes(self, file: RemoteFile) -> int:
        """Return the number of bytes already downloaded."""
        for path in (self.blob(file), self.incomplete(file)):
            if path.exists():
                return min(path.stat().st_size, file.size)
        return 0

    def is_complete(self, commit: str, gguf: str | None) -> bool:
        """Return True if a record lists a complete download, and its files still exist with the right sizes."""
        try:
            files = json.loads(self.record(commit).read_text(encoding="utf-8"))["files"]
            if gguf is not None and gguf not in files:
                return False
            return all((self.snapshot(commit) / name).stat().st_size == size for name, size in files.items())
        except (OSError, *DAMAGE):
            return False

    def looks_complete(self, commit: str, gguf: str | None) -> bool:
        """Return True if another tool's download, without a record, looks complete."""
        folder = self.snapshot(commit)
        if gguf is not None:
            return all((folder / part).exists() for part in parts_of(gguf))
        if (folder / SINGLE_FILE).exists():
            return True
        try:
            names = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"].values()
        except (OSError, *DAMAGE):
            ggufs = first_parts(file.name for file in folder.glob("*.gguf"))
            return len(ggufs) == 1 and self.looks_complete(commit, ggufs[0])
        return all((folder / str(name)).exists() for name in set(names))

    def commit_of(self, model: RemoteModel) -> str | None:
        """Return the pin of the revision when the source was last queried, or None if it never was."""
        if model.is_pinned:
            return model.revision
        try:
            return (self.folder / "refs" / model.asked).read_text(encoding="utf-8").strip() or None
        except OSError:
            return None

    # --- writing --------------------------------------------------------------------------------------------------

    def link(self, commit: str, file: RemoteFile) -> None:
        """Show a complete file under its own name."""
        path = self.snapshot(commit) / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.symlink_to(os.path.relpath(self.blob(file), path.parent))
        beside.replace(path)

    def note_revision(self, revision: str, commit: str) -> None:
        _write(self.folder / "refs" / revision, commit)

    def note_complete(self, commit: str, files: Iterable[RemoteFile]) -> None:
        """Record a complete download. Files from an earlier record are kept in the record."""
        known: dict[str, int] = {}
        if self.is_complete(commit, None):
            known = json.loads(self.record(commit).read_text(encoding="utf-8"))["files"]
        _write(self.record(commit), json.dumps({"files": known | {file.name: file.size for file in files}}))

    def forget(self, files: Iterable[RemoteFile], *, kept: Iterable[RemoteFile]) -> None:
        """Delete intermediate files that no other version links to."""
        needed = {file.digest for file in kept}
        shown = self.shown()
        for file in files:
            if file.digest and file.digest not in needed and os.path.realpath(self.blob(file)) not in shown:
                self.blob(file).unlink(missing_ok=True)

    def shown(self) -> set[str]:
        """The blobs that some version's files lead to."""
        return {os.path.realpath(link) for link in self.folder.glob("snapshots/*/**/*")}

    def note_progress(self, progress: Progress) -> None:
        _write(self.own / "progress.json", json.dumps(asdict(progress)))

    def progress_elsewhere(self, model: RemoteModel) -> Progress:
        """Return the progress reported by the process that holds the lock."""
        try:
            said = json.loads((self.own / "progress.json").read_text(encoding="utf-8"))
            rate = None if said["rate"] is None else float(said["rate"])
            return Progress(str(model), int(said["done_bytes"]), int(said["total_bytes"]), rate, elsewhere=True)
        except (OSError, *DAMAGE):
            return Progress(str(model), 0, 0, elsewhere=True)


def _in_names(commit: str) -> str:
    """A pin as part of a file's name: that of a manifest has a colon."""
    return commit.replace(":", "-")


def _write(path: Path, text: str) -> None:
    """Write atomically for concurrent readers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


# --- room ---------------------------------------------------------------------------------------------------------


def make_room(root: Path, model_cache: ModelCache, model: RemoteModel, missing: int, limit: int | None) -> None:
    """Make room for `missing` more bytes: on the volume, and within `limit` bytes of the whole cache. With a limit,
    unused models are evicted, least recently used first.

    Raises:
        ModelError: there is not enough room.
    """
    if not missing:
        return
    lacking = _lacking(root, missing, limit)
    if lacking > 0 and limit is not None:
        for idle in _by_last_use(root, model_cache):
            _evict(*idle)
            lacking = _lacking(root, missing, limit)
            if lacking <= 0:
                break
    if lacking > 0:
        raise _too_small(root, model, missing, limit)


def used_bytes(root: Path) -> int:
    """Return the size of all models in the cache."""
    return sum(_size(path) for model_cache in ModelCache.all_in(root) for path in model_cache.folder.glob("blobs/*"))


def _lacking(root: Path, missing: int, limit: int | None) -> int:
    free = shutil.disk_usage(root).free - SPARE_BYTES
    return max(missing - free, 0 if limit is None else used_bytes(root) + missing - limit)


def _too_small(root: Path, model: RemoteModel, missing: int, limit: int | None) -> ModelError:
    free = shutil.disk_usage(root).free
    if missing + SPARE_BYTES > free:
        return ModelError(
            f"{model}: {format_bytes(missing)} are still missing, and {root} has {format_bytes(free)} free; use a "
            f"larger volume, or another folder with --download-dir"
        )
    return ModelError(
        f"{model}: {format_bytes(missing)} are still to be downloaded, and the cache {root} may hold "
        f"{format_bytes(limit or 0)} in all, of which {format_bytes(used_bytes(root))} are in use; raise "
        f"--download-dir-size (spec.model.cache.size)"
    )


def _by_last_use(root: Path, wanted: ModelCache) -> Sequence[tuple[ModelCache, str]]:
    """Return evictable models (used, or partly downloaded), least recently used first. Excludes the model being fetched
    and files from other tools.
    """
    found = [
        (_time(model_cache.used(path.stem)), model_cache, path.stem)
        for model_cache in ModelCache.all_in(root)
        for path in model_cache.own.glob("*.use")
        if model_cache.folder != wanted.folder
        and (model_cache.record(path.stem).exists() or not model_cache.looks_complete(path.stem, None))
    ]
    return [(model_cache, commit) for _, model_cache, commit in sorted(found, key=lambda one: (one[0], one[2]))]


def _evict(model_cache: ModelCache, commit: str) -> None:
    """Delete a commit, unless an engine runs on it or a download of its model is in progress."""
    with model_cache.fetching() as fetching, model_cache.use(commit) as use:
        if not fetching.take() or not use.take():
            return
        model_cache.record(commit).unlink(missing_ok=True)
        shutil.rmtree(model_cache.snapshot(commit), ignore_errors=True)
        shown = model_cache.shown()
        for blob in model_cache.folder.glob("blobs/*"):
            if os.path.realpath(blob) not in shown:
                blob.unlink(missing_ok=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
