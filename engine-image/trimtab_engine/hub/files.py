"""Which files of a repository are fetched: weights that can be loaded, and the small texts that a model needs. Pure.

Never code, and never what has to be unpickled: a repository that has nothing else is refused by name.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab_engine.errors import ModelError
from trimtab_engine.hub.name import HubModel
from trimtab_engine.weights.open import PICKLE_SUFFIXES
from trimtab_engine.weights.safetensors_files import INDEX_FILE, SINGLE_FILE

TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model")
"""Configuration, tokenizer and chat template; `.model` is SentencePiece's tokenizer."""
MAX_TEXT_BYTES = 128 << 20  # the largest tokenizers have some 35 MB
OTHER_INDEX = ".index.json"
"""Ends the names of indices; of these only the one of the safetensors files says anything here."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file as the hub describes it. `digest` is its SHA-256 where the hub keeps it as a large file, else git's SHA-1
    of it; the cache names it so."""

    name: str
    size: int
    digest: str

    @property
    def has_sha256(self) -> bool:
        return len(self.digest) == 64


@dataclass(frozen=True, slots=True)
class Listing:
    """A repository at one commit."""

    model: HubModel
    commit: str
    files: tuple[HubFile, ...]

    def named(self, name: str) -> HubFile | None:
        return next((file for file in self.files if file.name == name), None)


def texts(listing: Listing) -> tuple[HubFile, ...]:
    """The small files beside the weights. Folders within the repository hold other forms of it and are left out."""
    return tuple(
        file
        for file in listing.files
        if "/" not in file.name
        and file.name.endswith(TEXT_SUFFIXES)
        and file.size <= MAX_TEXT_BYTES
        and (file.name == INDEX_FILE or not file.name.endswith(OTHER_INDEX))
    )


def weights(listing: Listing, index: str | None) -> tuple[HubFile, ...]:
    """The files with the weights. `index` is the text of INDEX_FILE where the repository has one. Raises ModelError
    where there are none that can be loaded, or several to choose from."""
    model = listing.model
    if model.file is not None:
        return (_present(listing, model.file),)
    if index is not None:
        return tuple(_present(listing, name) for name in _indexed(model, index))
    single = listing.named(SINGLE_FILE)
    if single is not None:
        return (single,)
    at_top = [file for file in listing.files if "/" not in file.name]
    safetensors = [file for file in at_top if file.name.endswith(".safetensors")]
    if safetensors:
        return tuple(safetensors)
    ggufs = [file for file in at_top if file.name.endswith(".gguf")]
    if len(ggufs) == 1:
        return tuple(ggufs)
    if ggufs:
        names = ", ".join(file.name for file in ggufs)
        raise ModelError(
            f"{model}: holds {len(ggufs)} GGUF files ({names}); name one: hf://{model.repo}/{ggufs[0].name}"
        )
    raise _nothing_to_load(model, at_top)


def _indexed(model: HubModel, index: str) -> Sequence[str]:
    try:
        names = sorted({str(name) for name in json.loads(index)["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{model}: {INDEX_FILE} has no weight_map; use another revision") from None
    if not names or not all(name.endswith(".safetensors") and "/" not in name for name in names):
        raise ModelError(f"{model}: {INDEX_FILE} names files that are no safetensors; use another revision")
    return names


def _present(listing: Listing, name: str) -> HubFile:
    file = listing.named(name)
    if file is None:
        raise ModelError(f"{listing.model}: has no file {name}; see the files on its page, or use another revision")
    return file


def _nothing_to_load(model: HubModel, files: Sequence[HubFile]) -> ModelError:
    pickles = [file.name for file in files if file.name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        return ModelError(
            f"{model}: has its weights in {pickles[0]} alone; pickle formats ({', '.join(PICKLE_SUFFIXES)}) can run "
            f"code and are never loaded: use a repository or a revision with safetensors (the hub's own conversion is "
            f"often offered as refs/pr/N), or convert it"
        )
    return ModelError(f"{model}: has neither safetensors nor a .gguf file; name a repository that holds a model")
