"""AWQ and GPTQ weights (4-bit integers), shown under their original names and shapes: as blocks for the CPU's compiled
matmuls, or dequantised to float32.

```
            AWQ                            GPTQ
X.qweight   [in, out / 8] int32            [in / 8, out] int32           eight integers of 4 bits in a word
X.qzeros    [groups, out / 8] int32        [groups, out / 8] int32       zero points; GPTQ's are stored less 1
X.scales    [groups, out]                  [groups, out]
X.g_idx                                    [in] int32                    the group of each input
```

From the lowest bits on, a word's integers are values 0, 1, 2, ... in GPTQ, and outputs 0, 2, 4, 6, 1, 3, 5, 7 in
AWQ. weight = (integer - zero) * scale.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trimtab_modelspec.four_bit_format import FourBits

from trimtab_engine.errors import ModelError
from trimtab_engine.weights.integer_part import (
    BLOCK,
    BLOCK_BYTES,
    MIDDLE,
    ZEROS_BYTES,
    IntegerPart,
    check_numbers,
    in_blocks,
)
from trimtab_engine.weights.packing import Packing
from trimtab_engine.weights.source import Span, WeightSource

if TYPE_CHECKING:
    import torch
    from trimtab_kernels.native.quantised import QuantisedBlocks

IN_A_WORD = 8
PLACES_OF_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
"""Bit position of each of eight adjacent values in a word."""
WEIGHT, INTEGERS, ZEROS, SCALES, GROUPS = ".weight", ".qweight", ".qzeros", ".scales", ".g_idx"


class FourBitsSource:
    """Wrapper of another source that shows tensors stored in four parts as one."""

    def __init__(self, stored: WeightSource, form: FourBits) -> None:
        self._stored, self._form = stored, form
        self.format = stored.format
        shapes = stored.shapes()
        self._stems = [name.removesuffix(INTEGERS) for name in shapes if name.endswith(INTEGERS)]
        parts = {stem + part for stem in self._stems for part in (INTEGERS, ZEROS, SCALES, GROUPS)}
        self._shapes = {name: shape for name, shape in shapes.items() if name not in parts}
        self._shapes |= {stem + WEIGHT: self._checked_shape(stem) for stem in self._stems}
        self._packed = {stem + WEIGHT: stem for stem in self._stems}

    @property
    def stored(self) -> WeightSource:
        """The source of the parts."""
        return self._stored

    @property
    def form(self) -> FourBits:
        """Storage layout of the integers."""
        return self._form

    @property
    def config(self) -> Mapping[str, Any]:
        """See WeightSource."""
        return self._stored.config

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """See WeightSource."""
        return self._stored.generation_config

    @property
    def where(self) -> str:
        """See WeightSource."""
        return self._stored.where

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See WeightSource; for a tensor in four parts, the weight's."""
        return self._shapes

    def map_files(self) -> None:
        """See WeightSource."""
        self._stored.map_files()

    def is_in_words(self, name: str) -> bool:
        """Return True if this weight is stored as 4-bit integers."""
        return name in self._packed

    @property
    def is_in_blocks(self) -> bool:
        """Return True if groups are whole blocks, according to config.json."""
        size = self._form.group_size
        return size is None or size % BLOCK == 0

    def packing(self, name: str, columns: Span | None = None) -> Packing | None:
        """Return the packing with which these columns of a tensor are multiplied as stored, or None."""
        stem = self._packed.get(name)
        if stem is None or not self.is_in_blocks:
            return None
        span = columns or (0, self._shapes[name][1])
        if span[0] % BLOCK or span[1] % BLOCK:
            return None
        order = None
        if stem + GROUPS in self._stored.shapes():
            order, groups = in_blocks(self._groups(stem, span))
            if groups is None:
                return None
        kind, size = ("Q4_0", BLOCK_BYTES[4]) if self._form.is_symmetric else ("zeros", ZEROS_BYTES)
        return Packing(kind, size / BLOCK, None if order is None else order.numpy().tobytes())

    def quantised_type(self, name: str) -> str | None:
        """Return the name of a weight stored as 4-bit integers, or None for other tensors."""
        return self._form.name if name in self._packed else None

    def blocks(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> "QuantisedBlocks | None":
        """A matrix in blocks, or a part of it. None where it is not multiplied so: see `packing`, and scales that
        float16 does not hold.
        """
        stem = self._packed.get(name)
        if stem is None or not self.is_in_blocks or any(column % BLOCK for column in columns or ()):
            return None
        return self._part(stem, rows, columns).blocks()

    def tensor(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> "torch.Tensor":
        """See WeightSource; tensors in four parts become float32."""
        stem = self._packed.get(name)
        if stem is None:
            return self._stored.tensor(name, rows=rows, columns=columns)
        return self._part(stem, rows, columns).restored()

    def _checked_shape(self, stem: str) -> tuple[int, int]:
        """The weight's. Raises ModelError where its parts do not fit each other."""
        shapes = self._stored.shapes()
        if len(shapes[stem + INTEGERS]) != 2:
            raise ModelError(f"{self.where}: {stem + INTEGERS} is {list(shapes[stem + INTEGERS])}; a matrix is needed")
        first, second = shapes[stem + INTEGERS]
        is_awq = self._form.name == "awq"
        rows, columns = (second * IN_A_WORD, first) if is_awq else (second, first * IN_A_WORD)
        groups = 1 if self._form.group_size is None else -(-columns // self._form.group_size)
        needed: dict[str, tuple[int, ...]] = {SCALES: (groups, rows), ZEROS: (groups, -(-rows // IN_A_WORD))}
        if not is_awq and stem + GROUPS in shapes:
            needed[GROUPS] = (columns,)
        for part, shape in needed.items():
            found = shapes.get(stem + part)
            if found != shape:
                said = "missing" if found is None else f"{list(found)}"
                raise ModelError(f"{self.where}: {stem + part} is {said}; {list(shape)} is needed with {INTEGERS[1:]}")
        return rows, columns

    def _part(self, stem: str, rows: Span | None, columns: Span | None) -> IntegerPart:
        height, width = self._shapes[stem + WEIGHT]
        rows, columns = rows or (0, height), columns or (0, width)
        groups = self._groups(stem, columns)
        first = int(groups.min()) if len(groups) else 0
        last = int(groups.max()) + 1 if len(groups) else 0
        held = self._stored.shapes()[stem + SCALES][0]
        if first < 0 or last > held:
            raise ModelError(f"{self.where}: {stem + GROUPS} names groups {first} to {last - 1}; there are {held}")
        scales = self._stored.tensor(stem + SCALES, rows=(first, last), columns=rows)
        check_numbers(scales, stem + SCALES, self.where)
        zeros = self._zeros(stem, rows, (first, last))
        is_even = self._form.is_symmetric and bool((zeros == MIDDLE).all())
        return IntegerPart(self._integers(stem, rows, columns), scales.t(), None if is_even else zeros, groups - first)

    def _groups(self, stem: str, columns: Span) -> "torch.Tensor":
        """The group of each of these columns."""
        import torch

        if stem + GROUPS in self._stored.shapes():
            return self._stored.tensor(stem + GROUPS, rows=columns).long()
        size = self._form.group_size
        inputs = torch.arange(*columns)
        return torch.zeros_like(inputs) if size is None else inputs // size

    def _integers(self, stem: str, rows: Span, columns: Span) -> "torch.Tensor":
        """[rows, columns] uint8."""
        if self._form.name == "awq":
            return self._neighbours(stem + INTEGERS, columns, rows).t()
        first, last = words_of(columns)
        words = self._stored.tensor(stem + INTEGERS, rows=(first, last), columns=rows)
        every = integers_of(words).permute(1, 0, 2).reshape(rows[1] - rows[0], -1)
        begin = columns[0] - first * IN_A_WORD
        return every[:, begin : begin + columns[1] - columns[0]]

    def _zeros(self, stem: str, rows: Span, groups: Span) -> "torch.Tensor":
        """[rows, groups] uint8."""
        return (self._neighbours(stem + ZEROS, groups, rows).t() + self._form.zero_offset) & 15

    def _neighbours(self, name: str, lines: Span, outputs: Span) -> "torch.Tensor":
        """Return [lines, outputs] uint8 of a tensor whose words pack adjacent outputs."""
        first, last = words_of(outputs)
        every = integers_of(self._stored.tensor(name, rows=lines, columns=(first, last)))
        if self._form.name == "awq":
            every = every[..., PLACES_OF_AWQ]
        begin = outputs[0] - first * IN_A_WORD
        return every.reshape(lines[1] - lines[0], -1)[:, begin : begin + outputs[1] - outputs[0]]


def words_of(span: Span) -> Span:
    """Return the words that contain these values."""
    return span[0] // IN_A_WORD, -(-span[1] // IN_A_WORD)


def integers_of(words: "torch.Tensor") -> "torch.Tensor":
    """[lines, words] int32 -> [lines, words, 8] uint8, the lowest bits first."""
    import torch

    bytes_ = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1).flatten(-2)
