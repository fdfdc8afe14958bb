"""The cache of fetched models, in the hub's own form, so that what `hf download` fetched is found here and vice versa.
What came from elsewhere lies beside it: s3--NAME--DIGEST, oci--NAME--DIGEST, with a pin in the place of the commit.

ROOT/models--ORG--NAME/blobs/DIGEST            a file's bytes, whole and checked; DIGEST.incomplete until then
                      /snapshots/COMMIT/NAME   links to them: what is loaded
                      /refs/REVISION           which commit a branch or tag meant when it was last asked for
                      /.trimtab/COMMIT.json    written once all files of a commit are here
                               /COMMIT.use     locked by every engine that runs on it; its time: when one last began
                               /fetching       locked by whoever fetches; progress.json: how far that is
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
from trimtab_engine.sources.progress import Progress, said_bytes
from trimtab_engine.weights.gguf_parts import first_parts, parts_of
from trimtab_engine.weights.safetensors_files import INDEX_FILE, SINGLE_FILE

OWN = ".trimtab"
INCOMPLETE = ".incomplete"
SPARE_BYTES = 64 << 20  # left free for links, records and whatever else the volume holds


@dataclass(frozen=True, slots=True)
class Shelf:
    """One model's place in the cache, for all its revisions."""

    folder: Path

    @classmethod
    def of(cls, root: Path, model: RemoteModel) -> "Shelf":
        return cls(root / model.shelf)

    @classmethod
    def all_in(cls, root: Path) -> Sequence["Shelf"]:
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
        """The lock of whoever fetches something of this model."""
        return FolderLock(self.own / "fetching")

    def use(self, commit: str) -> FolderLock:
        """The lock of those who run on this commit; they share it."""
        return FolderLock(self.used(commit))

    def used(self, commit: str) -> Path:
        """The file whose time says when an engine last began to run on it."""
        return self.own / f"{_in_names(commit)}.use"

    # --- what is here ---------------------------------------------------------------------------------------------

    def has(self, file: RemoteFile) -> bool:
        """Whether all of the file is here. A blob gets its name when it is complete and checked."""
        try:
            return self.blob(file).stat().st_size == file.size
        except OSError:
            return False

    def begun_bytes(self, file: RemoteFile) -> int:
        """How much of it is here."""
        for path in (self.blob(file), self.incomplete(file)):
            if path.exists():
                return min(path.stat().st_size, file.size)
        return 0

    def is_complete(self, commit: str, gguf: str | None) -> bool:
        """Whether a record says that everything was fetched, and the files are still there, whole."""
        try:
            files = json.loads(self.record(commit).read_text(encoding="utf-8"))["files"]
            if gguf is not None and gguf not in files:
                return False
            return all((self.snapshot(commit) / name).stat().st_size == size for name, size in files.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False

    def looks_complete(self, commit: str, gguf: str | None) -> bool:
        """The same of what something else has put here, without a record: as far as the files themselves can tell."""
        folder = self.snapshot(commit)
        if gguf is not None:
            return all((folder / part).exists() for part in parts_of(gguf))
        try:
            names = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"].values()
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            ggufs = first_parts(file.name for file in folder.glob("*.gguf"))
            return (folder / SINGLE_FILE).exists() or (len(ggufs) == 1 and self.looks_complete(commit, ggufs[0]))
        return all((folder / str(name)).exists() for name in set(names))

    def commit_of(self, model: RemoteModel) -> str | None:
        """The pin that its revision meant when the source was last asked; None: it never was."""
        if model.is_pinned:
            return model.revision
        try:
            return (self.folder / "refs" / model.asked).read_text(encoding="utf-8").strip() or None
        except OSError:
            return None

    # --- what is put here -----------------------------------------------------------------------------------------

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
        """All of them are here. What a record said before of further files stays said."""
        known: dict[str, int] = {}
        if self.is_complete(commit, None):
            known = json.loads(self.record(commit).read_text(encoding="utf-8"))["files"]
        _write(self.record(commit), json.dumps({"files": known | {file.name: file.size for file in files}}))

    def forget(self, files: Iterable[RemoteFile], *, kept: Iterable[RemoteFile]) -> None:
        """Delete what was only needed on the way, and what no other version shows either."""
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
        """How far whoever holds the lock says to be."""
        try:
            said = json.loads((self.own / "progress.json").read_text(encoding="utf-8"))
            rate = None if said["rate"] is None else float(said["rate"])
            return Progress(str(model), int(said["done_bytes"]), int(said["total_bytes"]), rate, elsewhere=True)
        except (OSError, ValueError, KeyError, TypeError):
            return Progress(str(model), 0, 0, elsewhere=True)


def _in_names(commit: str) -> str:
    """A pin as part of a file's name: that of a manifest has a colon."""
    return commit.replace(":", "-")


def _write(path: Path, text: str) -> None:
    """All of it or nothing, also for those who read meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


# --- room ---------------------------------------------------------------------------------------------------------


def make_room(root: Path, shelf: Shelf, model: RemoteModel, missing: int, limit: int | None) -> None:
    """See to it that `missing` more bytes fit: on the volume, and into `limit` bytes of the whole cache. With a limit,
    models that nobody runs go, the longest unused first. Raises ModelError when that is not enough."""
    if not missing:
        return
    lacking = _lacking(root, missing, limit)
    if lacking > 0 and limit is not None:
        for idle in _by_last_use(root, shelf):
            _evict(*idle)
            lacking = _lacking(root, missing, limit)
            if lacking <= 0:
                break
    if lacking > 0:
        raise _too_small(root, model, missing, limit)


def used_bytes(root: Path) -> int:
    """What the files of all models in the cache take."""
    return sum(_size(path) for shelf in Shelf.all_in(root) for path in shelf.folder.glob("blobs/*"))


def _lacking(root: Path, missing: int, limit: int | None) -> int:
    free = shutil.disk_usage(root).free - SPARE_BYTES
    return max(missing - free, 0 if limit is None else used_bytes(root) + missing - limit)


def _too_small(root: Path, model: RemoteModel, missing: int, limit: int | None) -> ModelError:
    free = shutil.disk_usage(root).free
    if missing + SPARE_BYTES > free:
        return ModelError(
            f"{model}: {said_bytes(missing)} are still to be downloaded, and {root} has {said_bytes(free)} free; use a "
            f"larger volume, or another folder with --download-dir"
        )
    return ModelError(
        f"{model}: {said_bytes(missing)} are still to be downloaded, and the cache {root} may hold "
        f"{said_bytes(limit or 0)} in all, of which {said_bytes(used_bytes(root))} are in use; raise "
        f"--download-dir-size (spec.model.cache.size)"
    )


def _by_last_use(root: Path, wanted: Shelf) -> Sequence[tuple[Shelf, str]]:
    """Models that were used, or begun and given up, the longest unused first. Not among them are what is here of the
    one that is being fetched, and what something else has put here."""
    found = [
        (_time(shelf.used(path.stem)), shelf, path.stem)
        for shelf in Shelf.all_in(root)
        for path in shelf.own.glob("*.use")
        if shelf.folder != wanted.folder
        and (shelf.record(path.stem).exists() or not shelf.looks_complete(path.stem, None))
    ]
    return [(shelf, commit) for _, shelf, commit in sorted(found, key=lambda one: (one[0], one[2]))]


def _evict(shelf: Shelf, commit: str) -> None:
    """Delete a commit that nobody runs, of a model of which nothing is being fetched; else leave it."""
    with shelf.fetching() as fetching, shelf.use(commit) as use:
        if not fetching.take() or not use.take():
            return
        shelf.record(commit).unlink(missing_ok=True)
        shutil.rmtree(shelf.snapshot(commit), ignore_errors=True)
        shown = shelf.shown()
        for blob in shelf.folder.glob("blobs/*"):
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
