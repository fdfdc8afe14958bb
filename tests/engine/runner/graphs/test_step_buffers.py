"""Step buffers: incremental block tables equal full copies in every step."""

import random

import pytest
import torch
from engine_builders import a_request
from trimtab_engine.runner.decode_step import DecodeLayout
from trimtab_engine.runner.graphs import step_buffers
from trimtab_engine.runner.graphs.device_block_tables import DeviceBlockTables
from trimtab_engine.runner.graphs.plan import GraphKey
from trimtab_engine.runner.graphs.step_buffers import NO_SLOT, Capacity, StepBuffers
from trimtab_engine.scheduling.adapter import Adapter
from trimtab_engine.scheduling.batch import Batch, ScheduledSequence
from trimtab_engine.scheduling.step_inputs import GroupInputs, StepInputs, flatten
from trimtab_modelspec.attention_window import AttentionWindow

BLOCK_SIZE, MAX_BLOCKS, MAX_SEQS = 4, 9, 6
CPU = torch.device("cpu")


def some_buffers(*max_blocks: int, chunked: frozenset[int] = frozenset()) -> list[StepBuffers]:
    """Return two buffers for steps of different sizes that share their table slots."""
    seated = DeviceBlockTables(MAX_SEQS, max_blocks, CPU)
    return [StepBuffers(Capacity(tokens, MAX_SEQS, MAX_SEQS, max_blocks, chunked), seated, CPU) for tokens in (40, 8)]


def inputs_of(*groups: GroupInputs, gone: tuple[int, ...] = ()) -> StepInputs:
    """Return inputs; `gone`: number of tokens before each table of the first group."""
    before = iter(gone or (0,) * MAX_SEQS)
    positions = [length - 1 + next(before) for _, length in groups[0].decodes]
    for _, start, now in groups[0].chunks:
        first = start + next(before)
        positions += range(first, first + now)
    return StepInputs(positions, positions, [], list(groups))


