"""Weights with scales beside them: what `quantization_config` says of compressed-tensors, of fp8 by tensor and of
ModelOpt, and how many bytes a projection takes so. The engine has the same rules (docs/guides/quantization.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

COMPRESSED_TENSORS, MODELOPT, FP8_BY_TENSOR = "compressed-tensors", "modelopt", "fp8-tensor"
SCALED_METHODS = (COMPRESSED_TENSORS, MODELOPT)
"""Words of quant_method; fp8 by tensor is fp8 without weight_block_size."""
FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
STRATEGIES = ("tensor", "channel", "group", "block")
ORDERS = ("group", "dynamic", True, None, False, "weight", "static")
SCALE_BYTES = 2
PATTERN, LINEAR = "re:", "Linear"


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """How the weights of some modules are stored."""

    targets: tuple[str, ...]
    bits: int
    strategy: str
    group_size: int | None
    """Inputs that share a scale; None: all."""
    block: tuple[int, int] | None
    is_symmetric: bool

    def num_bytes(self, out: int, size: int) -> int:
        """Of a weight [out, size] with its scales and zero points."""
        count = self._num_scales(out, size)
        zeros = 0 if self.is_symmetric else -(-count * self.bits // 8)
        return out * size * self.bits // 8 + count * SCALE_BYTES + zeros

    def _num_scales(self, out: int, size: int) -> int:
        if self.strategy == "tensor":
            return 1
        if self.block is not None:
            return -(-out // self.block[0]) * -(-size // self.block[1])
        return out if self.group_size is None else out * -(-size // self.group_size)


@dataclass(frozen=True, slots=True)
class ScaledWeights:
    """A checkpoint's. `is_built`: whether the engine reads them."""

    name: str
    groups: tuple[StoredGroup, ...]
    ignored: tuple[str, ...]
    is_built: bool

    def group_of(self, module: str) -> StoredGroup | None:
        """How a linear module is stored; None: as it is. Names go before classes."""
        if any(_is_ignored(module, entry, has_wildcards=self.name == MODELOPT) for entry in self.ignored):
            return None
        by_name = (group for group in self.groups if any(_matches(module, target) for target in group.targets))
        by_class = (group for group in self.groups if LINEAR in group.targets)
        return next(by_name, None) or next(by_class, None)


def scaled_weights(scheme: Mapping[str, Any]) -> ScaledWeights:
    """Of a quantization_config whose method is one of SCALED_METHODS, or fp8 without blocks. Raises ValueError for what
    is malformed, so that nothing could be counted."""
    method = scheme.get("quant_method")
    if method == COMPRESSED_TENSORS:
        return _compressed_tensors(scheme)
    by_tensor = StoredGroup((LINEAR,), 8, "tensor", None, None, is_symmetric=True)
    if method == MODELOPT:
        ignored = _names(scheme, "ignore") + _names(scheme, "exclude_modules")
        return ScaledWeights(MODELOPT, (by_tensor,), ignored, is_built=scheme.get("quant_algo") == "FP8")
    ignored = _names(scheme, "ignored_layers") + _names(scheme, "modules_to_not_convert")
    is_built = (
        scheme.get("activation_scheme", "dynamic") in ("static", "dynamic")
        and scheme.get("fmt", "e4m3") == "e4m3"
        and scheme.get("scale_fmt") is None
    )
    return ScaledWeights(FP8_BY_TENSOR, (by_tensor,), ignored, is_built)


def _compressed_tensors(scheme: Mapping[str, Any]) -> ScaledWeights:
    groups = scheme.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(
            f"config.json: quantization_config: config_groups is {groups!r:.100}; an object of groups is needed"
        )
    found = tuple(_group(str(name), group) for name, group in groups.items())
    sparsity = scheme.get("sparsity_config") or {}
    is_built = (
        scheme.get("format") in (*FORMATS, "mixed-precision")
        and isinstance(sparsity, Mapping)
        and sparsity.get("format", "dense") == "dense"
        and not scheme.get("transform_config")
        and all(_is_group_built(group, scheme.get("format")) for group in groups.values())
    )
    return ScaledWeights(COMPRESSED_TENSORS, found, _names(scheme, "ignore"), is_built)


