"""Pooling configuration of a checkpoint: from the metadata of a GGUF file, or from sentence-transformers' files, of
which modules.json lists the modules after the model and the Pooling module's folder has the method. Needs no torch.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab_engine.config.pooling import EXAMPLE, FLAG, CheckpointPooling, sentence_transformers_method
from trimtab_engine.errors import ModelError, NotSupportedError
from trimtab_engine.model_files.json_files import CONFIG_FILE, read_json
from trimtab_engine.weights.gguf_file import GgufSource
from trimtab_engine.weights.source import WeightSource

MODULES_FILE = "modules.json"
MODEL, POOLING, NORMALIZE = "Transformer", "Pooling", "Normalize"
"""The modules that are built, by the last part of their types."""


def pooling_of_checkpoint(model: Path, method: str | None = None) -> CheckpointPooling:
    """Return the pooling configuration of a checkpoint folder; the defaults of decoders if the folder has none, or for
    a single file. `method`: overrides the Pooling module, by vLLM's name.

    Raises:
        ModelError: files cannot be read.
        NotSupportedError: a module is not supported.
    """
    path = model / MODULES_FILE
    if not model.is_dir() or not path.is_file():
        return CheckpointPooling()
    modules = _modules(path)
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    unknown = [kind for kind in kinds if kind not in (MODEL, POOLING, NORMALIZE)]
    if unknown:
        raise NotSupportedError(
            f"{path}: a module {unknown[0][:60]} after the model is not supported, so its vectors would be others; "
            f"built "
            f"are {POOLING} and {NORMALIZE}; --runner generate leaves them all out"
        )
    if POOLING not in kinds:
        return CheckpointPooling()
    config = model / str(modules[kinds.index(POOLING)].get("path", "")) / CONFIG_FILE
    if method is None:
        method = sentence_transformers_method(_words(config, path), str(config))
    return CheckpointPooling(method, NORMALIZE in kinds, str(path))


def pooling_of(model: Path, source: WeightSource, method: str | None = None) -> CheckpointPooling:
    """Return the pooling configuration of an opened checkpoint. `method` and exceptions: see
    pooling_of_checkpoint().
    """
    if not isinstance(source, GgufSource):
        return pooling_of_checkpoint(model, method)
    stored = source.pooling_type
    return (
        CheckpointPooling()
        if stored is None
        else CheckpointPooling(method or stored, normalize=True, where=source.where)
    )


def _words(config: Path, modules: Path) -> Mapping[str, Any]:
    """The Pooling module's own. A bucket's folders are left out where a model is fetched, and it with them."""
    if not config.exists():
        raise ModelError(
            f"{modules}: names a {POOLING} module, but there is no {config}; copy it there, or set {FLAG}, such "
            f"as {EXAMPLE}"
        )
    return read_json(config)


def _modules(path: Path) -> list[Mapping[str, Any]]:
    """Modules in the order in which they are applied."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, list) or not all(isinstance(module, dict) for module in value):
        raise ModelError(f"{path}: holds no list of modules")
    return value
