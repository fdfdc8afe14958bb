"""Slots for block tables whose reader keeps a copy, so that each step sends only new blocks.

A table is identified by its append-only list (scheduling/block_manager.py). It keeps one slot from step to step until
the slot is needed for another table; receivers store tables by slot:

```
slot     |-- sent before --|== new ==|-- later --|
         0               first      last
```
The cost depends on the number of sequences and new blocks of a step, not on the length of the tables.
"""

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
FREED_SHARE = 8  # share of slots freed when all are taken; a table that lost its slot is sent again


class TableUpdate(NamedTuple):
    """Blocks [first, last) of the table at index `place` of the step, in its slot. `first` is 0 if the slot held
    another table before.
    """

    place: int
    table_slot: int
    first: int
    last: int


class BlockTableSlots:
    """Slots for the tables of at least as many sequences as a step may have."""

    def __init__(self, num_table_slots: int) -> None:
        self._num_known = np.zeros(num_table_slots, np.int64)
        self._by_id: dict[int, int] = {}
        """Slots by the ids of their tables, which `_tables` keep alive."""
        self._tables: list[list[int] | None] = [None] * num_table_slots
        self._free = list(range(num_table_slots - 1, -1, -1))
        self._step = 0
        self._last_steps = np.zeros(num_table_slots, np.int64)
        """The step in which each slot's table was last read."""
        self._last: tuple[Sequence[list[int]], Array] = ((), np.zeros(0, np.int64))
        """The tables of the previous step and their slots."""

    def table_slot(self, tables: Sequence[list[int]], counts: Array) -> tuple[Array, list[TableUpdate]]:
        """Return the slots of a step's tables and the updates to send before their first `counts` blocks are read. The
        caller must send them.
        """
        self._step += 1
        table_slots = self._table_slots_of(tables)
        self._last = tables, table_slots
        self._last_steps[table_slots] = self._step
        known = self._num_known[table_slots]
        behind = np.flatnonzero(known < counts)
        if not len(behind):
            return table_slots, []
        self._num_known[table_slots[behind]] = counts[behind]
        columns = (behind, table_slots[behind], known[behind], counts[behind])
        return table_slots, [TableUpdate(*row) for row in zip(*[column.tolist() for column in columns], strict=True)]

    def _table_slots_of(self, tables: Sequence[list[int]]) -> Array:
        before, table_slots = self._last
        if len(tables) == len(before) and all(map(is_, tables, before)):
            return table_slots  # same tables as in the previous step; their slots are unchanged
        found = list(map(self._by_id.get, map(id, tables)))
        if None in found:
            self._last_steps[[table_slot for table_slot in found if table_slot is not None]] = self._step
            found = [
                self._take(table) if table_slot is None else table_slot
                for table, table_slot in zip(tables, found, strict=True)
            ]
        return np.array(found, np.int64)

    def _take(self, table: list[int]) -> int:
        if not self._free:
            self._free_some()
        table_slot = self._free.pop()
        self._by_id[id(table)] = table_slot
        self._tables[table_slot] = table
        self._num_known[table_slot] = 0
        self._last_steps[table_slot] = self._step
        return table_slot

    def _free_some(self) -> None:
        """Free the least recently used slots, but none of this step's."""
        most = -(-len(self._tables) // FREED_SHARE)
        for table_slot in np.argsort(self._last_steps, kind="stable")[:most].tolist():
            if self._last_steps[table_slot] < self._step:
                del self._by_id[id(self._tables[table_slot])]
                self._tables[table_slot] = None
                self._free.append(table_slot)
