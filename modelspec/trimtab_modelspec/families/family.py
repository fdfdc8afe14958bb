"""The value that describes one model family."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.kv_groups import LayerKV
from trimtab_modelspec.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A model family: configuration parser and checkpoint layout."""

    architectures: tuple[str, ...]
    """Its architecture names in config.json."""
    multimodal: tuple[str, ...] = ()
    """Architectures that also accept images: config.json nests the language model in `text_config`."""
    parse: Callable[[ConfigReader], ModelConfig]
    """Reads config.json. Raises ModelError if a value is missing, malformed or not supported."""
    tensors: Callable[[ModelConfig], Tensors]
    """Every tensor that a checkpoint must hold, and no other."""
    kv: Callable[[ModelConfig], Sequence[LayerKV]]
    """KV layout per layer."""
