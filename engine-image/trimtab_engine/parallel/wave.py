"""Data-parallel cores in lockstep: those of a mixture of experts, whose ranks hold the experts together.

A wave is a run of steps that all cores make together, from the first request until none of them has one. In each step
they agree on a number of rows; a core without requests computes padding. A core that gets a request between two waves
announces the next one to the others (by way of the API server) and waits for them in its first step.
```
core 0   |== request ==|== request ==|    wave 7 is over    |announce 8|== request ==|
core 1   |-- padding --|== request ==|      (both idle)     |  join 8  |-- padding --|
```
Waves are counted, so that an announcement that arrives while the wave before it still runs is not lost: it is joined
when that one has ended. Stale announcements have a lower number.
"""

from collections.abc import Callable

import torch

from trimtab_engine.parallel.groups import RankGroup


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
        """Whether this core has to take part in a step now, with work or without."""
        return self._runs or self._announced >= self._number

    def join(self, number: int) -> None:
        """Another core has announced this wave."""
        self._announced = max(self._announced, number)

    def agree_on_rows(self, num_rows: int) -> int:
        """The largest number of rows that a core has in this step: all compute as many. 0: none has any, and the wave
        is over. Every core of the group calls this once per step.
        """
        if not self.is_on:
            self.announce(self._number)
        self._runs = True
        own = torch.tensor([num_rows], dtype=torch.int64, device=self._group.device)
        rows = int(self._group.all_gather(own).max())
        if rows == 0:
            self._runs = False
            self._number += 1
        return rows
