"""paged_prefill for Hopper with warp specialisation: a producer warp walks over the cache's blocks and issues copies by
the tensor memory accelerator; two consumer groups of four warps multiply 64 of the tile's 128 rows each and alternate:
while one group's GEMMs run, the other computes its exponentials.

Inputs, output and reference are paged_prefill's. Supported: 16-bit queries and caches of the same dtype, heads of 64,
128 or 256, blocks of 16 or more tokens, chunks with more than 64 rows (tokens times query heads of a kv head), no soft
cap. All else is left to paged_prefill (see `is_supported`).

```
tile of keys   from the last visible one of a row back to the first:  | masked | ... | whole, unmasked | ... | window |
producer       K0  V0  K1  V1  K2 ...       into STAGES buffers for keys and as many for values
group 0        S0  ·  S1 P0V0  softmax  S2 P1V1  softmax ...
group 1            S0  ·  softmax  S1 P0V0  softmax ...       S: queries times keys; PV: weights times values
```
A GEMM with values runs concurrently with the next one with keys, so a group's softmax is hidden by its own GEMMs and
the other group's. Barriers: `full` completes a phase when a tile's bytes have arrived, `empty` when both groups have
read it, `turns` when the other group has issued its GEMMs.

A box is the part of a block that one copy takes: its rows of one kv head. Tokens after a sequence's end may be
anything, NaN included, and a weight of zero does not remove NaN. So the box with the end is moved back until it ends
there (its first rows, which an earlier box contains, are then masked), and a box after the end is read outside of the
block, where the accelerator writes zeros.
```
block of 16 tokens, 5 of them real:   box moved by 11:   |0 0 0 0 0 0 0 0 0 0 0 k0 k1 k2 k3 k4|
```
Compute-bound, as paged_prefill. Source: own; the schedule of the GEMMs is FlashAttention-3's (arXiv:2407.08608).
"""

from dataclasses import dataclass

import torch

from trimtab_kernels.launch.backends import kernel_backends
from trimtab_kernels.launch.device_facts import HOPPER, DeviceFacts, device_facts
from trimtab_kernels.launch.gluon import (
    WARPS_OF_GROUP,
    copy_from_descriptor,
    gl,
    gluon_jit,
    gluon_kernel,
    hopper,
    mbarrier,
    partition_barrier,
    tensor_descriptor,
)
from trimtab_kernels.launch.jit import tl
from trimtab_kernels.paged_prefill import check_attention_shapes, paged_prefill_triton, score_scale

GROUPS = 2
ROWS = 128
"""Rows of a tile for both groups: a group's sums and scores fill its registers."""
HEAD_SIZES = (64, 128, 256)
MIN_BLOCK = 16
PRODUCER_WARPS, PRODUCER_REGISTERS, GROUP_REGISTERS = 1, 40, 232
"""Registers per thread: 128 threads of each group and of the producer (padded to a group) share 504."""


@dataclass(frozen=True, slots=True)
class GluonPrefillConfig:
    """Keys of a tile, and the number of key tiles (and of value tiles) in shared memory."""

    keys: int
    stages: int


def gluon_prefill_config(head_size: int) -> GluonPrefillConfig:
    """Return as many keys as fit into the registers as scores; then two tiles or more, 160 to 192 KiB of the 227
    available.
    """
    return {64: GluonPrefillConfig(128, 4), 128: GluonPrefillConfig(128, 2), 256: GluonPrefillConfig(64, 2)}[head_size]


def is_supported(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    *,
    max_query_len: int,
    soft_cap: float | None = None,
    chunk_size: int | None = None,
    facts: DeviceFacts | None = None,
) -> bool:
    """Return True if this kernel supports the step."""
    facts = facts or device_facts(query.device)
    block_size, num_kv_heads, head_size = key_cache.shape[1:]
    group = query.shape[1] // num_kv_heads
    fits = facts.capability == HOPPER and soft_cap is None and chunk_size is None and head_size in HEAD_SIZES
    fits = fits and block_size >= MIN_BLOCK and block_size & (block_size - 1) == 0
    fits = fits and query.dtype == key_cache.dtype and query.element_size() == 2
    return fits and group <= ROWS and max_query_len * group > ROWS // GROUPS


