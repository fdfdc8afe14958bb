"""Selection of a model's files to fetch: supported weights, and the small text files that a model needs. Pure.

Never code or pickle files: a model that has only those is rejected with the reason.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab_engine.errors import ModelError
from trimtab_engine.sources.name import RemoteModel, Scheme
from trimtab_engine.weights.gguf_parts import first_parts, parts_of
from trimtab_engine.weights.open import PICKLE_SUFFIXES
from trimtab_engine.weights.safetensors_files import INDEX_FILE, SINGLE_FILE
from trimtab_engine.weights.source import DAMAGE

TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model")
"""Configuration, tokenizer and chat template; `.model` is SentencePiece's tokenizer."""
LOADED_SUFFIXES = (*TEXT_SUFFIXES, ".safetensors", ".gguf")
"""Suffixes of files that may be fetched."""
MAX_TEXT_BYTES = 128 << 20  # the largest tokenizers have some 35 MB
POOLING_MODULE = re.compile(r"\d+_Pooling/config\.json")
"""The only text file fetched from a subfolder: sentence-transformers' pooling method (models/pooler.py)."""
OTHER_INDEX = ".index.json"
"""Suffix of index files; only the safetensors index is used."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as its source describes it. The cache names its bytes by `digest`: equal digests, equal bytes."""

    name: str
    size: int
    digest: str
    etag: str = ""
    """ETag of an object in a bucket: the request requires it, so that a replaced object is never read."""
    version: str | None = None
    """Version of an object that was overwritten, in a bucket with versioning."""
    form: str = ""
    """Compression of a layer that is an archive: `gz` or none."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a model at one pin: a commit, a digest of objects or of a manifest."""

    model: RemoteModel
    commit: str
    files: tuple[RemoteFile, ...]
    archives: tuple[RemoteFile, ...] = ()
    """Layers that hold further files, lower ones first."""

    def named(self, name: str) -> RemoteFile | None:
        return next((file for file in self.files if file.name == name), None)


def texts(listing: Listing) -> tuple[RemoteFile, ...]:
    """Small files next to the weights. Subfolders contain other formats of the model and are skipped, except for the
    pooling configuration.
    """
    return tuple(
        file
        for file in listing.files
        if ("/" not in file.name or POOLING_MODULE.fullmatch(file.name))
        and file.name.endswith(TEXT_SUFFIXES)
        and file.size <= MAX_TEXT_BYTES
        and (file.name == INDEX_FILE or not file.name.endswith(OTHER_INDEX))
    )


def weights(listing: Listing, index: str | None) -> tuple[RemoteFile, ...]:
    """The files with the weights. `index` is the text of INDEX_FILE where there is one. Raises ModelError
    where there are none that can be loaded, or several to choose from.
    """
    model = listing.model
    if model.file is not None:
        return _in_parts(listing, model.file)
    single = listing.named(SINGLE_FILE)
    if single is not None:
        return (single,)  # also next to an index, as the loader does
    if index is not None:
        return tuple(_present(listing, name) for name in _indexed(model, index))
    at_top = [file for file in listing.files if "/" not in file.name]
    safetensors = [file for file in at_top if file.name.endswith(".safetensors")]
    if safetensors:
        return tuple(safetensors)
    ggufs = first_parts(file.name for file in at_top if file.name.endswith(".gguf"))
    if len(ggufs) == 1:
        return _in_parts(listing, ggufs[0])
    if ggufs:
        names = ", ".join(ggufs)
        one = f"name one: {model.scheme}://{model.place}/{ggufs[0]}"
        remedy = "pack the one that is wanted by itself" if model.scheme is Scheme.OCI else one
        raise ModelError(f"{model}: holds {len(ggufs)} GGUF files ({names}); {remedy}")
    raise _no_weights_error(model, at_top)


def _indexed(model: RemoteModel, index: str) -> Sequence[str]:
    try:
        names = sorted({str(name) for name in json.loads(index)["weight_map"].values()})
    except DAMAGE:
        raise ModelError(f"{model}: {INDEX_FILE} has no weight_map; use another revision") from None
    if not names or not all(name.endswith(".safetensors") and "/" not in name for name in names):
        raise ModelError(f"{model}: {INDEX_FILE} names files that are no safetensors; use another revision")
    return names


def _in_parts(listing: Listing, name: str) -> tuple[RemoteFile, ...]:
    """A GGUF file, and the others where it is the first part of a model."""
    parts = parts_of(name)
    if parts[0] != name:
        raise ModelError(f"{listing.model}: {name} is one of {len(parts)} parts of a model; name the first, {parts[0]}")
    return tuple(_present(listing, part) for part in parts)


def _present(listing: Listing, name: str) -> RemoteFile:
    file = listing.named(name)
    if file is None:
        raise ModelError(f"{listing.model}: has no file {name}; see which files are there, or use another revision")
    return file


def _no_weights_error(model: RemoteModel, files: Sequence[RemoteFile]) -> ModelError:
    pickles = [file.name for file in files if file.name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        offered = " (the hub's own conversion is often offered as refs/pr/N)" if model.scheme is Scheme.HUB else ""
        return ModelError(
            f"{model}: has weights in {pickles[0]} only; pickle formats ({', '.join(PICKLE_SUFFIXES)}) can run "
            f"code and are never loaded: use another model or revision, with safetensors{offered}, or convert it"
        )
    return ModelError(f"{model}: has neither safetensors nor a .gguf file; name a place that holds a model")
