"""Attention of one new token per sequence over a paged KV cache: PagedAttention (Kwon et al. 2023, arXiv:2309.06180).

query         [num_seqs, num_heads, head_size]; everything else as in paged_prefill, one query row per sequence
seq_lens      [num_seqs] int32: tokens in the cache, the new one included; 0 marks a row of padding, which yields zeros
y             like query

Two forms, as PagedAttention's v1 and v2, chosen by `num_splits`:
- single pass: a program reads all keys of one sequence for one kv head (with all query heads of its group);
- split: `num_splits` programs share a sequence's keys evenly; a second kernel merges their parts by the log-sum-exp.
```
keys of a sequence   |-- split 0 --|-- split 1 --|-- split 2 --|- 3 -|      each a multiple of the tile
```
The split depends on the longest sequence that may come and on the batch's size alone, so a captured graph stays right
as sequences grow. Bound by memory: 2 * sum(seq_lens) * num_kv_heads * head_size * cache itemsize bytes. Source: own.
"""

import torch

from trimtab_kernels.launch.device_facts import DeviceFacts, device_facts
from trimtab_kernels.launch.jit import cdiv, jit, kernel, next_power_of_2, tl
from trimtab_kernels.paged_prefill import (
    MIN_ROWS,
    capped,
    check_attention_shapes,
    paged_prefill_reference,
    score_scale,
    slots_of,
)

MIN_SPLIT_TOKENS = 256
"""A split's part costs its reader and writer 8 / tokens of the bytes of its keys (fp32, a group of 4): 3 % here."""
MAX_SINGLE_PASS_TOKENS = 8192
"""Beyond this one program would still read when all others have ended."""
MAX_SPLITS = 64
"""What the merging kernel holds in registers at once."""
PROGRAMS_PER_SM = 8
"""Two or three programs run on a multiprocessor at once; with this many in all the last round is small."""


def paged_decode_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """paged_prefill's, with one row per sequence."""
    starts = torch.arange(query.shape[0] + 1, dtype=torch.int32, device=query.device)
    return paged_prefill_reference(
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        starts,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
    )


