"""What a checkpoint says of pooling: a GGUF file in its metadata, others in sentence-transformers' files beside the
weights, of which modules.json lists what follows the model, and the Pooling module's folder says how. Needs no torch.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab_engine.config.pooling import OfCheckpoint, sentence_transformers_method
from trimtab_engine.errors import ModelError, NotBuiltError
from trimtab_engine.weights.gguf_file import GgufSource
from trimtab_engine.weights.source import CONFIG_FILE, WeightSource, read_json

MODULES_FILE = "modules.json"
MODEL, POOLING, NORMALIZE = "Transformer", "Pooling", "Normalize"
"""The modules that are built, by the last part of their types."""


def pooling_of_checkpoint(model: Path) -> OfCheckpoint:
    """What the folder of a checkpoint says; of one that says nothing, and of a single file, the defaults of decoders.
    Raises ModelError for files that cannot be read, NotBuiltError for modules that are not built."""
    path = model / MODULES_FILE
    if not model.is_dir() or not path.is_file():
        return OfCheckpoint()
    modules = _modules(path)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    unknown = [kind for kind in kinds if kind not in (MODEL, POOLING, NORMALIZE)]
    if unknown:
        raise NotBuiltError(
            f"{path}: a module {unknown[0][:60]} after the model is not built, so its vectors would be others; built "
            f"are {POOLING} and {NORMALIZE}; --runner generate leaves them all out"
        )
    if POOLING not in kinds:
        return OfCheckpoint()
    folder = model / str(modules[kinds.index(POOLING)].get("path", ""))
    words = read_json(folder / CONFIG_FILE)
    return OfCheckpoint(sentence_transformers_method(words, str(folder / CONFIG_FILE)), NORMALIZE in kinds, str(path))


def pooling_of(model: Path, source: WeightSource) -> OfCheckpoint:
    """What an opened checkpoint says. Raises as pooling_of_checkpoint() does."""
    if not isinstance(source, GgufSource):
        return pooling_of_checkpoint(model)
    method = source.pooling_type
    return OfCheckpoint() if method is None else OfCheckpoint(method, normalize=True, where=source.where)


def _modules(path: Path) -> list[Mapping[str, Any]]:
    """In the order in which they are applied."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, list) or not all(isinstance(module, dict) for module in value):
        raise ModelError(f"{path}: holds no list of modules")
    return value
