"""Storage formats of scaled quantized weights in a checkpoint, from its config.json."""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

Numbers = Literal["float", "int"]
Strategy = Literal["tensor", "channel", "group", "block"]
SCALE_BYTES = 2
"""Bytes of a scale in most checkpoints; not for per-tensor scales."""
LINEAR = "Linear"
"""The class of modules that most targets name."""
NO_LINEAR = ("embed_tokens", "norm")
"""Name suffixes of modules with weights that are not linear layers."""
PATTERN = "re:"


@dataclass(frozen=True, slots=True)
class Scheme:
    """A format of weights [out, in]: number * scale, or (number - zero point) * scale."""

    numbers: Numbers
    bits: int
    strategy: Strategy
    """Granularity of scales: tensor, output channel, input group, or block."""
    group_size: int | None = None
    """Inputs of a group."""
    block: tuple[int, int] | None = None
    """Outputs and inputs of a block."""
    is_symmetric: bool = True
    """There are no zero points."""
    is_packed: bool = False
    """True if integers are packed in 32-bit words."""
    is_ordered: bool = False
    """True if inputs were quantized in the permuted order of weight_g_idx."""

    def scales_shape(self, out: int, size: int) -> tuple[int, ...]:
        """Return the shape of the scales of a weight [out, size]."""
        if self.strategy == "tensor":
            return (1,)
        if self.strategy == "block":
            assert self.block is not None
            return -(-out // self.block[0]), -(-size // self.block[1])
        return out, 1 if self.group_size is None else -(-size // self.group_size)

    def stored_bytes(self, out: int, size: int) -> int:
        """Return the bytes of a weight [out, size] with scales and zero points."""
        count = 1
        for extent in self.scales_shape(out, size):
            count *= extent
        zeros = 0 if self.is_symmetric else -(-count * self.bits // 8)
        return out * size * self.bits // 8 + count * SCALE_BYTES + zeros

    @property
    def word(self) -> str:
        """Description for messages."""
        return f"{self.numbers}{self.bits} by {self.strategy}"


@dataclass(frozen=True, slots=True)
class ScaledFormat:
    """Formats of a checkpoint's weights, by module."""

    name: str
    """The method, as facts and logs call it."""
    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    """(targets, the scheme of the modules that they name)."""
    ignored: tuple[str, ...] = ()
    """Modules that are stored as they are."""
    has_wildcards: bool = False
    """Ignored names may have * in them (ModelOpt's)."""

    def scheme_of(self, module: str) -> Scheme | None:
        """Return a module's format by its name. None if it is not quantized."""
        if any(self._is_ignored(module, entry) for entry in self.ignored):
            return None
        return self.target_of(module)

    def target_of(self, module: str) -> Scheme | None:
        """Return a module's format regardless of `ignored`. Names take precedence over classes."""
        named = [
            (is_class, scheme)
            for targets, scheme in self.groups
            for target in targets
            if ((is_class := target == LINEAR) and _is_linear(module)) or _matches(module, target)
        ]
        return min(named, key=lambda found: found[0])[1] if named else None

    def _is_ignored(self, module: str, entry: str) -> bool:
        if self.has_wildcards and "*" in entry:
            return fnmatchcase(module, entry)
        return _matches(module, entry) or (self.has_wildcards and module.startswith(f"{entry}."))

    @property
    def words(self) -> str:
        """Description for messages."""
        schemes = " and ".join(dict.fromkeys(scheme.word for _, scheme in self.groups))
        return f"{schemes}, activations as they are"


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """gpt-oss's format: experts in 4-bit numbers (e2m1) with a scale (e8m0) per 32 inputs, the rest unquantized."""

    name: str = "mxfp4"
    words: ClassVar[str] = "4 bits, experts only"

    @staticmethod
    def stored_bytes(out: int, size: int) -> int:
        """Return the bytes of a weight [out, size] with its scales."""
        return out * size // 2 + out * (size // 32)


def _is_linear(module: str) -> bool:
    return not module.endswith(NO_LINEAR)


def _matches(module: str, entry: str) -> bool:
    if entry.startswith(PATTERN):
        return re.match(entry.removeprefix(PATTERN), module) is not None
    return module == entry
