"""A model that is elsewhere, brought here: found in the cache, or fetched into it by one engine while others wait."""

import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from trimtab_engine.errors import ConfigError, ModelError
from trimtab_engine.model_files.json_files import CONFIG_FILE, GENERATION_FILE
from trimtab_engine.sources.cache import ModelCache, make_room
from trimtab_engine.sources.files import Listing, RemoteFile, texts, weights
from trimtab_engine.sources.locks import FolderLock
from trimtab_engine.sources.name import RemoteModel
from trimtab_engine.sources.progress import Downloaded, Meter, Progress
from trimtab_engine.sources.source import FetchOptions, PackedSource, Source, SourceUnavailable
from trimtab_engine.weights.safetensors_files import INDEX_FILE

TELL_SECONDS = 1.0  # between two words on progress
DESCRIPTION = (CONFIG_FILE, GENERATION_FILE, INDEX_FILE)

OnProgress = Callable[[Progress], None]

logger = logging.getLogger("trimtab_engine.sources")


@dataclass(frozen=True, slots=True)
class Fetched:
    """A model in the cache: `path` is the path to load. While `lease` is open it is not evicted."""

    model: RemoteModel
    path: Path
    commit: str
    lease: FolderLock | None
    downloaded: Downloaded | None = None
    """None if all of it was cached, or another engine has fetched it."""

    def close(self) -> None:
        """Release the lease."""
        if self.lease is not None:
            self.lease.close()


def fetch(model: RemoteModel, options: FetchOptions, on_progress: OnProgress = lambda progress: None) -> Fetched:
    """Find the model in the cache or fetch it. A pinned, complete model needs no request.

    Raises:
        ModelError: the model cannot be fetched, with what to do.
        ConfigError: the options are invalid, with what to do.
    """
    from trimtab_engine.sources.lookup import default_cache, source_of

    root = options.folder or default_cache()
    model_cache = ModelCache.of(root, model)
    if model.is_pinned and model.revision is not None:
        found = _cached_version(model_cache, model, model.revision)
        if found is not None:
            return found
    on_progress(Progress(str(model), 0, 0))
    with closing(source_of(model, options)) as source:
        return _asked(source, model_cache, model, root, options, on_progress)


def _asked(
    source: Source,
    model_cache: ModelCache,
    model: RemoteModel,
    root: Path,
    options: FetchOptions,
    on_progress: OnProgress,
) -> Fetched:
    """Fetch the source's version; fall back to the cached version if the source does not respond."""
    why_not = source.forbidden()
    if why_not is not None:
        return _kept(model_cache, model, source, why_not)
    known = model_cache.commit_of(model)
    is_kept = known is not None and model_cache.is_complete(known, model.file)
    try:
        listing = source.ask(model, patient=not is_kept)
    except SourceUnavailable as error:
        if known is None or not is_kept:
            raise
        logger.warning("%s; serving %s, which the cache has", error, known)
        return _kept(model_cache, model, source, str(error))
    return _fetched(source, model_cache, listing, root, options, on_progress)


def _cached_version(model_cache: ModelCache, model: RemoteModel, commit: str) -> Fetched | None:
    """The commit, if all of it is in the cache: leased before it is looked at, so that it stays."""
    if not model_cache.is_complete(commit, model.file):
        return None
    lease = _lease(model_cache, commit)
    if model_cache.is_complete(commit, model.file):
        return _result(model_cache, model, commit, lease)
    if lease is not None:
        lease.close()
    return None


def _lease(model_cache: ModelCache, commit: str) -> FolderLock | None:
    """Hold the commit against eviction. None if the cache is read-only, as nothing can be evicted there."""
    try:
        lease = model_cache.use(commit)
    except ConfigError:
        return None
    lease.wait(lambda: None, shared=True)
    model_cache.used(commit).touch()
    return lease


def _result(model_cache: ModelCache, model: RemoteModel, commit: str, lease: FolderLock | None) -> Fetched:
    folder = model_cache.snapshot(commit)
    return Fetched(replace(model, revision=commit), folder / model.file if model.file else folder, commit, lease)


def _kept(model_cache: ModelCache, model: RemoteModel, source: Source, why: str) -> Fetched:
    """Return the cached version without any request.

    Raises:
        ModelError: the cached version is incomplete.
    """
    commit = model_cache.commit_of(model)
    if commit is not None and (
        model_cache.is_complete(commit, model.file) or model_cache.looks_complete(commit, model.file)
    ):
        return _result(model_cache, model, commit, _lease(model_cache, commit))
    raise ModelError(
        f"there is no model at {model.place}, and the cache {model_cache.folder.parent} has no {model} either ({why}); "
        f"where "
        f"there is a network: {source.offline_advice(model)}"
    )


