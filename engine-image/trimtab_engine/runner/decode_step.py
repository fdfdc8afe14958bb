"""A decode-only step in column format: by far the most frequent step on an asynchronous device.

Its requests are mostly those of the previous step, one token further. Values that depend only on the set of requests
are therefore cached, and each request is read only for its position and its table.

```
batch.sampling     a  b  c  d        as scheduled: the order of the rows of logits
order              2  0  3  1        longest first: token order
requests           c  a  d  b
sampled            1  3  0  2        index of each request's token
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
    """Offset of each token's RoPE position from its index, in token order. None if all are 0. Only prompts with images
    have other offsets.
    """
    adapters: Array | None = None
    """Adapter slot of each token, or -1, in token order. None if no request has one."""

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
    """Tables that the layers of one KV group read and write, in token order. `gone`: number of tokens before each
    table; None if all are 0.
    """

    tables: list[list[int]]
    gone: Array | None = None


@dataclass(slots=True)
class DecodeStep:
    """A decode-only step with the reading interface of StepInputs, for use in this process. `token_ids` and `sources`
    are valid after fill_in() or feed_from().
    """

    by: Order
    groups: list[DecodeGroup]
    """Per KV group, at least one."""
    positions: Array
    """Positions in token order, as all following attributes."""
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
        """Return RoPE positions, on each axis."""
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
        """Number of tokens whose keys and values the step reads, including new ones."""
        return int(self.positions.sum()) + len(self.positions)

    @property
    def ends(self) -> Array:
        """Return the position of the token sampled from each row of logits."""
        ends: Array = self.positions[self.by.sampled] + 1
        return ends

    def fill_in(self) -> None:
        """Insert the tokens of completed steps. A request that ended in one computes an unused token."""
        self.sources.fill(KNOWN)
        positions = self.positions.tolist()
        known = [request.token_ids for request in self.by.requests]
        self.token_ids[:] = [
            tokens[position] if position < len(tokens) else 0 for tokens, position in zip(known, positions, strict=True)
        ]

    def feed_from(self, sampling: Sequence[Request]) -> None:
        """Take tokens on the device from the incomplete previous step, which samples for these requests."""
        if sampling == self.by.sampling:
            self.sources[:] = self.by.order
            return
        rows = {request: row for row, request in enumerate(sampling)}
        self.fill_in()
        for index, (request, position) in enumerate(zip(self.by.requests, self.positions.tolist(), strict=True)):
            if position >= len(request.token_ids):
                self.sources[index] = rows[request]

    def written_slots(self, block_size: int) -> Iterator[int]:
        """Yield the slots of all groups that the step writes. Computed on demand."""
        for group in self.groups:
            places = self.positions if group.gone is None else self.positions - group.gone
            for table, place in zip(group.tables, places.tolist(), strict=True):
                yield table[place // block_size] * block_size + place % block_size


class DecodeLayout:
    """Lays out consecutive decode steps for KV groups with these attention windows."""

    def __init__(self, block_size: int, attention_windows: Sequence[AttentionWindow] = (FULL_ATTENTION,)) -> None:
        self._last: Order | None = None
        self._block_size, self._attention_windows = block_size, attention_windows

    def lay_out(self, batch: Batch) -> DecodeStep:
        """Lay out a batch of decodes only."""
        starts = np.array([sequence.start for sequence in batch.sequences], np.int64)
        by = self._last
        if by is None or by.sampling != batch.sampling:
            by = self._last = Order.of(batch.sampling, starts)
        groups = [self._group(group, by.requests) for group in range(len(self._attention_windows))]
        token_ids, sources = np.zeros((2, len(starts)), np.int64)
        return DecodeStep(by, groups, starts[by.order], token_ids, sources)

    def _group(self, group: int, requests: list[Request]) -> DecodeGroup:
        tables = [request.block_tables[group] for request in requests]
        if self._attention_windows[group].window is None:
            return DecodeGroup(tables)
        gone = np.array([request.num_out_of_window[group] for request in requests], np.int64)
        return DecodeGroup(tables, gone * self._block_size)
