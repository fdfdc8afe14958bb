"""Parsing of `quantization_config` of compressed-tensors, and of per-tensor scales by AutoFP8 (quant_method fp8 without
blocks) and ModelOpt. Reads values, no tensors. Unsupported values are rejected by name.
"""

import re
from collections.abc import Mapping
from typing import Any, cast, get_args

from trimtab_modelspec.errors import ModelError
from trimtab_modelspec.scaled_format import LINEAR, PATTERN, Numbers, ScaledFormat, Scheme, Strategy

METHOD = "compressed-tensors"
FP8_BY_TENSOR = "fp8-tensor"
"""Name in model facts for quant_method fp8 without blocks."""
MODELOPT = "modelopt"
FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
MIXED_FORMAT = "mixed-precision"
"""Format value if groups have their own formats."""
ACTIVATION_SCHEMES = ("static", "dynamic")
ORDERED = ("group", "dynamic", True)
"""Values of `actorder` with a stored weight_g_idx."""
UNORDERED = (None, False, "weight", "static")
MODELOPT_ALGORITHMS = ("FP8",)


def compressed_tensors(scheme: Mapping[str, Any], where: str) -> ScaledFormat:
    """Return the quantization format of a checkpoint.

    Raises:
        ModelError: If it is not supported.
    """
    section = _Words(scheme, f"{where}: quantization_config")
    whole_format = scheme.get("format")
    if whole_format not in (*FORMATS, MIXED_FORMAT):
        raise section.not_built("format", whole_format, FORMATS)
    sparsity = scheme.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise section.not_built("sparsity_config", sparsity, ("dense",))
    if scheme.get("transform_config"):
        raise ModelError(
            f"{section.where}: transform_config is not supported: activations would have to be transformed; use a "
            f"checkpoint "
            f"without transforms"
        )
    groups = scheme.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError(f"{section.where}: config_groups is {groups!r:.100}; an object of groups is needed")
    found = tuple(
        _group(group, f"{section.where}: config_groups: {name}", whole_format) for name, group in groups.items()
    )
    return ScaledFormat(METHOD, found, section.names("ignore"))


def fp8_by_tensor(scheme: Mapping[str, Any], where: str) -> ScaledFormat:
    """quant_method fp8 with one scale per weight."""
    section = _Words(scheme, f"{where}: quantization_config")
    activations = scheme.get("activation_scheme", "dynamic")
    if activations not in ACTIVATION_SCHEMES:
        raise section.not_built("activation_scheme", activations, ACTIVATION_SCHEMES)
    for key, built in (("fmt", "e4m3"), ("scale_fmt", None)):
        if scheme.get(key, built) != built:
            raise section.not_built(key, scheme[key], (built,))
    ignored = section.names("ignored_layers") + section.names("modules_to_not_convert")
    return ScaledFormat(FP8_BY_TENSOR, (((LINEAR,), Scheme("float", 8, "tensor")),), ignored)


def modelopt(scheme: Mapping[str, Any], where: str) -> ScaledFormat:
    """ModelOpt's FP8, with one scale per weight."""
    section = _Words(scheme, f"{where}: quantization_config")
    algorithm = scheme.get("quant_algo")
    if algorithm not in MODELOPT_ALGORITHMS:
        raise section.not_built("quant_algo", algorithm, MODELOPT_ALGORITHMS)
    ignored = section.names("ignore") + section.names("exclude_modules")
    return ScaledFormat(MODELOPT, (((LINEAR,), Scheme("float", 8, "tensor")),), ignored, has_wildcards=True)


class _Words:
    """Typed access to one object, with errors that name the location."""

    def __init__(self, words: Mapping[str, Any], where: str) -> None:
        self._words, self.where = words, where

    def names(self, key: str) -> tuple[str, ...]:
        """Return a list of names and patterns, () where there is none."""
        value = self._words.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ModelError(f"{self.where}: {key} is {value!r:.100}; a list of names is needed")
        for name in value:
            _check_pattern(name, f"{self.where}: {key}")
        return tuple(value)

    def not_built(self, key: str, value: object, built: tuple[object, ...]) -> ModelError:
        return ModelError(
            f"{self.where}: {key} {value!r:.100} is not supported; supported: {', '.join(map(str, built))}"
        )