def num_splits(num_seqs: int, num_kv_heads: int, max_seq_len: int, facts: DeviceFacts) -> int:
    """Programs that share a sequence; 1 is the single pass. A power of two, so that few variants exist.

    Like PagedAttention's rule: a single pass for contexts of up to 8192 tokens when the batch alone fills the device.
    Otherwise as many splits as fill it, none shorter than MIN_SPLIT_TOKENS.
    """
    to_fill = cdiv(PROGRAMS_PER_SM * facts.num_sms, num_seqs * num_kv_heads)
    to_balance = cdiv(max_seq_len, MAX_SINGLE_PASS_TOKENS)
    useful = max(1, max_seq_len // MIN_SPLIT_TOKENS)
    return min(MAX_SPLITS, next_power_of_2(useful), next_power_of_2(max(to_fill, to_balance)))


def decode_tile(head_size: int, itemsize: int, facts: DeviceFacts) -> tuple[int, int]:
    """(keys of a tile, stages of its pipeline). Keys and values of a tile take 32 KiB.

    A tile's address comes from the block table, so three stages keep one tile in flight and five keep two. Two let
    three programs share a Hopper multiprocessor, with 192 KiB in flight; Ada has room for one each.
    """
    bytes_per_key = next_power_of_2(head_size) * itemsize
    keys = min(128, max(16, 16384 // bytes_per_key))
    return keys, 5 if facts.shared_bytes > 10 * keys * bytes_per_key else 3


@jit
def beside_float8(queries: tl.tensor, score_scale: tl.tensor) -> tl.tensor:
    """(queries, score_scale) for a float8 cache: float16 holds its values exactly and takes half the instructions that
    bfloat16 takes to convert to. The queries are divided by their largest value, so that float16 holds them too."""
    largest = tl.maximum(tl.max(tl.max(tl.abs(queries.to(tl.float32)), 1), 0), 1e-30)
    return (queries.to(tl.float32) / largest).to(tl.float16), score_scale * largest


@kernel("block_tables", "seq_lens", "table_stride")
def _paged_decode(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    output: tl.tensor,
    sinks: tl.tensor,
    part_sums: tl.tensor,
    part_statistics: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    table_stride: tl.tensor,
    query_stride: tl.tensor,
    output_stride: tl.tensor,
    score_scale: tl.tensor,
    value_scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    KEYS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
) -> None:
    """Program (kv head, split, sequence): neighbours read the same blocks at the same time."""
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    length = tl.load(seq_lens + sequence)
    places = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + places
    in_head = columns < HEAD_SIZE
    inside = (places < GROUP)[:, None] & in_head[None, :]
    offsets = heads[:, None] * HEAD_SIZE + columns[None, :]
    queries = tl.load(query + sequence * query_stride + offsets, mask=inside, other=0.0)
    if key_cache.dtype.element_ty.is_fp8() and queries.dtype != tl.float32:
        queries, score_scale = beside_float8(queries, score_scale)
    table = block_tables + sequence * table_stride
    first_key = 0
    if WINDOW is not None:
        first_key = tl.maximum(length - WINDOW, 0)
    first_tile = first_key // KEYS
    num_tiles = tl.cdiv(length, KEYS)
    tiles_per_split = tl.cdiv(num_tiles - first_tile, NUM_SPLITS)
    first = (first_tile + split * tiles_per_split) * KEYS
    last = tl.minimum(first + tiles_per_split * KEYS, length)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if sinks is not None:  # as if its key came first, in the first split
        own = tl.load(sinks + heads, mask=places < GROUP, other=0.0) * 1.4426950408889634
        highest = tl.where(split == 0, own, highest)
        total += tl.where(split == 0, 1.0, 0.0)
    for start in tl.range(first, last, KEYS):
        positions = start + tl.arange(0, KEYS)
        is_seen = positions < length
        if WINDOW is not None:
            is_seen &= positions >= first_key
        slots = slots_of(table, positions, is_seen, BLOCK_SIZE) * (NUM_KV_HEADS * HEAD_SIZE) + kv_head * HEAD_SIZE
        tile = slots[:, None] + columns[None, :]
        is_loaded = is_seen[:, None] & in_head[None, :]
        keys = tl.load(key_cache + tile, mask=is_loaded, other=0.0)
        values = tl.load(value_cache + tile, mask=is_loaded, other=0.0)
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="tf32x3") * score_scale
        if SOFT_CAP is not None:
            scores = capped(scores, SOFT_CAP) * 1.4426950408889634
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        # Every tile has a key that is seen, so the maximum is finite from the first tile on.
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        decay = tl.exp2(highest - new_highest)
        total = total * decay + tl.sum(weights, 1)
        accumulator = accumulator * decay[:, None]
        accumulator = tl.dot(weights.to(queries.dtype), values.to(queries.dtype), accumulator, input_precision="tf32x3")
        highest = new_highest
    if NUM_SPLITS == 1:
        result = accumulator * (value_scale / tl.where(total == 0.0, 1.0, total))[:, None]
        places = output + sequence * output_stride + offsets
        tl.store(places, result.to(output.dtype.element_ty), mask=inside)
    else:
        row = (sequence * (NUM_KV_HEADS * GROUP) + heads) * NUM_SPLITS + split
        tl.store(part_sums + row[:, None] * HEAD_SIZE + columns[None, :], accumulator, mask=inside)
        tl.store(part_statistics + 2 * row, highest, mask=tl.arange(0, BLOCK_M) < GROUP)
        tl.store(part_statistics + 2 * row + 1, total, mask=tl.arange(0, BLOCK_M) < GROUP)


@kernel()
def _merge_splits(
    part_sums: tl.tensor,
    part_statistics: tl.tensor,
    output: tl.tensor,
    output_stride: tl.tensor,
    value_scale: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
) -> None:
    """Program (head, sequence). Splits without keys have the statistics (-inf, 0) and weigh nothing."""
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, BLOCK_D)
    inside = columns < HEAD_SIZE
    rows = (sequence * NUM_HEADS + head) * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    highest = tl.load(part_statistics + 2 * rows)
    totals = tl.load(part_statistics + 2 * rows + 1)
    top = tl.max(highest, 0)
    weights = tl.exp2(highest - tl.where(top == float("-inf"), 0.0, top))
    sums = tl.load(part_sums + rows[:, None] * HEAD_SIZE + columns[None, :], mask=inside[None, :], other=0.0)
    total = tl.sum(totals * weights, 0)
    result = tl.sum(sums * weights[:, None], 0) * (value_scale / tl.where(total == 0.0, 1.0, total))
    place = output + sequence * output_stride + head * HEAD_SIZE + columns
    tl.store(place, result.to(output.dtype.element_ty), mask=inside)


def paged_decode_triton(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    max_seq_len: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    output: torch.Tensor | None = None,
    splits: int | None = None,
    facts: DeviceFacts | None = None,
) -> torch.Tensor:
    """Launch one kernel, or two. Raises ValueError where shapes do not fit. `max_seq_len` chooses the form and may be
    more than any sequence has; `splits` overrides the choice."""
    check_attention_shapes("paged_decode", query, key_cache, block_tables, seq_lens)
    num_seqs, num_heads, head_size = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    output = torch.empty_like(query) if output is None else output
    if num_seqs == 0:
        return output
    facts = facts or device_facts(query.device)
    visible = max_seq_len if window is None else min(window, max_seq_len)
    splits = splits or num_splits(num_seqs, num_kv_heads, visible, facts)
    keys, stages = decode_tile(head_size, query.element_size(), facts)
    block_d = max(MIN_ROWS, next_power_of_2(head_size))
    sums = statistics = None
    if splits > 1:
        sums = torch.empty(num_seqs, num_heads, splits, head_size, dtype=torch.float32, device=query.device)
        statistics = torch.empty(num_seqs, num_heads, splits, 2, dtype=torch.float32, device=query.device)
    _paged_decode[(num_kv_heads, splits, num_seqs)](
        query,
        key_cache,
        value_cache,
        output,
        sinks,
        sums,
        statistics,
        block_tables,
        seq_lens,
        block_tables.stride(0),
        query.stride(0),
        output.stride(0),
        score_scale(scale, key_scale, soft_cap),
        value_scale,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=block_size,
        BLOCK_D=block_d,
        BLOCK_M=max(MIN_ROWS, next_power_of_2(group)),
        KEYS=keys,
        NUM_SPLITS=splits,
        WINDOW=window,
        SOFT_CAP=soft_cap,
        num_warps=4,
        num_stages=stages,
    )
    if splits > 1:
        _merge_splits[(num_heads, num_seqs)](
            sums,
            statistics,
            output,
            output.stride(0),
            value_scale,
            NUM_HEADS=num_heads,
            HEAD_SIZE=head_size,
            BLOCK_D=block_d,
            NUM_SPLITS=splits,
            num_warps=4,
        )
    return output
