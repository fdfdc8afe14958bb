"""Lockstep of data-parallel cores of an MoE model, whose ranks hold the experts together.

A wave is a sequence of steps that all cores run together, from the first request until no core has one. In each step
they agree on a shape; a core without requests computes padding of that shape, so that all replay one graph. A core
that gets a request between two waves announces the next one to the others (through the API server) and waits for them
in its first step.
```
core 0   |== request ==|== request ==|    wave 7 is over    |announce 8|== request ==|
core 1   |-- padding --|== request ==|      (both idle)     |  join 8  |-- padding --|
```
Waves are numbered, so that an announcement that arrives during the previous wave is not lost: that wave is joined
afterwards. Stale announcements have a lower number.
"""

from collections.abc import Callable

import torch

from trimtab_engine.parallel.groups import RankGroup
from trimtab_engine.scheduling.step_inputs import StepShape

ANY, MIXED, ITEMS = 0, -1, -2
"""On the wire, for tokens per sequence: a core without work fits in; not uniform; nor that, and some of the tokens are
of images or videos, so that no core replays a graph."""


class Wave:
    """The waves as one core sees them. `announce` is called with the number of a wave that this core begins."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.announce: Callable[[int], None] = lambda number: None
        self._number = 0
        self._announced = -1
        self._runs = False

    @property
    def is_on(self) -> bool:
        """True if this core must take part in a step now, with or without requests."""
        return self._runs or self._announced >= self._number

    def join(self, number: int) -> None:
        """Join a wave that another core has announced."""
        self._announced = max(self._announced, number)

    def agree(self, own: StepShape, *, can_be_uniform: bool = True) -> StepShape:
        """Return the shape of this step: as many rows as the core with the most has, uniform if every core's tokens
        are. No tokens: no core has any, and the wave is over. Every core of the group calls this once per step. A core
        without tokens fits in with the others; with `can_be_uniform` False the step is not uniform.
        """
        if not self.is_on:
            self.announce(self._number)
        self._runs = True
        said = torch.tensor(
            [[own.num_tokens, _kind(own, can_be_uniform), own.has_adapters]],
            dtype=torch.int64,
            device=self._group.device,
        )
        agreed = agreed_shape(self._group.all_gather(said).tolist())
        if agreed.num_tokens == 0:
            self._runs = False
            self._number += 1
        return agreed


def agreed_shape(said: list[list[int]]) -> StepShape:
    """Return the shape that all cores take, from every core's tokens, tokens per sequence (ANY, MIXED or ITEMS), and
    whether it has adapters.
    """
    kinds = {per_sequence for _, per_sequence, _ in said} - {ANY}
    num_tokens, has_items = max(rows for rows, _, _ in said), ITEMS in kinds
    is_uniform = len(kinds) == 1 and kinds.isdisjoint((MIXED, ITEMS))
    has_adapters = any(own for _, _, own in said)
    return StepShape(num_tokens, kinds.pop() if is_uniform else None, has_items, has_adapters)


def _kind(own: StepShape, can_be_uniform: bool) -> int:
    if own.has_items:
        return ITEMS
    return own.tokens_per_sequence or (MIXED if own.num_tokens else ANY) if can_be_uniform else MIXED
