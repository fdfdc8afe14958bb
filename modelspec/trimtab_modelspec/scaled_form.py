"""How weights with scales beside them lie in a checkpoint, by its config.json: for who parses that and for who reads
them.
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

Numbers = Literal["float", "int"]
Strategy = Literal["tensor", "channel", "group", "block"]
SCALE_BYTES = 2
"""Of a scale, as most checkpoints store them; of one per tensor it says nothing."""
LINEAR = "Linear"
"""The class of modules that most targets name."""
NO_LINEAR = ("embed_tokens", "norm")
"""How the names of modules end that have weights and are none."""
PATTERN = "re:"


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way in which weights [out, in] are stored: number * scale, or (number - zero point) * scale."""

    numbers: Numbers
    bits: int
    strategy: Strategy
    """What has a scale: all of it, an output, a group of an output's inputs, or a block of both."""
    group_size: int | None = None
    """Inputs of a group."""
    block: tuple[int, int] | None = None
    """Outputs and inputs of a block."""
    is_symmetric: bool = True
    """There are no zero points."""
    is_packed: bool = False
    """Integers lie in words of 32 bits."""
    is_ordered: bool = False
    """Inputs were quantised in an order of their own, which weight_g_idx says."""

    def scales_shape(self, out: int, size: int) -> tuple[int, ...]:
        """Of the scales of a weight [out, size]."""
        if self.strategy == "tensor":
            return (1,)
        if self.strategy == "block":
            assert self.block is not None
            return -(-out // self.block[0]), -(-size // self.block[1])
        return out, 1 if self.group_size is None else -(-size // self.group_size)

    def stored_bytes(self, out: int, size: int) -> int:
        """Of a weight [out, size] with its scales and zero points."""
        count = 1
        for extent in self.scales_shape(out, size):
            count *= extent
        zeros = 0 if self.is_symmetric else -(-count * self.bits // 8)
        return out * size * self.bits // 8 + count * SCALE_BYTES + zeros

    @property
    def word(self) -> str:
        """In people's words."""
        return f"{self.numbers}{self.bits} by {self.strategy}"


@dataclass(frozen=True, slots=True)
class ScaledForm:
    """All ways in which a checkpoint's weights are stored, and whose each is."""

    name: str
    """The method, as facts and logs call it."""
    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    """(targets, the scheme of the modules that they name)."""
    ignored: tuple[str, ...] = ()
    """Modules that are stored as they are."""
    has_wildcards: bool = False
    """Ignored names may have * in them (ModelOpt's)."""

    def scheme_of(self, module: str) -> Scheme | None:
        """By its name; None: it is stored as it is."""
        if any(self._is_ignored(module, entry) for entry in self.ignored):
            return None
        return self.target_of(module)

    def target_of(self, module: str) -> Scheme | None:
        """The same of a module that is not ignored, whatever `ignored` says. Names go before classes."""
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
        """What is stored, in people's words."""
        schemes = " and ".join(dict.fromkeys(scheme.word for _, scheme in self.groups))
        return f"{schemes}, activations as they are"


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """gpt-oss's: experts in numbers of 4 bits (e2m1) with a scale (e8m0) per 32 inputs, all else as it is."""

    name: str = "mxfp4"
    words: ClassVar[str] = "4 bits, of experts alone"

    @staticmethod
    def stored_bytes(out: int, size: int) -> int:
        """Of a weight [out, size] with its scales."""
        return out * size // 2 + out * (size // 32)


def _is_linear(module: str) -> bool:
    return not module.endswith(NO_LINEAR)


def _matches(module: str, entry: str) -> bool:
    if entry.startswith(PATTERN):
        return re.match(entry.removeprefix(PATTERN), module) is not None
    return module == entry
