"""The value that describes one model family."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.kv_groups import LayerKV
from trimtab_modelspec.tensors import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One family of models, as far as configuration and checkpoint layout go."""

    architectures: tuple[str, ...]
    """Its names in config.json."""
    multimodal: tuple[str, ...] = ()
    """The architectures whose checkpoints also take images: config.json nests the language model in `text_config`."""
    parse: Callable[[ConfigReader], ModelConfig]
    """Reads config.json. Raises ModelError if a value is missing, malformed or not supported."""
    tensors: Callable[[ModelConfig], Tensors]
    """Every tensor that a checkpoint must hold, and no other."""
    kv: Callable[[ModelConfig], Sequence[LayerKV]]
    """What each layer keeps of a token."""