def check(buffers: StepBuffers, inputs: StepInputs, key: GraphKey | None) -> None:
    """Fill, and compare what attention and the cache's writes read with the lists."""
    batches = buffers.fill(inputs, (), key, BLOCK_SIZE)
    assert len(batches) == len(inputs.groups)
    rows = len(inputs.token_ids) if key is None else key.num_tokens
    for number, (own, batch) in enumerate(zip(inputs.groups, batches, strict=True)):
        tables = [table for table, _ in own.decodes] + [table for table, _, _ in own.chunks]
        lengths = [length for _, length in own.decodes] + [before + now for _, before, now in own.chunks]
        assert batch.seq_lens[: len(lengths)].tolist() == lengths
        for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
            count = -(-length // BLOCK_SIZE)
            assert batch.block_tables[row, :count].tolist() == table[:count]
        slots = own.slots(BLOCK_SIZE)
        assert buffers.slots[number, :rows].tolist() == slots + [NO_SLOT] * (rows - len(slots))
        if key is not None and key.tokens_per_sequence is not None and key.tokens_per_sequence > 1:
            read = -(-key.tokens_per_sequence // BLOCK_SIZE)
            assert not batch.block_tables[len(tables) :, :read].any()  # padding reads block 0
        if batch.gone is not None:
            assert batch.gone[: len(tables)].tolist() == inputs.gone(own)
            assert not batch.gone[len(tables) :].any()


@pytest.mark.parametrize("more_new", [step_buffers.MORE_NEW, -2 * MAX_SEQS], ids=["along", "apart"])
@pytest.mark.parametrize("seed", range(20))
def test_incremental_tables_equal_full_tables(seed: int, more_new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences grow, end, lose blocks at either end and return, in steps of either size, in any order."""
    monkeypatch.setattr(step_buffers, "MORE_NEW", more_new)
    dice = random.Random(seed)
    large, small = some_buffers(MAX_BLOCKS)
    tables: list[list[int]] = [[] for _ in range(10)]
    for _ in range(60):
        own = GroupInputs([], [])
        for number in dice.sample(range(10), dice.randint(0, MAX_SEQS)):
            what = dice.random()
            if what < 0.1:
                tables[number] = []  # it ended, or was preempted
            elif what < 0.2:
                tables[number] = tables[number][: dice.randint(0, MAX_BLOCKS)]  # rejected drafts
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
                own.decodes.append((table, length))
            else:
                own.chunks.append((table, length - now, now))
        check_in_any_graph(dice, large, small, inputs_of(own))


def check_in_any_graph(dice: random.Random, large: StepBuffers, small: StepBuffers, inputs: StepInputs) -> None:
    """Check in a graph that the step fits into."""
    decodes, chunks = inputs.groups[0].decodes, inputs.groups[0].chunks
    rows = len(inputs.token_ids)
    if decodes and not chunks and dice.random() < 0.7:
        check(small, inputs, GraphKey(MAX_SEQS, 1))
    elif chunks and not decodes and len({now for *_, now in chunks}) == 1 and rows <= 40:
        check(large, inputs, GraphKey(chunks[0][2] * MAX_SEQS, chunks[0][2]))
    else:
        check(large, inputs, GraphKey(rows + dice.randint(0, 40 - rows)))


@pytest.mark.parametrize("more_new", [step_buffers.MORE_NEW, -6 * MAX_SEQS], ids=["along", "apart"])
@pytest.mark.parametrize("seed", range(20))
def test_every_kv_group_has_tables_of_its_own(seed: int, more_new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and third group free blocks, the first counts freed tokens; lengths stay common."""
    monkeypatch.setattr(step_buffers, "MORE_NEW", more_new)
    dice = random.Random(seed)
    large, small = some_buffers(5, MAX_BLOCKS, 4, chunked=frozenset({0}))
    windows = (3, MAX_BLOCKS, 2)  # blocks that are seen before the newest tokens'
    tables: list[list[list[int]]] = [[[], [], []] for _ in range(10)]
    ends, gone = [0] * 10, [[0, 0, 0] for _ in range(10)]
    for _ in range(60):
        groups, before = [GroupInputs([], []) for _ in windows], []
        for number in sorted(dice.sample(range(10), dice.randint(0, MAX_SEQS)), key=lambda n: -ends[n]):
            now = dice.randint(1, 4)
            if ends[number] + now > BLOCK_SIZE * MAX_BLOCKS:
                tables[number], ends[number], gone[number] = [[], [], []], 0, [0, 0, 0]
            start, ends[number] = ends[number], ends[number] + now
            is_decode = now == 1 and not groups[0].chunks
            for group, window in enumerate(windows):
                first = max(0, start // BLOCK_SIZE + 1 - window)
                if first > gone[number][group]:
                    tables[number][group] = tables[number][group][first - gone[number][group] :]
                    gone[number][group] = first
                table, moved = tables[number][group], BLOCK_SIZE * gone[number][group]
                count = -(-ends[number] // BLOCK_SIZE) - gone[number][group] - len(table)
                table += [dice.randrange(1000) for _ in range(count)]
                if is_decode:
                    groups[group].decodes.append((table, ends[number] - moved))
                else:
                    groups[group].chunks.append((table, start - moved, now))
            before.append(BLOCK_SIZE * gone[number][0])
        check_in_any_graph(dice, large, small, inputs_of(*groups, gone=tuple(before)))


def test_columns_of_decodes_are_filled_in_as_any_step_is() -> None:
    large, small = some_buffers(5, MAX_BLOCKS, chunked=frozenset({0}))
    sequences = []
    for number, (length, num_out_of_window) in enumerate([(14, 1), (30, 3), (3, 0)]):
        request = a_request([1] * length, request_id=str(number))
        request.block_tables = [[100 * number + block for block in range(5)], list(range(MAX_BLOCKS))]
        request.num_out_of_window = [num_out_of_window, 0]
        sequences.append(ScheduledSequence(request, length - 1, 1, samples=True))
    batch = Batch(1, sequences, 3, [], sampling=[s.request for s in sequences], only_decodes=True)
    columns = DecodeLayout(BLOCK_SIZE, (AttentionWindow(8, is_chunked=True), AttentionWindow())).lay_out(batch)
    columns.fill_in()
    rows, _ = flatten(sequences, block_size=BLOCK_SIZE, max_decode_tokens=1 << 30, num_groups=2)
    ours, expected = (
        buffers.fill(inputs, (), GraphKey(4, 1), BLOCK_SIZE) for buffers, inputs in ((large, columns), (small, rows))
    )
    assert torch.equal(large.slots[:, :4], small.slots[:, :4])
    assert list(columns.written_slots(BLOCK_SIZE)) == list(rows.written_slots(BLOCK_SIZE))
    for one, other in zip(ours, expected, strict=True):
        assert torch.equal(one.seq_lens, other.seq_lens)
        assert torch.equal(one.block_tables, other.block_tables)
    assert ours[0].gone is not None
    assert ours[0].gone.tolist() == [12, 4, 0, 0]
    assert ours[1].gone is None


@pytest.mark.parametrize("max_tokens", [8, 7])
def test_multi_axis_positions_are_consecutive(max_tokens: int) -> None:
    """Text-only positions are equal on all axes; older values become padding."""
    seated = DeviceBlockTables(MAX_SEQS, (MAX_BLOCKS,), CPU)
    buffers = StepBuffers(Capacity(max_tokens, MAX_SEQS, MAX_SEQS, (MAX_BLOCKS,), num_axes=3), seated, CPU)
    inputs = inputs_of(GroupInputs([], [([3, 4], 2, 5)]))
    inputs.axes = [[2, 3, 3, 3, 5], [2, 3, 4, 4, 5], [2, 3, 3, 4, 5]]
    buffers.fill(inputs, (), None, BLOCK_SIZE)
    assert buffers.positions(5).tolist() == inputs.axes
    buffers.fill(inputs_of(GroupInputs([([3, 4], 8), ([5], 2)], [])), (), GraphKey(4, 1), BLOCK_SIZE)
    assert buffers.positions(4).tolist() == [[7, 1, 0, 0]] * 3


def test_each_row_has_the_slot_of_its_adapter_and_padding_has_none() -> None:
    """Independent of earlier row contents."""
    buffers = StepBuffers(
        Capacity(8, 4, 4, (MAX_BLOCKS,), with_adapters=True), DeviceBlockTables(4, (MAX_BLOCKS,), CPU), CPU
    )
    adapters, key = buffers.ints["adapters"], GraphKey(8, with_adapters=True)
    inputs = inputs_of(GroupInputs([([1], 2), ([2], 3)], [([3], 0, 4)]))
    inputs.adapters = [(1, 1, 5), (2, 4, 0)]
    buffers.fill(inputs, (), key, BLOCK_SIZE)
    assert adapters.tolist() == [-1, 5, 0, 0, 0, 0, -1, -1]
    inputs.adapters = [(0, 1, 1)]
    buffers.fill(inputs, (), key, BLOCK_SIZE)
    assert adapters.tolist() == [1] + [-1] * 7
    requests = [a_request([1, 2, 3], request_id=name) for name in "ab"]
    for number, request in enumerate(requests):
        request.block_tables[0] = [4 + number]
    requests[1].adapter = Adapter("sql", 3, b"")
    sequences = [ScheduledSequence(request, 2, 1, samples=True) for request in requests]
    batch = Batch(1, sequences, 2, [], sampling=requests, only_decodes=True)
    buffers.fill(DecodeLayout(BLOCK_SIZE).lay_out(batch), (), GraphKey(4, 1, with_adapters=True), BLOCK_SIZE)
    assert adapters[:4].tolist() == [-1, 3, -1, -1]
