"""Block tables on their way to other ranks: a step names their seats, and only what is new of them travels.

A rank keeps a list per seat, which is appended to as the core's own is (runner/block_table_slots.py); where another
table takes the seat, another list does too. So its device is told by the same rule what is new there.
"""

import msgspec
import numpy as np

from trimtab_engine.runner.block_table_slots import Seats
from trimtab_engine.scheduling.step_inputs import GroupInputs, StepInputs


class ToldTables(msgspec.Struct, array_like=True):
    """One KV group's tables of a step: each one's seat, decodes first, and what is new: (seat, first block, blocks)."""

    seats: list[int]
    news: list[tuple[int, int, list[int]]]


class TableTeller:
    """The core's side: knows what the other ranks have been told."""

    def __init__(self, num_groups: int, num_seats: int, block_size: int) -> None:
        self._groups = [Seats(num_seats) for _ in range(num_groups)]
        self._block_size = block_size

    def tell(self, inputs: StepInputs) -> tuple[StepInputs, list[ToldTables]]:
        """The step without its tables, and what is to be told of them: it must be sent, and in this order."""
        bare = [
            GroupInputs(
                [([], length) for _, length in own.decodes], [([], before, now) for _, before, now in own.chunks]
            )
            for own in inputs.groups
        ]
        told = [self._tell(seats, own) for seats, own in zip(self._groups, inputs.groups, strict=True)]
        return msgspec.structs.replace(inputs, groups=bare), told

    def _tell(self, seats: Seats, inputs: GroupInputs) -> ToldTables:
        tables = [table for table, _ in inputs.decodes] + [table for table, _, _ in inputs.chunks]
        lengths = [length for _, length in inputs.decodes] + [before + now for _, before, now in inputs.chunks]
        own, news = seats.seat(tables, -(-np.array(lengths, np.int64) // self._block_size))
        return ToldTables(own.tolist(), [(n.seat, n.first, tables[n.place][n.first : n.last]) for n in news])


class TableReader:
    """A rank's side: the tables by KV group and seat."""

    def __init__(self) -> None:
        self._groups: list[dict[int, list[int]]] = []

    def read(self, inputs: StepInputs, told: list[ToldTables]) -> StepInputs:
        """The step with its tables."""
        self._groups += [{} for _ in told[len(self._groups) :]]
        groups = [
            self._read(tables, own, news) for tables, own, news in zip(self._groups, inputs.groups, told, strict=True)
        ]
        return msgspec.structs.replace(inputs, groups=groups)

    def _read(self, tables: dict[int, list[int]], inputs: GroupInputs, told: ToldTables) -> GroupInputs:
        for seat, first, blocks in told.news:
            if first:
                tables[seat] += blocks
            else:
                tables[seat] = blocks
        own = [tables[seat] for seat in told.seats]
        count = len(inputs.decodes)
        return GroupInputs(
            [(table, length) for table, (_, length) in zip(own[:count], inputs.decodes, strict=True)],
            [(table, before, now) for table, (_, before, now) in zip(own[count:], inputs.chunks, strict=True)],
        )