@gluon_jit
def _copy_tile(
    box: tl.tensor,
    tiles: tl.tensor,
    full: tl.tensor,
    stage: tl.tensor,
    first: tl.tensor,
    length: tl.tensor,
    table: tl.tensor,
    column: tl.tensor,
    BLOCK_SIZE: gl.constexpr,
    KEYS: gl.constexpr,
) -> None:
    """Copy the tokens from `first` on, box by box."""
    BOX_ROWS: gl.constexpr = box.block_shape[1]
    HEAD_SIZE: gl.constexpr = box.block_shape[2]
    mbarrier.expect(full.index(stage), KEYS * HEAD_SIZE * 2)
    tile = tiles.index(stage)
    for number in gl.static_range(KEYS // BOX_ROWS):
        start = first + number * BOX_ROWS
        real = gl.minimum(gl.maximum(length - start, 0), BOX_ROWS)
        block = gl.load(table + start // BLOCK_SIZE, mask=real > 0, other=0)
        row = gl.where(real > 0, start % BLOCK_SIZE + real - BOX_ROWS, BLOCK_SIZE)
        copy_from_descriptor(box, [block, row, column], full.index(stage), tile.slice(number, 1, 0))


@gluon_jit
def _produce(
    key_box: tl.tensor,
    value_box: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_full: tl.tensor,
    key_empty: tl.tensor,
    value_full: tl.tensor,
    value_empty: tl.tensor,
    table: tl.tensor,
    column: tl.tensor,
    length: tl.tensor,
    last_tile: tl.tensor,
    num_tiles: tl.tensor,
    BLOCK_SIZE: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Producer: load every tile into the next buffer that both groups have read."""
    for done in range(num_tiles):
        stage = done % STAGES
        free = ((done // STAGES) & 1) ^ 1
        first = (last_tile - done) * KEYS
        mbarrier.wait(key_empty.index(stage), free)
        _copy_tile(key_box, keys, key_full, stage, first, length, table, column, BLOCK_SIZE, KEYS)
        mbarrier.wait(value_empty.index(stage), free)
        _copy_tile(value_box, values, value_full, stage, first, length, table, column, BLOCK_SIZE, KEYS)


@gluon_jit
def _mask_scores(
    scores: tl.tensor,
    first: tl.tensor,
    length: tl.tensor,
    row_positions: tl.tensor,
    BOX_ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    WINDOW: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> tl.tensor:
    """Return the scores of the tile from `first` on, -inf for keys hidden from a row. Only the last tile (BOX_ROWS is
    given) may have keys after the end and a moved box.
    """
    slots = gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
    positions = first + slots
    if BOX_ROWS is not None:
        starts = first + slots // BOX_ROWS * BOX_ROWS
        moved = BOX_ROWS - gl.minimum(gl.maximum(length - starts, 0), BOX_ROWS)
        nowhere = 2147483647
        positions = gl.where(slots % BOX_ROWS >= moved, positions - moved, nowhere)
    is_seen = positions[None, :] <= row_positions[:, None]
    if WINDOW is not None:
        is_seen = is_seen & (positions[None, :] > row_positions[:, None] - WINDOW)
    return gl.where(is_seen, scores, float("-inf"))


@gluon_jit
def _softmax_step(
    scores: tl.tensor, highest: tl.tensor, total: tl.tensor, factor: tl.tensor, MASKED: gl.constexpr
) -> tl.tensor:
    """Return (weights, decay of earlier sums, highest, total): one step of the online softmax."""
    new_highest = gl.maximum(highest, gl.max(scores, 1) * factor)
    # A row that has seen no key yet keeps -inf; subtracting it from itself would be NaN.
    base = gl.where(new_highest == float("-inf"), 0.0, new_highest) if MASKED else new_highest
    weights = gl.exp2(scores * factor - base[:, None])
    decay = gl.exp2(highest - base)
    return weights, decay, new_highest, total * decay + gl.sum(weights, 1)


@gluon_jit
def _run_passes(
    sums: tl.tensor,
    weights: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_full: tl.tensor,
    key_empty: tl.tensor,
    value_full: tl.tensor,
    value_empty: tl.tensor,
    turns: tl.tensor,
    row_positions: tl.tensor,
    last_tile: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    factor: tl.tensor,
    ME: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    MASKED: gl.constexpr,
    SCORES: gl.constexpr,
    SUMS: gl.constexpr,
) -> tl.tensor:
    """Run the passes [begin, end) of a group. A pass multiplies its own key tile and the value tile of the previous
    pass, whose weights are an argument; its own weights are passed on. MASKED: some keys are hidden from rows.
    """
    HEAD_SIZE: gl.constexpr = queries.shape[1]
    GROUP_ROWS: gl.constexpr = queries.shape[0]
    for done in range(begin, end):
        stage = done % STAGES
        before = (done - 1) % STAGES
        mbarrier.wait(key_full.index(stage), (done // STAGES) & 1)
        mbarrier.wait(value_full.index(before), ((done - 1) // STAGES) & 1)
        mbarrier.wait(turns.index(ME), (done & 1) ^ (1 - ME))
        tile = keys.index(stage).reshape([KEYS, HEAD_SIZE]).permute([1, 0])
        nothing = gl.zeros([GROUP_ROWS, KEYS], gl.float32, SCORES)
        raw = hopper.warpgroup_mma(queries, tile, nothing, use_acc=False, is_async=True)
        tile_before = values.index(before).reshape([KEYS, HEAD_SIZE])
        under_way = hopper.warpgroup_mma(weights, tile_before, sums, is_async=True)
        mbarrier.arrive(turns.index(1 - ME), count=1)
        scores = hopper.warpgroup_mma_wait(1, deps=[raw])
        mbarrier.arrive(key_empty.index(stage), count=1)
        if MASKED:
            scores = _mask_scores(scores, (last_tile - done) * KEYS, 0, row_positions, None, KEYS, WINDOW, SCORES)
        new_weights, decay, highest, total = _softmax_step(scores, highest, total, factor, MASKED)
        sums, weights = hopper.warpgroup_mma_wait(0, deps=[under_way, weights])
        mbarrier.arrive(value_empty.index(before), count=1)
        sums = sums * gl.convert_layout(decay, gl.SliceLayout(1, SUMS))[:, None]
        weights = gl.convert_layout(new_weights.to(queries.dtype), gl.DotOperandLayout(0, SUMS, 2))
    return sums, weights, highest, total


@gluon_jit
def _consume(
    query: tl.tensor,
    output: tl.tensor,
    sinks: tl.tensor,
    both_queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_full: tl.tensor,
    key_empty: tl.tensor,
    value_full: tl.tensor,
    value_empty: tl.tensor,
    turns: tl.tensor,
    row_start: tl.tensor,
    query_len: tl.tensor,
    first_row: tl.tensor,
    length: tl.tensor,
    kv_head: tl.tensor,
    last_tile: tl.tensor,
    num_tiles: tl.tensor,
    masked_until: tl.tensor,
    whole_until: tl.tensor,
    query_stride: tl.tensor,
    output_stride: tl.tensor,
    factor: tl.tensor,
    value_scale: tl.tensor,
    ME: gl.constexpr,
    GROUP: gl.constexpr,
    BOX_ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
) -> None:
    """Consumer: the rows of group ME, over all tiles."""
    GROUP_ROWS: gl.constexpr = both_queries.shape[1]
    HEAD_SIZE: gl.constexpr = both_queries.shape[2]
    BLOCK_Q: gl.constexpr = both_queries.shape[0] * GROUP_ROWS // GROUP
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_SIZE, 16])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_SIZE, HEAD_SIZE // 8], [4, 1], [1, 0])
    queries = both_queries.index(ME)
    places = ME * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, LINES))
    rows = first_row + places // GROUP
    is_row = (places < BLOCK_Q * GROUP) & (rows < query_len)
    columns = gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, LINES))
    offsets = ((kv_head * GROUP + places % GROUP) * HEAD_SIZE)[:, None] + columns[None, :]
    tokens = (row_start + rows).to(gl.int64)
    inside = is_row[:, None] & (columns >= 0)[None, :]
    if num_tiles > 0:
        queries.store(gl.load(query + tokens[:, None] * query_stride + offsets, mask=inside, other=0.0))
        hopper.fence_async_shared()
        partition_barrier()
        own_places = ME * GROUP_ROWS + gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, SCORES))
        row_positions = length - query_len + first_row + own_places // GROUP
        highest = gl.full([GROUP_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([GROUP_ROWS], gl.float32, gl.SliceLayout(1, SCORES))
        if sinks is not None:  # as if its key were the first one
            highest = gl.load(sinks + kv_head * GROUP + own_places % GROUP) * 1.4426950408889634
            total = total + 1.0
        mbarrier.wait(key_full.index(0), 0)
        mbarrier.wait(turns.index(ME), 1 - ME)
        tile = keys.index(0).reshape([KEYS, HEAD_SIZE]).permute([1, 0])
        nothing = gl.zeros([GROUP_ROWS, KEYS], gl.float32, SCORES)
        raw = hopper.warpgroup_mma(queries, tile, nothing, use_acc=False, is_async=True)
        mbarrier.arrive(turns.index(1 - ME), count=1)
        scores = hopper.warpgroup_mma_wait(0, deps=[raw])
        mbarrier.arrive(key_empty.index(0), count=1)
        scores = _mask_scores(scores, last_tile * KEYS, length, row_positions, BOX_ROWS, KEYS, WINDOW, SCORES)
        new_weights, _, highest, total = _softmax_step(scores, highest, total, factor, True)
        weights = gl.convert_layout(new_weights.to(queries.dtype), gl.DotOperandLayout(0, SUMS, 2))
        sums = gl.zeros([GROUP_ROWS, HEAD_SIZE], gl.float32, SUMS)
        # Each loop is entered only if it runs at least once; otherwise ptxas serialises the matrix instructions.
        if masked_until > 1:
            sums, weights, highest, total = _run_passes(
                sums, weights, highest, total, queries, keys, values, key_full, key_empty, value_full, value_empty,
                turns, row_positions, last_tile, 1, masked_until, factor,
                ME, KEYS, STAGES, WINDOW, True, SCORES, SUMS,
            )  # fmt: skip
        if whole_until > masked_until:
            sums, weights, highest, total = _run_passes(
                sums, weights, highest, total, queries, keys, values, key_full, key_empty, value_full, value_empty,
                turns, row_positions, last_tile, masked_until, whole_until, factor,
                ME, KEYS, STAGES, WINDOW, False, SCORES, SUMS,
            )  # fmt: skip
        if WINDOW is not None and num_tiles > whole_until:
            sums, weights, highest, total = _run_passes(
                sums, weights, highest, total, queries, keys, values, key_full, key_empty, value_full, value_empty,
                turns, row_positions, last_tile, whole_until, num_tiles, factor,
                ME, KEYS, STAGES, WINDOW, True, SCORES, SUMS,
            )  # fmt: skip
        last = (num_tiles - 1) % STAGES
        mbarrier.wait(value_full.index(last), ((num_tiles - 1) // STAGES) & 1)
        under_way = hopper.warpgroup_mma(weights, values.index(last).reshape([KEYS, HEAD_SIZE]), sums, is_async=True)
        sums, weights = hopper.warpgroup_mma_wait(0, deps=[under_way, weights])
        # Padding rows may have seen no key with a window.
        shares = value_scale / gl.where(total == 0.0, 1.0, total)
        result = sums * gl.convert_layout(shares, gl.SliceLayout(1, SUMS))[:, None]
        queries.store(result.to(queries.dtype))  # the buffers are free by now, and rows leave them whole
        partition_barrier()
        gl.store(output + tokens[:, None] * output_stride + offsets, queries.load(LINES), mask=inside)


@gluon_kernel("block_tables", "seq_lens", "query_starts", "num_seqs", "num_q_blocks", "table_stride", consumer_groups=2)
def _paged_prefill_gluon(
    query: tl.tensor,
    key_box: tl.tensor,
    value_box: tl.tensor,
    output: tl.tensor,
    sinks: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    query_starts: tl.tensor,
    num_seqs: tl.tensor,
    num_q_blocks: tl.tensor,
    table_stride: tl.tensor,
    query_stride: tl.tensor,
    output_stride: tl.tensor,
    factor: tl.tensor,
    value_scale: tl.tensor,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    WINDOW: gl.constexpr,
    REGISTERS: gl.constexpr,
) -> None:
    """CTA (kv head of a q block), as in paged_prefill."""
    BOX_ROWS: gl.constexpr = key_box.block_shape[1]
    HEAD_SIZE: gl.constexpr = key_box.block_shape[2]
    BLOCK_Q: gl.constexpr = BLOCK_M // GROUP
    kv_head = gl.program_id(0) % NUM_KV_HEADS
    block = num_q_blocks - 1 - gl.program_id(0) // NUM_KV_HEADS
    low, high = num_seqs * 0, num_seqs  # the sequence is in [low, high)
    while low + 1 < high:
        middle = (low + high) // 2
        if gl.load(query_starts + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle
    row_start = gl.load(query_starts + low)
    query_len = gl.load(query_starts + low + 1) - row_start
    first_row = (block - (row_start // BLOCK_Q + low)) * BLOCK_Q
    length = gl.load(seq_lens + low)
    table = block_tables + low.to(gl.int64) * table_stride
    # Passes run from the last tile backwards. [0, masked_until) has keys after the first row or after the end; all keys
    # of [masked_until, whole_until) are visible to all rows; the rest is partly hidden by the window.
    first_position = gl.maximum(length - query_len + first_row, 0)
    end = gl.minimum(first_position + BLOCK_Q, length)
    last_tile = gl.maximum(end - 1, 0) // KEYS
    first_tile = last_tile * 0
    if WINDOW is not None:
        first_tile = gl.maximum(first_position - WINDOW + 1, 0) // KEYS
    num_tiles = gl.where(first_row < query_len, last_tile + 1 - first_tile, 0)
    masked_until = gl.minimum(gl.maximum(last_tile + 1 - (first_position + 1) // KEYS, 1), num_tiles)
    whole_until = num_tiles
    if WINDOW is not None:
        first_whole = (gl.maximum(end - WINDOW, 0) + KEYS - 1) // KEYS
        whole_until = gl.minimum(gl.maximum(last_tile + 1 - first_whole, masked_until), num_tiles)

    dtype: gl.constexpr = key_box.dtype
    MATRIX: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BOXES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(dtype, [2, BLOCK_M // 2, HEAD_SIZE], MATRIX)
    keys = gl.allocate_shared_memory(dtype, [STAGES, KEYS // BOX_ROWS, BOX_ROWS, HEAD_SIZE], BOXES)
    values = gl.allocate_shared_memory(dtype, [STAGES, KEYS // BOX_ROWS, BOX_ROWS, HEAD_SIZE], BOXES)
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    key_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    value_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(key_full.index(stage), count=1)
        mbarrier.init(value_full.index(stage), count=1)
        mbarrier.init(key_empty.index(stage), count=2)
        mbarrier.init(value_empty.index(stage), count=2)
    for group in gl.static_range(2):
        mbarrier.init(turns.index(group), count=1)
    hopper.fence_async_shared()
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_consume, (
                query, output, sinks, queries, keys, values, key_full, key_empty, value_full, value_empty, turns,
                row_start, query_len, first_row, length, kv_head, last_tile, num_tiles, masked_until, whole_until,
                query_stride, output_stride, factor, value_scale, FIRST, GROUP, BOX_ROWS, KEYS, STAGES, WINDOW,
            )),
            (_consume, (
                query, output, sinks, queries, keys, values, key_full, key_empty, value_full, value_empty, turns,
                row_start, query_len, first_row, length, kv_head, last_tile, num_tiles, masked_until, whole_until,
                query_stride, output_stride, factor, value_scale, SECOND, GROUP, BOX_ROWS, KEYS, STAGES, WINDOW,
            )),
            (_produce, (
                key_box, value_box, keys, values, key_full, key_empty, value_full, value_empty, table,
                kv_head * HEAD_SIZE, length, last_tile, num_tiles, BLOCK_SIZE, KEYS, STAGES,
            )),
        ],
        [4, 1],
        REGISTERS,
    )  # fmt: skip


def paged_prefill_gluon(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the kernel for a supported step. `output` may be a slice of a larger batch's.

    Raises:
        ValueError: shapes do not match.
    """
    check_attention_shapes("paged_prefill_gluon", query, key_cache, block_tables, seq_lens)
    num_tokens, num_heads, head_size = query.shape
    num_blocks, block_size, num_kv_heads = key_cache.shape[:3]
    group, num_seqs = num_heads // num_kv_heads, seq_lens.shape[0]
    output = torch.empty_like(query) if output is None else output
    if num_tokens == 0:
        return output
    config = gluon_prefill_config(head_size)
    width = num_kv_heads * head_size
    box = [1, min(block_size, config.keys), head_size]
    key_box, value_box = (
        tensor_descriptor(cache, [num_blocks, block_size, width], [block_size * width, width, 1], box)
        for cache in (key_cache, value_cache)
    )
    num_q_blocks = num_tokens // (ROWS // group) + num_seqs
    _paged_prefill_gluon[(num_kv_heads * num_q_blocks,)](
        query,
        key_box,
        value_box,
        output,
        sinks,
        block_tables,
        seq_lens,
        query_starts,
        num_seqs,
        num_q_blocks,
        block_tables.stride(0),
        query.stride(0),
        output.stride(0),
        score_scale(scale, key_scale, None),
        value_scale,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        BLOCK_M=ROWS,
        KEYS=config.keys,
        STAGES=config.stages,
        WINDOW=window,
        REGISTERS=(GROUP_REGISTERS, PRODUCER_REGISTERS),
        num_warps=WARPS_OF_GROUP,
    )
    return output


def prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    chunk_size: int | None = None,
    gone: torch.Tensor | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Use this kernel if `kernel_backends` enables it and it supports the step, otherwise paged_prefill_triton."""
    tensors = (query, key_cache, value_cache, block_tables, seq_lens, query_starts)
    if kernel_backends().gluon_prefill and is_supported(
        query, key_cache, max_query_len=max_query_len, soft_cap=soft_cap, chunk_size=chunk_size
    ):
        return paged_prefill_gluon(
            *tensors,
            scale=scale,
            window=window,
            sinks=sinks,
            key_scale=key_scale,
            value_scale=value_scale,
            output=output,
        )
    return paged_prefill_triton(
        *tensors,
        max_query_len=max_query_len,
        scale=scale,
        window=window,
        chunk_size=chunk_size,
        gone=gone,
        soft_cap=soft_cap,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
        output=output,
    )
