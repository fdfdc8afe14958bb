"""Who knows which block tables how far: so that only what is new of them is told, step by step.

A table is known by the list that holds it, which is only ever appended to (scheduling/block_manager.py). While it is
read, and until its place is wanted, it has a seat, the same one in every step; whoever is told keeps tables by seats:

```
seat     |-- told before --|== new ==|-- later --|
         0               first      last
```
What telling costs depends on the sequences of a step and on their new blocks, not on how long their tables are.
"""

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
FREED_AT_ONCE = 8  # one in so many seats, when all are taken: a table whose seat went is told anew


class New(NamedTuple):
    """Blocks [first, last) of the table at `place` in the step, which has this seat. From 0 on where the seat was
    another table's before."""

    place: int
    seat: int
    first: int
    last: int


class Seats:
    """Seats for the tables of at least as many sequences as a step may have."""

    def __init__(self, num_seats: int) -> None:
        self._num_known = np.zeros(num_seats, np.int64)
        self._by_id: dict[int, int] = {}
        """Seats by their tables' ids, which `_tables` keep alive."""
        self._tables: list[list[int] | None] = [None] * num_seats
        self._free = list(range(num_seats - 1, -1, -1))
        self._step = 0
        self._last_steps = np.zeros(num_seats, np.int64)
        """When a seat's table was read last."""
        self._last: tuple[Sequence[list[int]], Array] = ((), np.zeros(0, np.int64))
        """The tables of the step before, and their seats."""

    def seat(self, tables: Sequence[list[int]], counts: Array) -> tuple[Array, list[New]]:
        """The seats of a step's tables, and what must be told before their first `counts` blocks are read: the caller
        tells it."""
        self._step += 1
        seats = self._seats_of(tables)
        self._last = tables, seats
        self._last_steps[seats] = self._step
        known = self._num_known[seats]
        behind = np.flatnonzero(known < counts)
        if not len(behind):
            return seats, []
        self._num_known[seats[behind]] = counts[behind]
        columns = (behind, seats[behind], known[behind], counts[behind])
        return seats, [New(*row) for row in zip(*[column.tolist() for column in columns], strict=True)]

    def _seats_of(self, tables: Sequence[list[int]]) -> Array:
        before, seats = self._last
        if len(tables) == len(before) and all(map(is_, tables, before)):
            return seats  # the same tables as in the step before, which nobody has put off their seats
        found = list(map(self._by_id.get, map(id, tables)))
        if None in found:
            self._last_steps[[seat for seat in found if seat is not None]] = self._step
            found = [self._take(table) if seat is None else seat for table, seat in zip(tables, found, strict=True)]
        return np.array(found, np.int64)

    def _take(self, table: list[int]) -> int:
        if not self._free:
            self._free_some()
        seat = self._free.pop()
        self._by_id[id(table)] = seat
        self._tables[seat] = table
        self._num_known[seat] = 0
        self._last_steps[seat] = self._step
        return seat

    def _free_some(self) -> None:
        """Those that were not read for longest; none of this step's."""
        most = -(-len(self._tables) // FREED_AT_ONCE)
        for seat in np.argsort(self._last_steps, kind="stable")[:most].tolist():
            if self._last_steps[seat] < self._step:
                del self._by_id[id(self._tables[seat])]
                self._tables[seat] = None
                self._free.append(seat)
