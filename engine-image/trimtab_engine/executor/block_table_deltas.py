"""Block-table deltas for other ranks: a step names table slots, and only new blocks are sent.

A rank keeps one list per slot and appends to it as the core does (runner/block_table_slots.py); a new table in a slot
starts a new list. Its device receives new blocks by the same rule.
"""

import msgspec
import numpy as np

from trimtab_engine.runner.block_table_slots import BlockTableSlots
from trimtab_engine.scheduling.step_inputs import GroupInputs, StepInputs


class BlockTableDelta(msgspec.Struct, array_like=True):
    """Tables of one KV group in a step: the slot of each, decodes first, and updates (slot, first block, blocks)."""

    table_slots: list[int]
    news: list[tuple[int, int, list[int]]]


class BlockTableSender:
    """The core's side; tracks the blocks already sent to the other ranks."""

    def __init__(self, num_groups: int, num_table_slots: int, block_size: int) -> None:
        self._groups = [BlockTableSlots(num_table_slots) for _ in range(num_groups)]
        self._block_size = block_size

    def extract_deltas(self, inputs: StepInputs) -> tuple[StepInputs, list[BlockTableDelta]]:
        """Return the step without its tables, and the deltas, which must be sent in call order."""
        bare = [
            GroupInputs(
                [([], length) for _, length in own.decodes], [([], before, now) for _, before, now in own.chunks]
            )
            for own in inputs.groups
        ]
        told = [
            self._extract_delta(table_slots, own) for table_slots, own in zip(self._groups, inputs.groups, strict=True)
        ]
        return msgspec.structs.replace(inputs, groups=bare), told

    def _extract_delta(self, table_slots: BlockTableSlots, inputs: GroupInputs) -> BlockTableDelta:
        tables = [table for table, _ in inputs.decodes] + [table for table, _, _ in inputs.chunks]
        lengths = [length for _, length in inputs.decodes] + [before + now for _, before, now in inputs.chunks]
        own, news = table_slots.table_slot(tables, -(-np.array(lengths, np.int64) // self._block_size))
        return BlockTableDelta(own.tolist(), [(n.table_slot, n.first, tables[n.place][n.first : n.last]) for n in news])


class BlockTableReceiver:
    """A rank's side; keeps the tables by KV group and slot."""

    def __init__(self) -> None:
        self._groups: list[dict[int, list[int]]] = []

    def read(self, inputs: StepInputs, told: list[BlockTableDelta]) -> StepInputs:
        """Return the step with its tables."""
        self._groups += [{} for _ in told[len(self._groups) :]]
        groups = [
            self._read(tables, own, news) for tables, own, news in zip(self._groups, inputs.groups, told, strict=True)
        ]
        return msgspec.structs.replace(inputs, groups=groups)

    def _read(self, tables: dict[int, list[int]], inputs: GroupInputs, told: BlockTableDelta) -> GroupInputs:
        for table_slot, first, blocks in told.news:
            if first:
                tables[table_slot] += blocks
            else:
                tables[table_slot] = blocks
        own = [tables[table_slot] for table_slot in told.table_slots]
        count = len(inputs.decodes)
        return GroupInputs(
            [(table, length) for table, (_, length) in zip(own[:count], inputs.decodes, strict=True)],
            [(table, before, now) for table, (_, before, now) in zip(own[count:], inputs.chunks, strict=True)],
        )
