"""Block tables that stay on the device from step to step: only what is new of them travels.

```
whole        | rows of the first KV group | rows of the second | …        on the host and on the device
rows [num_seats + 1, max_blocks]
     a seat      |-- told before --|== new ==|-- not read --|
     the last    zeros, for sequences of padding
```
Each KV group has seats of its own, since it has tables of its own: rows of a window are as wide as what a step sees.
Who has which seat, and what is new: runner/block_table_slots.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from trimtab_engine.runner.block_table_slots import Array, New, Seats


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """What the device does not know yet: `blocks` int32 at `places` int64 of all groups' rows, counted through."""

    places: Array
    blocks: Array

    def __len__(self) -> int:
        return len(self.places)


NOTHING_NEW = NewBlocks(np.zeros(0, np.int64), np.zeros(0, np.int32))


def all_new(news: Sequence[NewBlocks]) -> NewBlocks:
    """What is new of several groups, together."""
    told = [new for new in news if len(new)]
    if len(told) < 2:
        return told[0] if told else NOTHING_NEW
    return NewBlocks(np.concatenate([new.places for new in told]), np.concatenate([new.blocks for new in told]))


class SeatedTables:
    """The rows of as many seats as a step may have sequences, for each KV group, whose tables have `max_blocks`."""

    def __init__(self, num_seats: int, max_blocks: Sequence[int], device: torch.device) -> None:
        sizes = [(num_seats + 1) * width for width in max_blocks]
        self._starts = [0, *accumulate(sizes)]
        self.whole = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._host = np.zeros(sum(sizes), np.int32)
        """What `whole` holds once everything that was begun is done."""
        places = list(zip(self._starts, sizes, max_blocks, strict=False))
        self.rows = [self.whole[start : start + size].view(-1, width) for start, size, width in places]
        """Per group."""
        self._host_rows = [self._host[start : start + size].reshape(-1, width) for start, size, width in places]
        self.empty_seat = num_seats
        self._seats = [Seats(num_seats) for _ in max_blocks]

    def seat(self, group: int, tables: Sequence[list[int]], counts: Array) -> tuple[Array, NewBlocks]:
        """The rows of a step's tables of one group, and what must be written to `whole` before the first `counts`
        blocks of each are read: the caller writes it."""
        seats, news = self._seats[group].seat(tables, counts)
        if not news:
            return seats, NOTHING_NEW
        width, start = self._host_rows[group].shape[1], self._starts[group]
        single = [new for new in news if new.last - new.first == 1]  # what decodes bring, and so kept short
        places = np.array([start + new.seat * width + new.first for new in single], np.int64)
        self._host[places] = [tables[new.place][new.first] for new in single]
        if len(single) < len(news):
            several = [self._write(group, new, tables[new.place]) for new in news if new.last - new.first > 1]
            places = np.concatenate([places, *several])
        return seats, NewBlocks(places, self._host[places])

    def blocks_of(self, group: int, seats: Array, indices: Array) -> Array:
        """The block at this index of each seat's table."""
        return self._host_rows[group][seats, indices]

    def _write(self, group: int, new: New, table: list[int]) -> Array:
        """On the host. Returns the places."""
        rows = self._host_rows[group]
        rows[new.seat, new.first : new.last] = table[new.first : new.last]
        begin = self._starts[group] + new.seat * rows.shape[1]
        return np.arange(begin + new.first, begin + new.last, dtype=np.int64)
