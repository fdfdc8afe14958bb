"""Block tables that stay on the device from step to step: only what is new of them travels.

```
rows [num_seats + 1, max_blocks], on the host and on the device
     a seat      |-- told before --|== new ==|-- not read --|
     the last    zeros, for sequences of padding
```
Who has which seat, and what is new: runner/seats.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trimtab_engine.runner.seats import Array, New, Seats


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """What the device does not know yet: `blocks` int32 at `places` int64 of all rows, counted through."""

    places: Array
    blocks: Array

    def __len__(self) -> int:
        return len(self.places)


NOTHING_NEW = NewBlocks(np.zeros(0, np.int64), np.zeros(0, np.int32))


class SeatedTables:
    """The rows of as many seats as a step may have sequences."""

    def __init__(self, num_seats: int, max_blocks: int, device: torch.device) -> None:
        self.rows = torch.zeros(num_seats + 1, max_blocks, dtype=torch.int32, device=device)
        self.empty_seat = num_seats
        self._host_rows = np.zeros((num_seats + 1, max_blocks), np.int32)
        """What `rows` hold once everything that was begun is done."""
        self._seats = Seats(num_seats)

    def seat(self, tables: Sequence[list[int]], counts: Array) -> tuple[Array, NewBlocks]:
        """The rows of a step's tables, and what must be written to `rows` before the first `counts` blocks of each are
        read: the caller writes it."""
        seats, news = self._seats.seat(tables, counts)
        if not news:
            return seats, NOTHING_NEW
        width, rows = self._host_rows.shape[1], self._host_rows.reshape(-1)
        single = [new for new in news if new.last - new.first == 1]  # what decodes bring, and so kept short
        places = np.array([new.seat * width + new.first for new in single], np.int64)
        rows[places] = [tables[new.place][new.first] for new in single]
        if len(single) < len(news):
            several = [self._write(new, tables[new.place]) for new in news if new.last - new.first > 1]
            places = np.concatenate([places, *several])
        return seats, NewBlocks(places, rows[places])

    def blocks_of(self, seats: Array, indices: Array) -> Array:
        """The block at this index of each seat's table."""
        return self._host_rows[seats, indices]

    def _write(self, new: New, table: list[int]) -> Array:
        """On the host. Returns the places."""
        self._host_rows[new.seat, new.first : new.last] = table[new.first : new.last]
        begin = new.seat * self._host_rows.shape[1]
        return np.arange(begin + new.first, begin + new.last, dtype=np.int64)
