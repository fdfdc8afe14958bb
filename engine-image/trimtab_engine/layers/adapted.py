"""Low-rank adapters applied per row of a step: rows of requests with an adapter get  up (down x)  added, as if the
adapter were merged into the weight. The stored weight is unchanged, in any format.

On the CPU rows are grouped by adapter once per step, and each slot has its own memory. On CUDA kernels read each row's
slot (trimtab_kernels/lora.py), and a projection's slots are contiguous and padded to one LoRA rank: a captured graph
therefore works for any adapters. If a projection is divided over ranks, so is the factor on the divided side: `up` by
rows for divided outputs, `down` by columns for divided inputs, whose results are summed.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from trimtab_kernels.launch.jit import cdiv
from trimtab_kernels.lora import NONE, RANK_STEP, add_lora
from trimtab_kernels.native.matrix import PackedMatrix
from trimtab_kernels.rotary_embedding import interleave_pairs

from trimtab_engine.layers.linear import Linear
from trimtab_engine.layers.quantized import BlockFp8Linear, Projection
from trimtab_engine.weights.source import Span

Spans = Sequence[tuple[int, int, int]]
"""(first row, how many, slot of their adapter) of a step's rows, in their order."""
Rows = slice | torch.Tensor


class AdapterRows:
    """Assignment of adapters to the rows of the current step: set before a rank's layers run, read by all of them.

    `device`: where kernels read each row's slot; None if rows are grouped by adapter on the CPU.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self.slots: torch.Tensor | None = None
        """Slot of each row [rows] int32, for kernels, or NONE. None if no row has an adapter."""
        self._spans: Spans = ()
        self.groups: list[tuple[int, Rows]] = []
        """(slot, its rows) of the rows that are being computed. Empty: none of them has an adapter."""
        self._of_parts: dict[tuple[int, int], list[tuple[int, Rows]]] = {}

    @property
    def has_any(self) -> bool:
        """Return True if some rows being computed may have an adapter."""
        return self.slots is not None or bool(self.groups)

    @contextmanager
    def of_step(self, spans: Spans, num_rows: int = 0) -> Iterator[None]:
        """Context in which a step with these adapters is computed. `num_rows`: its number of rows including padding, if
        kernels read slots.
        """
        if self._device is not None:
            with self.of_slots(_slots(spans, num_rows).to(self._device) if spans else None):
                yield
            return
        self._spans, self.groups = spans, _grouped(spans) if spans else []
        try:
            yield
        finally:
            self._spans, self.groups = (), []
            self._of_parts.clear()

    @contextmanager
    def of_slots(self, slots: torch.Tensor | None) -> Iterator[None]:
        """Context in which rows with these slots are computed; None for rows without adapters."""
        before, self.slots = self.slots, slots
        try:
            yield
        finally:
            self.slots = before

    @contextmanager
    def of_part(self, first: int, count: int) -> Iterator[None]:
        """While it lasts only these rows of the step are computed, counted from the first of them."""
        if self.slots is not None:
            with self.of_slots(self.slots[first : first + count]):
                yield
            return
        if not self._spans:
            yield
            return
        whole, part = self.groups, (first, count)
        if part not in self._of_parts:
            self._of_parts[part] = _grouped(_cut(self._spans, first, first + count))
        self.groups = self._of_parts[part]
        try:
            yield
        finally:
            self.groups = whole


def _slots(spans: Spans, num_rows: int) -> torch.Tensor:
    """Row by row."""
    slots = torch.full((num_rows,), NONE, dtype=torch.int32)
    for first, count, slot in spans:
        slots[first : first + count] = slot
    return slots


def _cut(spans: Spans, first: int, last: int) -> Spans:
    """Return the part within [first, last), relative to first."""
    cut = [(max(first, start), min(last, start + count), slot) for start, count, slot in spans]
    return [(start - first, end - start, slot) for start, end, slot in cut if start < end]


def _grouped(spans: Spans) -> list[tuple[int, Rows]]:
    """Return row indices by slot. Contiguous rows are a slice, which copies nothing."""
    ranges: dict[int, list[range]] = {}
    for start, count, slot in spans:
        own = ranges.setdefault(slot, [])
        if own and own[-1].stop == start:
            own[-1] = range(own[-1].start, start + count)
        else:
            own.append(range(start, start + count))
    return [
        (
            slot,
            slice(own[0].start, own[0].stop) if len(own) == 1 else torch.tensor([row for part in own for row in part]),
        )
        for slot, own in ranges.items()
    ]


@dataclass(frozen=True, slots=True)
class AdaptedPart:
    """A module whose matmul is part of a projection's, on this rank."""

    name: str
    """The checkpoint's module name, such as model.layers.0.self_attn.q_proj."""
    rows: Span | None = None
    """Span of its outputs; None for all."""
    columns: Span | None = None
    """Span of its inputs; None for all."""
    pairs: int | None = None
    """Head size, where the outputs' rotary pairs are interleaved as the weight's are."""


