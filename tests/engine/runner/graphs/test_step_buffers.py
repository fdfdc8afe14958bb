"""A step's inputs on the device: what is told of block tables step by step reads as if all were told in every step."""

import random

import pytest
import torch
from trimtab_engine.runner.graphs import step_buffers
from trimtab_engine.runner.graphs.plan import GraphKey
from trimtab_engine.runner.graphs.seated_tables import SeatedTables
from trimtab_engine.runner.graphs.step_buffers import NO_SLOT, Capacity, StepBuffers
from trimtab_engine.scheduling.step_inputs import GroupInputs, StepInputs

BLOCK_SIZE, MAX_BLOCKS, MAX_SEQS = 4, 9, 6
CPU = torch.device("cpu")


def some_buffers() -> list[StepBuffers]:
    """Two, for steps of different sizes, that share their seats."""
    seated = SeatedTables(MAX_SEQS, MAX_BLOCKS, CPU)
    return [StepBuffers(Capacity(tokens, MAX_SEQS, MAX_SEQS, MAX_BLOCKS), seated, CPU) for tokens in (40, 8)]


def inputs_of(decodes: list[tuple[list[int], int]], chunks: list[tuple[list[int], int, int]]) -> StepInputs:
    positions = [length - 1 for _, length in decodes]
    for _, before, now in chunks:
        positions += range(before, before + now)
    return StepInputs(positions, positions, [], [GroupInputs(decodes, chunks)])


def check(buffers: StepBuffers, inputs: StepInputs, key: GraphKey | None) -> None:
    """Fill, and compare what attention and the cache's writes read with the lists."""
    own = inputs.groups[0]
    batch = buffers.fill(inputs, (), key, BLOCK_SIZE)
    tables = [table for table, _ in own.decodes] + [table for table, _, _ in own.chunks]
    lengths = [length for _, length in own.decodes] + [before + now for _, before, now in own.chunks]
    assert batch.seq_lens[: len(lengths)].tolist() == lengths
    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        count = -(-length // BLOCK_SIZE)
        assert batch.block_tables[row, :count].tolist() == table[:count]
    rows = len(inputs.token_ids) if key is None else key.num_tokens
    slots = own.slots(BLOCK_SIZE)
    assert buffers.longs["slots"][:rows].tolist() == slots + [NO_SLOT] * (rows - len(slots))
    if key is not None and key.tokens_per_sequence is not None and key.tokens_per_sequence > 1:
        read = -(-key.tokens_per_sequence // BLOCK_SIZE)
        assert not batch.block_tables[len(tables) :, :read].any()  # padding reads block 0


@pytest.mark.parametrize("more_new", [step_buffers.MORE_NEW, -2 * MAX_SEQS], ids=["along", "apart"])
@pytest.mark.parametrize("seed", range(20))
def test_tables_told_step_by_step_are_the_whole_ones(seed: int, more_new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences grow, end, lose blocks at either end and come back, in steps of either size, in any order."""
    monkeypatch.setattr(step_buffers, "MORE_NEW", more_new)
    dice = random.Random(seed)
    large, small = some_buffers()
    tables: list[list[int]] = [[] for _ in range(10)]
    for _ in range(60):
        decodes, chunks = [], []
        for number in dice.sample(range(10), dice.randint(0, MAX_SEQS)):
            what = dice.random()
            if what < 0.1:
                tables[number] = []  # it ended, or was preempted
            elif what < 0.2:
                tables[number] = tables[number][: dice.randint(0, MAX_BLOCKS)]  # drafts that do not stand
            elif what < 0.3:
                tables[number] = [block + 100 for block in tables[number]]  # moved below a new top
            table = tables[number]
            table += dice.sample(
                range(1000), dice.randint(0 if table else 1, MAX_BLOCKS) % (MAX_BLOCKS - len(table) + 1)
            )
            if not table:
                table.append(dice.randrange(1000))
            length = dice.randint(1, BLOCK_SIZE * len(table))
            now = dice.randint(1, min(6, length))
            if dice.random() < 0.7:
                decodes.append((table, length))
            else:
                chunks.append((table, length - now, now))
        inputs = inputs_of(decodes, chunks)
        rows = len(inputs.token_ids)
        if decodes and not chunks and dice.random() < 0.7:
            check(small, inputs, GraphKey(MAX_SEQS, 1))
        elif chunks and not decodes and len({now for *_, now in chunks}) == 1 and rows <= 40:
            check(large, inputs, GraphKey(chunks[0][2] * MAX_SEQS, chunks[0][2]))
        else:
            check(large, inputs, GraphKey(rows + dice.randint(0, 40 - rows)))


@pytest.mark.parametrize("max_tokens", [8, 7])
def test_positions_over_several_axes_lie_one_behind_the_other(max_tokens: int) -> None:
    """Those of a step of text alone are equal on all axes, and what was there before is padding."""
    seated = SeatedTables(MAX_SEQS, MAX_BLOCKS, CPU)
    buffers = StepBuffers(Capacity(max_tokens, MAX_SEQS, MAX_SEQS, MAX_BLOCKS, num_axes=3), seated, CPU)
    inputs = inputs_of([], [([3, 4], 2, 5)])
    inputs.axes = [[2, 3, 3, 3, 5], [2, 3, 4, 4, 5], [2, 3, 3, 4, 5]]
    buffers.fill(inputs, (), None, BLOCK_SIZE)
    assert buffers.positions(5).tolist() == inputs.axes
    buffers.fill(inputs_of([([3, 4], 8), ([5], 2)], []), (), GraphKey(4, 1), BLOCK_SIZE)
    assert buffers.positions(4).tolist() == [[7, 1, 0, 0]] * 3
