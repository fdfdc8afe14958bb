"""A model of the hub, on this machine: found in the cache, or fetched into it by one engine while others wait."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from trimtab_engine.errors import ConfigError, ModelError
from trimtab_engine.hub.cache import Shelf, make_room
from trimtab_engine.hub.files import HubFile, Listing, texts, weights
from trimtab_engine.hub.locks import FolderLock
from trimtab_engine.hub.name import HubModel
from trimtab_engine.hub.progress import Meter, Progress
from trimtab_engine.weights.safetensors_files import INDEX_FILE
from trimtab_engine.weights.source import CONFIG_FILE, GENERATION_FILE

TELL_SECONDS = 1.0  # between two words on progress
DESCRIPTION = (CONFIG_FILE, GENERATION_FILE, INDEX_FILE)

OnProgress = Callable[[Progress], None]

logger = logging.getLogger("trimtab_engine.hub")


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """Where models are kept, and how many bytes all of them may take; None: huggingface_hub's own folder, any number.
    `endpoint`: None is HF_ENDPOINT's."""

    folder: Path | None = None
    limit_bytes: int | None = None
    endpoint: str | None = None
    has_weights: bool = True
    """Whether weights are wanted; for random ones the texts do."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A model that is here: `path` is what is loaded. As long as `lease` is open nobody evicts it."""

    model: HubModel
    path: Path
    commit: str
    lease: FolderLock | None

    def close(self) -> None:
        """Nobody runs on it any more."""
        if self.lease is not None:
            self.lease.close()


def fetch(model: HubModel, options: FetchOptions, on_progress: OnProgress = lambda progress: None) -> Fetched:
    """Find the model in the cache or fetch it. A commit that is complete there asks nobody. Raises ModelError or
    ConfigError with what to do."""
    from trimtab_engine.hub import remote

    root = options.folder or Path(remote.default_cache())
    shelf = Shelf.of(root, model.repo)
    if model.is_pinned and model.revision is not None:
        found = _on_shelf(shelf, model, model.revision)
        if found is not None:
            return found
    on_progress(Progress(str(model), 0, 0))
    if remote.is_offline():
        return _kept(shelf, model, f"the hub is not asked, as {remote.OFFLINE}: unset it")
    known = shelf.commit_of(model)
    is_kept = known is not None and shelf.is_complete(known, model.file)
    try:
        listing = remote.ask(model, options.endpoint, patient=not is_kept)
    except remote.HubSilent as error:
        if known is None or not is_kept:
            raise
        logger.warning("%s; serving commit %s, which the cache has", error, known)
        return _kept(shelf, model, str(error))
    return _fetched(shelf, listing, root, options, on_progress)


def _on_shelf(shelf: Shelf, model: HubModel, commit: str) -> Fetched | None:
    """The commit, if all of it is in the cache: leased before it is looked at, so that it stays."""
    if not shelf.is_complete(commit, model.file):
        return None
    lease = _lease(shelf, commit)
    if shelf.is_complete(commit, model.file):
        return _result(shelf, model, commit, lease)
    if lease is not None:
        lease.close()
    return None


def _lease(shelf: Shelf, commit: str) -> FolderLock | None:
    """Keep others from evicting the commit. None where the cache cannot be written: nobody can evict there either."""
    try:
        lease = shelf.use(commit)
    except ConfigError:
        return None
    lease.wait(lambda: None, shared=True)
    (shelf.own / f"{commit}.use").touch()
    return lease


def _result(shelf: Shelf, model: HubModel, commit: str, lease: FolderLock | None) -> Fetched:
    folder = shelf.snapshot(commit)
    return Fetched(replace(model, revision=commit), folder / model.file if model.file else folder, commit, lease)


