"""Block tables that stay on the device between steps: each step copies only new blocks.

```
whole        | rows of the first KV group | rows of the second | …        on the host and on the device
rows [num_table_slots + 1, max_blocks]
     a slot      |-- copied before --|== new ==|-- not read --|
     the last    zeros, for padding sequences
```
Each KV group has its own slots and tables: rows of a windowed group are as wide as the window.
Slot assignment and new blocks: runner/block_table_slots.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from trimtab_engine.runner.block_table_slots import Array, BlockTableSlots, TableUpdate


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Blocks to copy to the device: `blocks` int32 at `places` int64, indices into the rows of all groups."""

    places: Array
    blocks: Array

    def __len__(self) -> int:
        return len(self.places)


NO_NEW_BLOCKS = NewBlocks(np.zeros(0, np.int64), np.zeros(0, np.int32))


def merge_new_blocks(news: Sequence[NewBlocks]) -> NewBlocks:
    """Return the new blocks of several groups together."""
    told = [new for new in news if len(new)]
    if len(told) < 2:
        return told[0] if told else NO_NEW_BLOCKS
    return NewBlocks(np.concatenate([new.places for new in told]), np.concatenate([new.blocks for new in told]))


class DeviceBlockTables:
    """Rows for the block tables of as many sequences as a step may have, per KV group, whose tables have
    `max_blocks`.
    """

    def __init__(self, num_table_slots: int, max_blocks: Sequence[int], device: torch.device) -> None:
        sizes = [(num_table_slots + 1) * width for width in max_blocks]
        self._starts = [0, *accumulate(sizes)]
        self.whole = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._host = np.zeros(sum(sizes), np.int32)
        """Content of `whole` once all started copies are done."""
        places = list(zip(self._starts, sizes, max_blocks, strict=False))
        self.rows = [self.whole[start : start + size].view(-1, width) for start, size, width in places]
        """Rows per group."""
        self._host_rows = [self._host[start : start + size].reshape(-1, width) for start, size, width in places]
        self.padding_table_slot = num_table_slots
        self._table_slots = [BlockTableSlots(num_table_slots) for _ in max_blocks]

    def table_slot(self, group: int, tables: Sequence[list[int]], counts: Array) -> tuple[Array, NewBlocks]:
        """Return the rows of a step's tables of one group and the blocks to write to `whole` before the first `counts`
        blocks of each are read. The caller must write them.
        """
        table_slots, news = self._table_slots[group].table_slot(tables, counts)
        if not news:
            return table_slots, NO_NEW_BLOCKS
        width, start = self._host_rows[group].shape[1], self._starts[group]
        single = [new for new in news if new.last - new.first == 1]  # the usual case for decodes, kept fast
        places = np.array([start + new.table_slot * width + new.first for new in single], np.int64)
        self._host[places] = [tables[new.place][new.first] for new in single]
        if len(single) < len(news):
            several = [self._write(group, new, tables[new.place]) for new in news if new.last - new.first > 1]
            places = np.concatenate([places, *several])
        return table_slots, NewBlocks(places, self._host[places])

    def blocks_of(self, group: int, table_slots: Array, indices: Array) -> Array:
        """Return the block at this index of each slot's table."""
        return self._host_rows[group][table_slots, indices]

    def _write(self, group: int, new: TableUpdate, table: list[int]) -> Array:
        """Write on the host. Return the indices."""
        rows = self._host_rows[group]
        rows[new.table_slot, new.first : new.last] = table[new.first : new.last]
        begin = self._starts[group] + new.table_slot * rows.shape[1]
        return np.arange(begin + new.first, begin + new.last, dtype=np.int64)
