"""How a model's linear layers are stored: what a checkpoint's config.json says, and what --quantization asks for. Reads
values, knows no tensor.

Built is block fp8 (DeepSeek-V3's form, arXiv:2412.19437, section 3.3): float8_e4m3 weights with a float32 scale per
block of 128 x 128, activations quantised per token and 128 columns as they come. Everything else is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab_engine.errors import ConfigError, ModelError, NotBuiltError

METHODS = ("fp8",)
BLOCK = 128
"""Rows and columns of a block."""
SCALE_SUFFIX = "_scale_inv"
"""Behind a weight's name: its scales, by which it is multiplied to get it back."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Block fp8. `is_stored`: the checkpoint holds float8 and scales; else the weights are quantised as they load."""

    is_stored: bool

    @property
    def weight_bytes(self) -> float:
        """Bytes per parameter of a linear layer."""
        return 1 + 4 / BLOCK**2


def stored_quantization(config: Mapping[str, Any], where: str) -> Quantization | None:
    """What `quantization_config` says; None where there is none. Raises ModelError for what is not built."""
    scheme = config.get("quantization_config")
    if scheme is None:
        return None
    if not isinstance(scheme, Mapping):
        raise ModelError(f"{where}: quantization_config is {scheme!r}; an object is needed")
    method = scheme.get("quant_method")
    if method not in METHODS:
        raise ModelError(f"{where}: quantization_config: quant_method {method!r} is not built; built: fp8 in blocks")
    block = scheme.get("weight_block_size")
    if block != [BLOCK, BLOCK]:
        raise ModelError(
            f"{where}: quantization_config: fp8 with weight_block_size {block} is not built, only [{BLOCK}, {BLOCK}]"
        )
    for key, built in (("activation_scheme", "dynamic"), ("fmt", "e4m3"), ("scale_fmt", None)):
        if scheme.get(key, built) != built:
            raise ModelError(f"{where}: quantization_config: {key} {scheme[key]!r} is not built, only {built!r}")
    return Quantization(is_stored=True)


def wanted_quantization(stored: Quantization | None, asked: str | None, *, has_weights: bool) -> Quantization | None:
    """What the engine runs with: what is stored, else what was asked for. `has_weights`: False for dummy weights, which
    nothing stores. Raises ConfigError."""
    if asked is not None:
        check_method(asked)
    if stored is None and asked is None:
        return None
    return stored if stored is not None and has_weights else Quantization(is_stored=False)


def check_method(method: str) -> None:
    """Raise NotBuiltError, by name, for another --quantization than fp8."""
    if method not in METHODS:
        raise NotBuiltError(f"--quantization {method[:40]} is not built; built: {', '.join(METHODS)}")


def check_aligned(what: str, span: tuple[int, int], total: int) -> None:
    """Raise ConfigError where a rank's part of a stored weight cuts a block: its scale would be of two ranks."""
    first, last = span
    if first % BLOCK or (last % BLOCK and last != total):
        raise ConfigError(
            f"{what}: {total} rows or columns are split at {first} and {last}, inside an fp8 block of {BLOCK}; use a "
            f"--tensor-parallel-size (or --enable-expert-parallel) whose parts are multiples of {BLOCK}"
        )