def _fetched(
    source: Source,
    model_cache: ModelCache,
    listing: Listing,
    root: Path,
    options: FetchOptions,
    on_progress: OnProgress,
) -> Fetched:
    model, commit = listing.model, listing.commit
    with model_cache.fetching() as fetching:
        lease = model_cache.use(commit)
        lease.wait(lambda: None, shared=True)
        try:
            if not model_cache.is_complete(commit, model.file):
                fetching.wait(lambda: on_progress(model_cache.progress_elsewhere(model)))
                if not model_cache.is_complete(commit, model.file):
                    _fill_cache(source, model_cache, listing, root, options, on_progress)
            model_cache.used(commit).touch()
            if not model.is_pinned:
                model_cache.note_revision(model.asked, commit)
        except OSError as error:
            lease.close()
            raise ConfigError(
                f"the cache {root} cannot be written: {error.strerror or error}; make it writable, or set another "
                f"--download-dir"
            ) from None
        except BaseException:
            lease.close()
            raise
    return _result(model_cache, model, commit, lease)


def _fill_cache(
    source: Source,
    model_cache: ModelCache,
    listing: Listing,
    root: Path,
    options: FetchOptions,
    on_progress: OnProgress,
) -> None:
    """Fetch text files first: the index among them lists the weights. Check for room before fetching weights."""
    on_the_way = listing.archives
    if listing.archives:
        listing, written = _with_unpacked(source, model_cache, listing, root, options, on_progress)
        on_the_way += written
    small = texts(listing)
    _download(source, model_cache, listing, small, lambda progress: None)
    if not options.has_weights:
        return
    index = listing.named(INDEX_FILE)
    text = None if index is None else model_cache.blob(index).read_text(encoding="utf-8", errors="replace")
    large = weights(listing, text)
    missing = sum(file.size - model_cache.begun_bytes(file) for file in large)
    make_room(root, model_cache, listing.model, missing, options.limit_bytes)

    _download(source, model_cache, listing, large, _record_progress(model_cache, on_progress))
    model_cache.note_complete(listing.commit, (*small, *large))
    model_cache.forget(on_the_way, kept=(*small, *large))


def _with_unpacked(
    source: Source,
    model_cache: ModelCache,
    listing: Listing,
    root: Path,
    options: FetchOptions,
    on_progress: OnProgress,
) -> tuple[Listing, tuple[RemoteFile, ...]]:
    """The listing with the files out of its archives, and all of these files. For a while archives and files are
    here.
    """
    from trimtab_engine.sources.unpack import with_unpacked

    missing = sum(2 * archive.size - model_cache.begun_bytes(archive) for archive in listing.archives)
    make_room(root, model_cache, listing.model, missing, options.limit_bytes)

    _transferred(source, model_cache, listing, listing.archives, _record_progress(model_cache, on_progress))
    return with_unpacked(model_cache, listing)


def _record_progress(model_cache: ModelCache, on_progress: OnProgress) -> OnProgress:
    """Record progress, which processes waiting for the lock read too."""

    def tell(progress: Progress) -> None:
        model_cache.note_progress(progress)
        on_progress(progress)

    return tell


def _download(
    source: Source, model_cache: ModelCache, listing: Listing, files: tuple[RemoteFile, ...], on_progress: OnProgress
) -> None:
    """Have the files here, under their names."""
    _transferred(source, model_cache, listing, files, on_progress)
    for file in files:
        model_cache.link(listing.commit, file)


def _transferred(
    source: Source, model_cache: ModelCache, listing: Listing, files: tuple[RemoteFile, ...], on_progress: OnProgress
) -> None:
    from trimtab_engine.sources.transfer import transfer

    begun = sum(model_cache.begun_bytes(file) for file in files)
    meter = Meter(str(listing.model), sum(file.size for file in files), begun, time.monotonic())
    told = float("-inf")

    def waiting() -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= TELL_SECONDS:
            told = now
            on_progress(meter.read(now))

    transfer(source, listing, files, model_cache, note=meter.note, waiting=waiting)
    on_progress(meter.read(time.monotonic()))


@dataclass(frozen=True, slots=True)
class Description:
    """A model's metadata without weights: a folder with its configuration, and the weights' sizes."""

    folder: Path
    commit: str
    weights_bytes: int
    is_safetensors: bool


def describe(model: RemoteModel, options: FetchOptions, folder: Path) -> Description:
    """Fetch only configuration and index into `folder`.

    Raises:
        ModelError: there is no model, or none with supported weights.
    """
    from trimtab_engine.sources.lookup import source_of

    with closing(source_of(model, options)) as source:
        return _described(source, ModelCache.of(folder, model), model)


def _described(source: Source, model_cache: ModelCache, model: RemoteModel) -> Description:
    listing = source.ask(model)
    if listing.archives and isinstance(source, PackedSource):
        from trimtab_engine.sources.unpack import with_described

        listing = with_described(model_cache, listing, source, DESCRIPTION)
    small = tuple(file for file in texts(listing) if file.name in DESCRIPTION)
    _download(source, model_cache, listing, small, lambda progress: None)
    index = listing.named(INDEX_FILE)
    large = weights(
        listing, None if index is None else model_cache.blob(index).read_text(encoding="utf-8", errors="replace")
    )
    return Description(
        model_cache.snapshot(listing.commit),
        listing.commit,
        sum(file.size for file in large),
        all(file.name.endswith(".safetensors") for file in large),
    )