def _group(name: str, group: object) -> StoredGroup:
    where = f"config.json: quantization_config: config_groups: {name}"
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        raise ValueError(f"{where} is {group!r:.100}; an object with targets and weights is needed")
    bits = weights.get("num_bits", 8)
    if not _is_count(bits) or bits > 16:
        raise ValueError(f"{where}: num_bits is {bits!r:.100}; a whole number of 1 to 16 is needed")
    size = weights.get("group_size")
    if size not in (None, -1) and not _is_count(size):
        raise ValueError(f"{where}: group_size is {size!r:.100}; a whole number of 1 or more is needed, or -1")
    strategy = _strategy(weights)
    block = _block(weights)
    if strategy == "block" and block is None:
        raise ValueError(
            f"{where}: block_structure is {weights.get('block_structure')!r:.100}; two whole numbers are needed"
        )
    return StoredGroup(
        targets=_names(group, "targets"),
        bits=bits,
        strategy=strategy,
        group_size=size if strategy == "group" and size not in (None, -1) else None,
        block=block if strategy == "block" else None,
        is_symmetric=weights.get("symmetric", True) is not False,
    )


def _strategy(weights: Mapping[str, Any]) -> str:
    said, size = weights.get("strategy"), weights.get("group_size")
    if said is None:
        return "tensor" if size is None else "channel" if size == -1 else "group"
    return str(said)


def _is_group_built(group: Mapping[str, Any], whole_format: object) -> bool:
    """Whether the engine reads one of config_groups, of which the numbers have been found in order."""
    weights, activations = group["weights"], group.get("input_activations")
    storage, numbers = group.get("format") or whole_format, weights.get("type", "int")
    is_float, strategy = numbers == "float", _strategy(weights)
    size, is_symmetric = weights.get("group_size"), weights.get("symmetric", True)
    return all(
        (
            storage in FORMATS,
            bool(group.get("targets")),
            activations is None or (isinstance(activations, Mapping) and activations.get("num_bits", 8) == 8),
            group.get("output_activations") is None,
            numbers in ("float", "int"),
            weights.get("num_bits", 8) in ((8,) if is_float else (4, 8)),
            not (is_float and storage == "pack-quantized"),
            not weights.get("dynamic"),
            strategy in STRATEGIES,
            strategy != "group" or size not in (None, -1),
            isinstance(is_symmetric, bool) and (is_symmetric or not is_float),
            weights.get("actorder") in ORDERS,
        )
    )


def _block(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    block = weights.get("block_structure")
    if isinstance(block, str) and re.fullmatch(r"[0-9]+x[0-9]+", block):
        block = [int(extent) for extent in block.split("x")]
    is_pair = isinstance(block, list) and len(block) == 2 and all(_is_count(extent) for extent in block)
    return (block[0], block[1]) if isinstance(block, list) and is_pair else None


def _names(words: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = words.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"config.json: quantization_config: {key} is {value!r:.100}; a list of names is needed")
    for name in value:
        _check_pattern(name, key)
    return tuple(value)


def _check_pattern(name: str, key: str) -> None:
    if name.startswith(PATTERN):
        try:
            re.compile(name.removeprefix(PATTERN))
        except re.error as error:
            raise ValueError(
                f"config.json: quantization_config: {key}: {name!r:.100} is no regular expression: {error}"
            ) from None


def _matches(module: str, entry: str) -> bool:
    if entry.startswith(PATTERN):
        return re.match(entry.removeprefix(PATTERN), module) is not None
    return module == entry


def _is_ignored(module: str, entry: str, *, has_wildcards: bool) -> bool:
    if has_wildcards and "*" in entry:
        return fnmatchcase(module, entry)
    return _matches(module, entry) or (has_wildcards and module.startswith(f"{entry}."))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1 << 40


Stored = Callable[[str, int, int], int | None]
"""(module, outputs, inputs) -> bytes of its weight; None: it is stored as it is."""


def bytes_of(weights: ScaledWeights) -> Stored:
    """What the weight of a linear module takes."""

    def stored(module: str, out: int, size: int) -> int | None:
        group = weights.group_of(module)
        return None if group is None else group.num_bytes(out, size)

    return stored


def mxfp4_bytes(module: str, out: int, size: int) -> int | None:
    """The same of gpt-oss: experts' numbers of 4 bits with a scale of 8 per 32."""
    return out * size // 2 + out * (size // 32) if ".experts." in module else None
