"""Block-table deltas: other ranks reconstruct the core's tables."""

import random

import msgspec
import pytest
from trimtab_engine.executor.block_table_deltas import BlockTableReceiver, BlockTableSender
from trimtab_engine.executor.messages import Step, ToWorker
from trimtab_engine.scheduling.step_inputs import NO_INPUTS, GroupInputs, StepInputs, StepShape

BLOCK_SIZE, NUM_SEATS, NUM_REQUESTS = 4, 6, 9


def sent(table_sender: BlockTableSender, inputs: StepInputs) -> Step:
    """The step's message, over the wire."""
    message: Step = msgspec.msgpack.decode(
        msgspec.msgpack.encode(Step(*table_sender.extract_deltas(inputs))), type=ToWorker
    )
    return message


def as_needed(inputs: StepInputs) -> list[GroupInputs]:
    """The tables as far as the step reads them."""

    def cut(table: list[int], length: int) -> list[int]:
        return table[: -(-length // BLOCK_SIZE)]

    return [
        GroupInputs(
            [(cut(table, length), length) for table, length in own.decodes],
            [(cut(table, before + now), before, now) for table, before, now in own.chunks],
        )
        for own in inputs.groups
    ]


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("seed", range(10))
def test_every_rank_reads_the_tables_that_the_core_has(seed: int, num_groups: int) -> None:
    """Requests grow, end, lose blocks at either end, and alternate over fewer slots."""
    dice = random.Random(seed)
    table_sender, reader = BlockTableSender(num_groups, NUM_SEATS, BLOCK_SIZE), BlockTableReceiver()
    tables: list[list[list[int]]] = [[[] for _ in range(NUM_REQUESTS)] for _ in range(num_groups)]
    for _ in range(120):
        groups = [GroupInputs([], []) for _ in range(num_groups)]
        for number in dice.sample(range(NUM_REQUESTS), dice.randint(0, NUM_SEATS)):
            is_decode = dice.random() < 0.6
            for group, own in zip(groups, tables, strict=True):
                if dice.random() < 0.1:
                    own[number] = own[number][: dice.randint(0, 3)]  # rejected drafts; an end
                elif dice.random() < 0.1:
                    own[number] = own[number][dice.randint(0, 2) :]  # out of a window's sight
                own[number] += [dice.randrange(1000) for _ in range(dice.randint(0 if own[number] else 1, 3))]
                length = dice.randint(1, BLOCK_SIZE * len(own[number]))
                if is_decode:
                    group.decodes.append((own[number], length))
                else:
                    group.chunks.append((own[number], length - 1, 1))
        inputs = StepInputs([1, 2], [3, 4], [1], groups, [(0, 5, 1)], StepShape(8, None))
        message = sent(table_sender, inputs)
        read = reader.read(message.inputs, message.tables)
        assert as_needed(read) == as_needed(inputs)
        assert (read.token_ids, read.positions, read.sampled) == ([1, 2], [3, 4], [1])
        assert (read.scored, read.agreed) == ([(0, 5, 1)], StepShape(8, None))


def test_message_size_is_independent_of_context_length() -> None:
    def size(length: int) -> int:
        table_sender = BlockTableSender(1, 32, BLOCK_SIZE)
        tables = [list(range(1000, 1000 + -(-length // BLOCK_SIZE))) for _ in range(32)]
        inputs = StepInputs([], [], [], [GroupInputs([(table, length) for table in tables], [])])
        table_sender.extract_deltas(inputs)
        return len(msgspec.msgpack.encode(Step(*table_sender.extract_deltas(inputs))))

    assert size(8000) == size(4000) < 2 * size(40)


def test_continued_table_keeps_its_list() -> None:
    """So that the rank's device also receives only new blocks."""
    table_sender, reader, table = BlockTableSender(1, 2, BLOCK_SIZE), BlockTableReceiver(), [7]
    seen = []
    for length in (3, 4, 5):
        if length > BLOCK_SIZE * len(table):
            table.append(9)
        message = sent(table_sender, StepInputs([0], [0], [0], [GroupInputs([(table, length)], [])]))
        seen.append(reader.read(message.inputs, message.tables).groups[0].decodes[0][0])
    assert seen[0] is seen[1] is seen[2]
    assert seen[2] == [7, 9]


def test_an_idle_step_has_no_tables() -> None:
    table_sender, reader = BlockTableSender(1, 2, BLOCK_SIZE), BlockTableReceiver()
    message = sent(table_sender, NO_INPUTS)
    assert reader.read(message.inputs, message.tables) == NO_INPUTS
