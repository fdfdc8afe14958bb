"""Quantization of a model's linear layers: from a checkpoint's config.json, and by --quantization. Values only.

Supported: block fp8 (DeepSeek-V3, arXiv:2412.19437, section 3.3): float8_e4m3 weights with a float32 scale per 128 x
128 block, activations quantized per token and 128 columns at run time. Stored in checkpoints: 4-bit integers of AWQ
(arXiv:2306.00978) and GPTQ (arXiv:2210.17323), scaled float8 and integers of compressed-tensors, AutoFP8 and ModelOpt,
and gpt-oss's experts in mxfp4. Everything else is rejected by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from trimtab_modelspec.compressed_tensors import METHOD as COMPRESSED_TENSORS
from trimtab_modelspec.compressed_tensors import MODELOPT, compressed_tensors, fp8_by_tensor, modelopt
from trimtab_modelspec.errors import ConfigError, ModelError, NotSupportedError
from trimtab_modelspec.four_bit_format import FourBits
from trimtab_modelspec.scaled_format import Mxfp4, ScaledFormat

METHODS = ("fp8",)
"""Formats that --quantization produces."""
FOUR_BIT_METHODS = ("awq", "gptq")
MXFP4 = "mxfp4"
StoredForm = FourBits | ScaledFormat | Mxfp4
"""Forms that are read as they are and multiplied so by the CPU's compiled products, or restored as they load."""
BLOCK = 128
"""Rows and columns of a block."""
SCALE_SUFFIX = "_scale_inv"
"""Suffix of a weight's scales, which restore it by multiplication."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """Block fp8. `is_stored`: the checkpoint holds float8 and scales; else the weights are quantised as they load."""

    is_stored: bool
    name: ClassVar[str] = "fp8"

    @property
    def weight_bytes(self) -> float:
        """Bytes per parameter of a linear layer."""
        return 1 + 4 / BLOCK**2


def stored_format(config: Mapping[str, Any], where: str) -> Quantization | StoredForm | None:
    """Return the format in `quantization_config`. None without one.

    Raises:
        ModelError: If it is not supported.
    """
    scheme = config.get("quantization_config")
    if scheme is None:
        return None
    if not isinstance(scheme, Mapping):
        raise ModelError(f"{where}: quantization_config is {scheme!r}; an object is needed")
    method = scheme.get("quant_method")
    if method in FOUR_BIT_METHODS:
        return _four_bits(method, scheme, where)
    if method == COMPRESSED_TENSORS:
        return compressed_tensors(scheme, where)
    if method == MODELOPT:
        return modelopt(scheme, where)
    if method == MXFP4:
        return Mxfp4()
    if method not in METHODS:
        built = ("fp8", *FOUR_BIT_METHODS, COMPRESSED_TENSORS, MODELOPT, f"{MXFP4} (of gpt-oss)")
        raise ModelError(
            f"{where}: quantization_config: quant_method {method!r} is not supported; supported: {', '.join(built)}"
        )
    block = scheme.get("weight_block_size")
    if block is None:
        return fp8_by_tensor(scheme, where)
    if block != [BLOCK, BLOCK]:
        raise ModelError(
            f"{where}: quantization_config: fp8 with weight_block_size {block} is not supported, only [{BLOCK}, "
            f"{BLOCK}]"
        )
    _check_words(scheme, where, (("activation_scheme", ("dynamic",)), ("fmt", ("e4m3",)), ("scale_fmt", (None,))))
    return Quantization(is_stored=True)


def check_unquantised(config: Mapping[str, Any], architecture: object, where: str, *, but: str | None = None) -> None:
    """Check that `quantization_config` has no method but `but`, for families with stacked experts.

    Raises:
        ModelError: For any other method.
    """
    scheme = config.get("quantization_config")
    if scheme:
        method = scheme.get("quant_method") if isinstance(scheme, Mapping) else scheme
        if method is not None and method == but:
            return
        also = "" if but is None else f", or the published one in {but}"
        raise ModelError(
            f"{where}: quantization_config: quant_method {method!r} is not supported for {architecture}, whose "
            f"experts are stacked in one tensor; use an unquantized checkpoint{also}"
        )


def check_not_mxfp4(config: Mapping[str, Any], architecture: object, where: str) -> None:
    """Raise ModelError if a family with separate experts has mxfp4 experts."""
    if isinstance(stored_format(config, where), Mxfp4):
        raise ModelError(
            f"{where}: quantization_config: quant_method {MXFP4!r} is not supported for {architecture}, only for "
            f"gpt-oss; "
            f"use a checkpoint with its weights as they are"
        )


def stored_quantization(config: Mapping[str, Any], where: str) -> Quantization | None:
    """Return the block fp8 of a checkpoint, None where its weights are stored otherwise. Raises ModelError likewise."""
    form = stored_format(config, where)
    return form if isinstance(form, Quantization) else None


def _four_bits(method: str, scheme: Mapping[str, Any], where: str) -> FourBits:
    """Return AWQ's or GPTQ's format, with transformers' defaults of each."""
    _check_words(scheme, where, (("bits", (4,)),))
    size = scheme.get("group_size", 128)
    if isinstance(size, bool) or not isinstance(size, int) or (size != -1 and size < 1):
        raise ModelError(f"{where}: quantization_config: group_size is {size!r}; a whole number, or -1 for all inputs")
    group_size = None if size == -1 else size
    if method == "awq":
        _check_words(scheme, where, (("version", ("gemm", "GEMM")), ("zero_point", (True,))))
        return FourBits(method, group_size)
    _check_words(
        scheme,
        where,
        (("checkpoint_format", ("gptq", "gptq_v2")), ("is_marlin_format", (False,)), ("dynamic", (None, {}))),
    )
    return FourBits(
        method,
        group_size,
        is_symmetric=bool(scheme.get("sym", True)),
        is_ordered=bool(scheme.get("desc_act", False)) and not scheme.get("static_groups", False),
        zero_offset=int(scheme.get("checkpoint_format", "gptq") == "gptq"),
    )


def _check_words(scheme: Mapping[str, Any], where: str, words: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
    """Raise ModelError for unsupported values; the first supported value is the default."""
    for key, built in words:
        value = scheme.get(key, built[0])
        if value not in built or isinstance(value, bool) != isinstance(built[0], bool):
            raise ModelError(f"{where}: quantization_config: {key} {value!r} is not supported, only {built[0]!r}")


def wanted_quantization(stored: Quantization | None, asked: str | None, *, has_weights: bool) -> Quantization | None:
    """Return the engine's quantization: the stored one, else the requested one. `has_weights`: False for dummy weights,
    which have no stored format.

    Raises:
        ConfigError: If both conflict.
    """
    if asked is not None:
        check_method(asked)
    if stored is None and asked is None:
        return None
    return stored if stored is not None and has_weights else Quantization(is_stored=False)


def check_method(method: str) -> None:
    """Raise NotSupportedError, by name, for another --quantization than fp8."""
    if method not in METHODS:
        raise NotSupportedError(f"--quantization {method[:40]} is not supported; supported: {', '.join(METHODS)}")


def check_aligned(what: str, span: tuple[int, int], total: int) -> None:
    """Raise ConfigError where a rank's part of a stored weight cuts a block: its scale would be of two ranks."""
    first, last = span
    if first % BLOCK or (last % BLOCK and last != total):
        raise ConfigError(
            f"{what}: {total} rows or columns are split at {first} and {last}, inside an fp8 block of {BLOCK}; use a "
            f"--tensor-parallel-size (or --enable-expert-parallel) whose parts are multiples of {BLOCK}"
        )