@dataclass(frozen=True, slots=True)
class Factors:
    """down [rank, in_features]; up [out_features, rank], with the adapter's scale in it."""

    down: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True, slots=True)
class _SlotLayout:
    """Memory layout of one slot's factors of all parts: like Factors, with the highest rank."""

    down: torch.Tensor
    up: torch.Tensor


class AdaptedLinear:
    """A projection with room for adapters. Several modules in one matmul have concatenated factors: `down` one after
    another, `up` with zeros for other modules' outputs.
    """

    def __init__(
        self, base: Linear | BlockFp8Linear, parts: Sequence[AdaptedPart], rows: AdapterRows, num_rows: Sequence[int]
    ) -> None:
        """`num_rows`: how many outputs of the projection each part has."""
        self.base, self.parts, self._rows = base, parts, rows
        self._num_rows = num_rows
        self.native: PackedMatrix | None = base.native
        """The weight packed for the compiled operators, for steps without adapters."""
        self._rooms: dict[int, _SlotLayout] = {}
        self._factors: dict[int, Factors] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> as the projection."""
        groups = self._rows.groups
        added = [(own, rows) for slot, rows in groups if (own := self._factors.get(slot)) is not None] if groups else []
        if not added:
            return self.base(x)
        y = self.base.product(x)
        for own, rows in added:
            more = (x[rows] @ own.down.t()) @ own.up.t()
            if isinstance(rows, slice):
                y[rows] += more
            else:
                y.index_add_(0, rows, more)
        return self.base.finish(y)

    @property
    def sizes(self) -> dict[int, int]:
        """Numbers of the factors of each slot that a step multiplies with."""
        return {slot: own.down.numel() + own.up.numel() for slot, own in self._factors.items()}

    def reserve_slot(self, slot: int, rank: int, like: torch.Tensor) -> None:
        """Reserve memory for an adapter of at most this rank in each part. Its initial contribution is zero."""
        together = rank * len(self.parts)
        down = torch.zeros(together, self.base.in_features, dtype=like.dtype, device=like.device)
        up = torch.zeros(self.base.out_features, together, dtype=like.dtype, device=like.device)
        self._rooms[slot] = _SlotLayout(down, up)
        self._factors[slot] = Factors(down, up)

    def fill(self, slot: int, factors: Mapping[str, Factors]) -> None:
        """Have these factors in the slot's room, whole modules by name; modules that have none are not adapted."""
        own = [factors.get(part.name) for part in self.parts]
        if not any(own):
            self._factors.pop(slot, None)
            return
        room, rank, first_row = self._rooms[slot], 0, 0
        room.up.zero_()
        for part, num_rows, given in zip(self.parts, self._num_rows, own, strict=True):
            if given is not None:
                end = rank + given.down.shape[0]
                room.down[rank:end] = given.down[:, _slice(part.columns)]
                up = given.up[_slice(part.rows)]
                up = up if part.pairs is None else interleave_pairs(up.contiguous(), part.pairs)
                room.up[first_row : first_row + num_rows, rank:end] = up
                rank = end
            first_row += num_rows
        self._factors[slot] = Factors(room.down[:rank], room.up[:, :rank])


class StackedAdaptedLinear(AdaptedLinear):
    """Adapted projection for kernels: one launch multiplies all slots, with a slot index per row."""

    _down: torch.Tensor | None = None
    """[slots, rank, in_features]; None if no adapter is loaded."""
    _up: torch.Tensor | None = None
    """[slots, out_features, rank]"""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> as the projection."""
        slots = self._rows.slots
        if slots is None or self._down is None or self._up is None:
            return self.base(x)
        y = self.base.product(x)
        add_lora(y, x, self._down, self._up, slots)
        return self.base.finish(y)

    def reserve_slots(self, num_slots: int, rank: int, like: torch.Tensor) -> None:
        """Reserve memory for this number of adapters of at most this rank in each part."""
        together = cdiv(rank * len(self.parts), RANK_STEP) * RANK_STEP
        sizes = (num_slots, together, self.base.in_features), (num_slots, self.base.out_features, together)
        self._down, self._up = (torch.zeros(size, dtype=like.dtype, device=like.device) for size in sizes)
        for slot, (down, up) in enumerate(zip(self._down, self._up, strict=True)):
            self._rooms[slot], self._factors[slot] = _SlotLayout(down, up), Factors(down, up)

    def fill(self, slot: int, factors: Mapping[str, Factors]) -> None:
        """See AdaptedLinear. Kernels read whole slots, so the previous contents are cleared."""
        room = self._rooms.get(slot)
        if room is not None:
            room.down.zero_()
            room.up.zero_()
        super().fill(slot, factors)


def _slice(span: Span | None) -> slice:
    return slice(None) if span is None else slice(*span)


class Adapting(Protocol):
    """Collects the projections of a model that can have adapters, while it loads."""

    rows: AdapterRows

    def take(
        self, projection: Linear | BlockFp8Linear, parts: Sequence[AdaptedPart], num_rows: Sequence[int]
    ) -> Projection:
        """The projection that the model is to have in its place."""
        ...