def _kept(shelf: Shelf, model: HubModel, why: str) -> Fetched:
    """What the cache has without anybody being asked. Raises ModelError where it has not all of it."""
    commit = shelf.commit_of(model)
    if commit is not None and (shelf.is_complete(commit, model.file) or shelf.looks_complete(commit, model.file)):
        return _result(shelf, model, commit, _lease(shelf, commit))
    raise ModelError(
        f"there is no model at {model.repo}, and the cache {shelf.folder.parent} has no {model} either ({why}); where "
        f"there is a network: trimtab-engine fetch {model}, or hf download {model.repo} --local-dir FOLDER, then give "
        f"FOLDER"
    )


def _fetched(shelf: Shelf, listing: Listing, root: Path, options: FetchOptions, on_progress: OnProgress) -> Fetched:
    model, commit = listing.model, listing.commit
    with shelf.fetching() as fetching:
        lease = shelf.use(commit)
        lease.wait(lambda: None, shared=True)
        try:
            if not shelf.is_complete(commit, model.file):
                fetching.wait(lambda: on_progress(shelf.progress_elsewhere(model)))
                if not shelf.is_complete(commit, model.file):
                    _fill_shelf(shelf, listing, root, options, on_progress)
            (shelf.own / f"{commit}.use").touch()
            if model.revision is not None or not model.is_pinned:
                shelf.note_revision(model.revision or "main", commit)
        except OSError as error:
            lease.close()
            raise ConfigError(f"the cache {root} cannot be written: {error.strerror or error}; see to it") from None
        except BaseException:
            lease.close()
            raise
    return _result(shelf, model, commit, lease)


def _fill_shelf(shelf: Shelf, listing: Listing, root: Path, options: FetchOptions, on_progress: OnProgress) -> None:
    """Texts first: the index among them says which weights there are. What does not fit is refused before these."""
    small = texts(listing)
    _bring(shelf, listing, small, options, lambda progress: None)
    if not options.has_weights:
        return
    index = listing.named(INDEX_FILE)
    text = None if index is None else shelf.blob(index).read_text(encoding="utf-8", errors="replace")
    large = weights(listing, text)
    missing = sum(file.size - shelf.begun_bytes(file) for file in large)
    make_room(root, shelf, listing.model, missing, options.limit_bytes)

    def tell(progress: Progress) -> None:
        shelf.note_progress(progress)
        on_progress(progress)

    _bring(shelf, listing, large, options, tell)
    shelf.note_complete(listing.commit, (*small, *large))


def _bring(
    shelf: Shelf, listing: Listing, files: tuple[HubFile, ...], options: FetchOptions, on_progress: OnProgress
) -> None:
    from trimtab_engine.hub.transfer import transfer

    begun = sum(shelf.begun_bytes(file) for file in files)
    meter = Meter(str(listing.model), sum(file.size for file in files), begun, time.monotonic())
    told = float("-inf")

    def waiting() -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= TELL_SECONDS:
            told = now
            on_progress(meter.read(now))

    transfer(listing, files, shelf, endpoint=options.endpoint, note=meter.note, waiting=waiting)
    for file in files:
        shelf.link(listing.commit, file)


@dataclass(frozen=True, slots=True)
class Description:
    """What tells what a model is without its weights: a folder with its configuration, and the weights' sizes."""

    folder: Path
    commit: str
    weights_bytes: int
    is_safetensors: bool


def describe(model: HubModel, options: FetchOptions, folder: Path) -> Description:
    """Fetch configuration and index alone, into `folder`. Raises ModelError where there is no model, or
    none whose weights could be loaded."""
    from trimtab_engine.hub import remote

    listing = remote.ask(model, options.endpoint)
    shelf = Shelf.of(folder, model.repo)
    small = tuple(file for file in texts(listing) if file.name in DESCRIPTION)
    _bring(shelf, listing, small, options, lambda progress: None)
    index = listing.named(INDEX_FILE)
    large = weights(listing, None if index is None else shelf.blob(index).read_text(encoding="utf-8", errors="replace"))
    return Description(
        shelf.snapshot(listing.commit),
        listing.commit,
        sum(file.size for file in large),
        all(file.name.endswith(".safetensors") for file in large),
    )
