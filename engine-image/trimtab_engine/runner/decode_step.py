"""A step of nothing but decodes, in columns: the commonest by far where a device works beside the host.

Its requests are mostly those of the step before, one token further. So what depends on who they are, their order, is
kept while they stay the same, and of each nothing is asked but where it is and which table it has.

```
batch.sampling     a  b  c  d        as scheduled: the order of the rows of logits
order              2  0  3  1        longest first: the order of the tokens
requests           c  a  d  b
sampled            1  3  0  2        where each one's token is
```
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from trimtab_modelspec.attention_window import FULL_ATTENTION, AttentionWindow

from trimtab_engine.scheduling.batch import Batch
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.step_inputs import StepShape

Array = np.ndarray[Any, Any]
KNOWN = -1  # in `sources`: the token is in token_ids


@dataclass(frozen=True, slots=True)
class Order:
    """Requests that decode together, in both orders."""

    sampling: list[Request]
    requests: list[Request]
    order: Array
    sampled: Array
    rope_deltas: Array | None
    """How far behind its place among the tokens a rope takes each one's to be, in the order of the tokens; None: for
    all of them where it is. Images make a difference, of prompts that have some."""
    adapters: Array | None = None
    """The slot of each one's adapter, or -1, in the order of the tokens; None: nobody has one."""

    @classmethod
    def of(cls, sampling: list[Request], starts: Array) -> "Order":
        order = np.argsort(-starts, kind="stable")
        sampled = np.empty_like(order)
        sampled[order] = np.arange(len(order))
        requests = [sampling[place] for place in order.tolist()]
        return cls(sampling, requests, order, sampled, _rope_deltas(requests), _adapters(requests))


def _rope_deltas(requests: list[Request]) -> Array | None:
    if all(request.rope is None for request in requests):
        return None
    return np.array([0 if request.rope is None else request.rope.delta for request in requests], np.int64)


def _adapters(requests: list[Request]) -> Array | None:
    if all(request.adapter is None for request in requests):
        return None
    return np.array([-1 if request.adapter is None else request.adapter.slot for request in requests], np.int32)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """What the layers of one KV group read and write, in the order of the tokens. `gone`: how many tokens lie before
    each table; None: before none."""

    tables: list[list[int]]
    gone: Array | None = None


@dataclass(slots=True)
class DecodeStep:
    """It reads like StepInputs, for who computes it in this process. `token_ids` and `sources` mean something once it
    has begun: fill_in() or feed_from()."""

    by: Order
    groups: list[DecodeGroup]
    """Per KV group, at least one."""
    positions: Array
    """In the order of the tokens, as all that follows."""
    token_ids: Array
    sources: Array
    """Rows of the tokens that the step before sampled, or KNOWN."""
    scored: tuple[()] = ()
    pooled: tuple[()] = ()

    @property
    def sampled(self) -> Array:
        return self.by.sampled

    @property
    def rope_positions(self) -> Array:
        """Where a rope takes the tokens to be, on each of its axes."""
        deltas = self.by.rope_deltas
        return self.positions if deltas is None else self.positions + deltas

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @property
    def num_sampled(self) -> int:
        return len(self.positions)

    @property
    def shape(self) -> StepShape:
        return StepShape(len(self.positions), 1, has_adapters=self.by.adapters is not None)

    @property
    def num_context_tokens(self) -> int:
        """Tokens whose keys and values it reads, the new ones included."""
        return int(self.positions.sum()) + len(self.positions)

    @property
    def ends(self) -> Array:
        """At which position the token is that each row of logits is for."""
        ends: Array = self.positions[self.by.sampled] + 1
        return ends

    def fill_in(self) -> None:
        """All steps before it have landed. A request that ended in one computes something nobody reads."""
        self.sources.fill(KNOWN)
        positions = self.positions.tolist()
        known = [request.token_ids for request in self.by.requests]
        self.token_ids[:] = [
            tokens[position] if position < len(tokens) else 0 for tokens, position in zip(known, positions, strict=True)
        ]

    def feed_from(self, sampling: Sequence[Request]) -> None:
        """It begins behind a step that samples for these requests, and that has not landed."""
        if sampling == self.by.sampling:
            self.sources[:] = self.by.order
            return
        rows = {request: row for row, request in enumerate(sampling)}
        self.fill_in()
        for index, (request, position) in enumerate(zip(self.by.requests, self.positions.tolist(), strict=True)):
            if position >= len(request.token_ids):
                self.sources[index] = rows[request]

    def written_slots(self, block_size: int) -> Iterator[int]:
        """Slots of all groups that it writes; found only when they are asked for."""
        for group in self.groups:
            places = self.positions if group.gone is None else self.positions - group.gone
            for table, place in zip(group.tables, places.tolist(), strict=True):
                yield table[place // block_size] * block_size + place % block_size


class DecodeLayout:
    """Lays out one such step after another, for KV groups that see so far."""

    def __init__(self, block_size: int, sights: Sequence[AttentionWindow] = (FULL_ATTENTION,)) -> None:
        self._last: Order | None = None
        self._block_size, self._sights = block_size, sights

    def lay_out(self, batch: Batch) -> DecodeStep:
        """`batch` has only decodes."""
        starts = np.array([sequence.start for sequence in batch.sequences], np.int64)
        by = self._last
        if by is None or by.sampling != batch.sampling:
            by = self._last = Order.of(batch.sampling, starts)
        groups = [self._group(group, by.requests) for group in range(len(self._sights))]
        token_ids, sources = np.zeros((2, len(starts)), np.int64)
        return DecodeStep(by, groups, starts[by.order], token_ids, sources)

    def _group(self, group: int, requests: list[Request]) -> DecodeGroup:
        tables = [request.block_tables[group] for request in requests]
        if self._sights[group].window is None:
            return DecodeGroup(tables)
        gone = np.array([request.num_gone[group] for request in requests], np.int64)
        return DecodeGroup(tables, gone * self._block_size)
