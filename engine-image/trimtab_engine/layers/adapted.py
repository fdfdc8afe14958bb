"""Low-rank adapters beside the products of a step: rows of requests with an adapter get  up (down x)  more, as if the
adapter were merged into the weight, which stays as it is however it is stored.

On the CPU rows are grouped by adapter once per step, and each slot has memory of its own. On CUDA kernels read each
row's slot (trimtab_kernels/lora.py), and a projection's slots lie one behind the other, of one rank: so a graph holds
the launches, whatever adapters its replays have. Of a projection that is divided among ranks the factor on the divided
side is divided with it: `up` by rows where outputs are, `down` by columns where inputs are and the products are summed.
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
    """Which rows of the step at hand have which adapter: told before a rank's layers run, and asked by all of them.

    `device`: where each row's slot is told to kernels; None: rows are grouped by adapter.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self.slots: torch.Tensor | None = None
        """[rows] int32, for kernels: each row's slot, or NONE. None: none of them has an adapter."""
        self._spans: Spans = ()
        self.groups: list[tuple[int, Rows]] = []
        """(slot, its rows) of the rows that are being computed. Empty: none of them has an adapter."""
        self._of_parts: dict[tuple[int, int], list[tuple[int, Rows]]] = {}

    @property
    def has_any(self) -> bool:
        """Whether some of the rows that are being computed may have an adapter."""
        return self.slots is not None or bool(self.groups)

    @contextmanager
    def of_step(self, spans: Spans, num_rows: int = 0) -> Iterator[None]:
        """While it lasts a step with these adapters is computed. `num_rows`: how many rows it has, padding included,
        where slots are told to kernels."""
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
        """While it lasts rows with these slots are computed; None: without adapters."""
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
    """What of them lies in [first, last), counted from there."""
    cut = [(max(first, start), min(last, start + count), slot) for start, count, slot in spans]
    return [(start - first, end - start, slot) for start, end, slot in cut if start < end]


def _grouped(spans: Spans) -> list[tuple[int, Rows]]:
    """By slot. Rows that follow each other are a slice, which copies nothing."""
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
    """A module whose product is part of a projection's, on this rank."""

    name: str
    """As the checkpoint has it, such as model.layers.0.self_attn.q_proj."""
    rows: Span | None = None
    """Which of its outputs; None: all."""
    columns: Span | None = None
    """Which of its inputs; None: all."""
    pairs: int | None = None
    """Head size, where the outputs' rotary pairs are interleaved as the weight's are."""


@dataclass(frozen=True, slots=True)
class Factors:
    """down [rank, in_features]; up [out_features, rank], with the adapter's scale in it."""

    down: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Room:
    """Where one slot's factors of all parts lie: as Factors, of the highest rank together."""

    down: torch.Tensor
    up: torch.Tensor


class AdaptedLinear:
    """A projection with room for adapters. What several modules make together has their factors together: `down` one
    behind the other, `up` with zeros where one module's factor meets another's outputs."""

    def __init__(
        self, base: Linear | BlockFp8Linear, parts: Sequence[AdaptedPart], rows: AdapterRows, num_rows: Sequence[int]
    ) -> None:
        """`num_rows`: how many outputs of the projection each part has."""
        self.base, self.parts, self._rows = base, parts, rows
        self._num_rows = num_rows
        self.native: PackedMatrix | None = base.native
        """The weight packed for the compiled operators, for steps in which nobody has an adapter."""
        self._rooms: dict[int, _Room] = {}
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

    def make_room(self, slot: int, rank: int, like: torch.Tensor) -> None:
        """Set memory aside for an adapter of at most this rank in each part. What is there adds nothing."""
        together = rank * len(self.parts)
        down = torch.zeros(together, self.base.in_features, dtype=like.dtype, device=like.device)
        up = torch.zeros(self.base.out_features, together, dtype=like.dtype, device=like.device)
        self._rooms[slot] = _Room(down, up)
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
    """The same for kernels: all slots are multiplied with by one launch, whose rows say which is theirs."""

    _down: torch.Tensor | None = None
    """[slots, rank, in_features]; None: no adapter is here."""
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

    def make_rooms(self, num_slots: int, rank: int, like: torch.Tensor) -> None:
        """Set memory aside for so many adapters of at most this rank in each part."""
        together = cdiv(rank * len(self.parts), RANK_STEP) * RANK_STEP
        sizes = (num_slots, together, self.base.in_features), (num_slots, self.base.out_features, together)
        self._down, self._up = (torch.zeros(size, dtype=like.dtype, device=like.device) for size in sizes)
        for slot, (down, up) in enumerate(zip(self._down, self._up, strict=True)):
            self._rooms[slot], self._factors[slot] = _Room(down, up), Factors(down, up)

    def fill(self, slot: int, factors: Mapping[str, Factors]) -> None:
        """See AdaptedLinear. Kernels read whole rooms, so what was there before goes."""
        room = self._rooms.get(slot)
        if room is not None:
            room.down.zero_()
            room.up.zero_()
        super().fill(slot, factors)


def _slice(span: Span | None) -> slice:
    return slice(None) if span is None else slice(*span)


class Adapting(Protocol):
    """Who takes the projections of a model that may have adapters, as they load."""

    rows: AdapterRows

    def take(
        self, projection: Linear | BlockFp8Linear, parts: Sequence[AdaptedPart], num_rows: Sequence[int]
    ) -> Projection:
        """The projection that the model is to have in its place."""
        ...