def _check_pattern(name: str, where: str) -> None:
    if name.startswith(PATTERN):
        try:
            re.compile(name.removeprefix(PATTERN))
        except re.error as error:
            raise ModelError(f"{where}: {name!r:.100} is no regular expression: {error}") from None


def _group(group: object, where: str, whole_format: str) -> tuple[tuple[str, ...], Scheme]:
    """(targets, scheme) of one of config_groups."""
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise ModelError(f"{where} is {group!r:.100}; an object with targets and weights is needed")
    section = _Words(group, where)
    own_format = group.get("format") or whole_format
    if own_format not in FORMATS:
        raise section.not_built("format", own_format, FORMATS)
    targets = section.names("targets")
    if not targets:
        raise ModelError(f"{where}: targets is {group.get('targets')!r:.100}; a list of names is needed")
    activations = group.get("input_activations")
    if activations is not None and (not isinstance(activations, Mapping) or activations.get("num_bits", 8) != 8):
        raise section.not_built("input_activations", activations, ("8 bits", "none"))
    if group.get("output_activations") is not None:
        raise section.not_built("output_activations", group["output_activations"], ("none",))
    return targets, _scheme(group["weights"], f"{where}: weights", is_packed=own_format == "pack-quantized")


def _scheme(weights: Mapping[str, Any], where: str, *, is_packed: bool) -> Scheme:
    section = _Words(weights, where)
    numbers, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    if numbers not in get_args(Numbers):
        raise section.not_built("type", numbers, get_args(Numbers))
    built_bits = (8,) if numbers == "float" else (4, 8)
    if bits not in built_bits or isinstance(bits, bool):
        raise section.not_built("num_bits", bits, built_bits)
    if numbers == "float" and is_packed:
        raise section.not_built("type", numbers, ("int, in the format pack-quantized",))
    if weights.get("dynamic"):
        raise section.not_built("dynamic", weights["dynamic"], (False,))
    size, strategy = _group_size(weights, section), weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if "group_size" not in weights or weights["group_size"] is None else "group"
        strategy = "channel" if weights.get("group_size") == -1 else strategy
    if strategy not in get_args(Strategy):
        raise section.not_built("strategy", strategy, get_args(Strategy))
    if strategy == "group" and size is None:
        raise ModelError(f"{where}: group_size is {weights.get('group_size')!r}; a whole number of 1 or more is needed")
    is_symmetric = weights.get("symmetric", True)
    if not isinstance(is_symmetric, bool) or (numbers == "float" and not is_symmetric):
        raise section.not_built("symmetric", is_symmetric, (True,))
    order = weights.get("actorder")
    if order not in (*ORDERED, *UNORDERED):
        raise section.not_built("actorder", order, ("group", "weight", "null"))
    return Scheme(
        numbers,
        bits,
        cast("Strategy", strategy),
        group_size=size if strategy == "group" else None,
        block=_block(weights, section) if strategy == "block" else None,
        is_symmetric=is_symmetric,
        is_packed=is_packed,
        is_ordered=strategy == "group" and order in ORDERED,
    )


def _group_size(weights: Mapping[str, Any], section: _Words) -> int | None:
    size = weights.get("group_size")
    if size is None or size == -1:
        return None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ModelError(f"{section.where}: group_size is {size!r}; a whole number of 1 or more is needed, or -1")
    return size


def _block(weights: Mapping[str, Any], section: _Words) -> tuple[int, int]:
    """Return a block given as a list or as 128x128."""
    block: Any = weights.get("block_structure")
    if isinstance(block, str) and re.fullmatch(r"[0-9]+x[0-9]+", block):
        block = [int(extent) for extent in block.split("x")]
    extents = block if isinstance(block, list) and len(block) == 2 else [0]
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in extents):
        raise ModelError(
            f"{section.where}: block_structure is {block!r:.100}; two whole numbers of 1 or more are needed"
        )
    return block[0], block[1]
