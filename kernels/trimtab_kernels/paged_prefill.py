"""Attention over a paged KV cache for any mix of prefill chunks and decodes: unified attention.

query                   [num_tokens, num_heads, head_size]                 fp32 | bf16 | fp16, heads contiguous
key_cache, value_cache  [num_blocks, block_size, num_kv_heads, head_size]  contiguous; dtype of query, or float8_e4m3fn
block_tables            [num_seqs, width] int32: blocks of each sequence
seq_lens                [num_seqs] int32: tokens in the cache, including the query's
query_starts            [num_seqs + 1] int32: sequence i has the query rows [query_starts[i], query_starts[i + 1])
gone                    [num_seqs] int32, with chunk_size: tokens of the sequence before those in its table
y                       like query

Query row r of a sequence is at position seq_len - query_len + r and sees the keys up to its own: all of them, the last
`window`, or those of its attention chunk (positions from the start of the sequence are cut into chunks of chunk_size,
Llama 4). Tables may start at the first visible key of the first row. Scores are scaled, then soft-capped: cap *
tanh(score / cap) (Gemma 2). Sinks [num_heads] float32 are scores in the softmax without a value (gpt-oss). A float8
cache contains x / scale. float32 is multiplied as three tf32 GEMMs, nearly exactly; softmax statistics are fp32 (online
softmax: Dao et al. 2022, arXiv:2205.14135; the block layout of the queries follows the unified attention kernel of
vLLM, arXiv:2511.11581).

A CTA takes BLOCK_Q consecutive query rows with all query heads of one kv head, so that keys are read once for the whole
group:
```
query rows   |---- sequence 0 ----|-- sequence 1 --|      CTA b belongs to the last sequence i with
q blocks     | 0 | 1 | 2 | 3 |  (4)  | 5 | 6 | 7 | (8)    query_starts[i] // BLOCK_Q + i <= b; some have no rows
```
Compute-bound: 4 * num_heads * head_size * sum(visible keys per row) FLOPs. Source: own.
"""

import math
from dataclasses import dataclass

import torch

from trimtab_kernels.launch.device_facts import DeviceFacts, device_facts
from trimtab_kernels.launch.jit import jit, kernel, next_power_of_2, tl

LOG2_E = math.log2(math.e)  # exp2 is one instruction, exp is two
MIN_ROWS = 16
"""Rows of the smallest matrix instruction; fewer are padded."""


def paged_prefill_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk_size: int | None = None,
    gone: torch.Tensor | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """Compute one sequence at a time in float32, with the whole score matrix."""
    output = torch.zeros_like(query)
    group = query.shape[1] // key_cache.shape[2]
    starts = query_starts.tolist()
    for index, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[index], starts[index + 1])
        if length == 0 or rows.start == rows.stop:
            continue
        blocks = block_tables[index, : -(-length // key_cache.shape[1])].long()
        keys, values = (
            (cache[blocks].float() * factor).flatten(0, 1)[:length].repeat_interleave(group, dim=1)
            for cache, factor in ((key_cache, key_scale), (value_cache, value_scale))
        )
        scores = torch.einsum("qhd,khd->hqk", query[rows].float(), keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        positions = torch.arange(length - (rows.stop - rows.start), length, device=query.device).unsqueeze(1)
        seen = torch.arange(length, device=query.device)
        hidden = seen > positions
        if window is not None:
            hidden |= seen <= positions - window
        if chunk_size is not None:
            before = 0 if gone is None else int(gone[index])
            hidden |= seen + before < (positions + before) // chunk_size * chunk_size
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([sinks.float().view(-1, 1, 1).expand(-1, scores.shape[1], 1), scores], dim=-1)
        weights = scores.softmax(dim=-1)[..., -length:]
        output[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return output


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Query rows (times heads of the group) and keys of a tile, warps, and tiles in flight."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def prefill_config(head_size: int, group: int, max_query_len: int, itemsize: int, facts: DeviceFacts) -> PrefillConfig:
    """Return 128 rows per key tile, so that the L2 cache keeps up with the matrix units; fewer for short chunks.

    On Hopper, one warp group computes them if the sums fit into its registers (heads of 128): then two CTAs share a
    multiprocessor, and one multiplies while the other computes its softmax. Wide heads and float32 use smaller tiles,
    so that the tiles in flight fit into the shared memory.
    """
    rows = min(128, max(MIN_ROWS, next_power_of_2(group), next_power_of_2(max_query_len * group)))
    bytes_per_key = next_power_of_2(head_size) * itemsize
    keys = 64 if bytes_per_key <= 256 else 32
    if bytes_per_key > 512:  # float32 with heads of 256: correctness only
        rows, keys = max(MIN_ROWS, next_power_of_2(group)), 16
    elif bytes_per_key > 256 and facts.capability < 90:
        rows = min(rows, max(64, next_power_of_2(group)))
    stage_bytes = 2 * keys * bytes_per_key
    room = facts.shared_bytes - rows * bytes_per_key - rows * keys * itemsize
    stages = max(1, min(3, room // stage_bytes))
    fits_one_group = facts.capability == 90 and bytes_per_key <= 256
    return PrefillConfig(rows, keys, 8 if rows >= 128 and not fits_one_group else 4, stages)


@jit
def apply_soft_cap(scores: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """Return cap * tanh(scores / cap), computed by the sigmoid, which is exact at both ends."""
    return CAP * (2.0 * tl.sigmoid(2.0 * scores / CAP) - 1.0)


@jit
def slots_of(
    table: tl.tensor,
    positions: tl.tensor,
    is_real: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BY_MASK: tl.constexpr = False,
) -> tl.tensor:
    """Return the cache slots of the tokens at these positions, int64. Positions that are not real get block 0.

    BY_MASK: compute the offset in a block, whose size is a power of two, by `&`. The compiler derives other code from
    it: decodes are faster (float8, 256 of 1,024: 161 -> 152 us on an H200), prompts slower (8,192: 1,317 -> 1,361
    us).
    """
    blocks = tl.load(table + positions // BLOCK_SIZE, mask=is_real, other=0).to(tl.int64)
    if BY_MASK:
        return blocks * BLOCK_SIZE + (positions & (BLOCK_SIZE - 1))
    return blocks * BLOCK_SIZE + positions % BLOCK_SIZE


@jit
def _attend_keys(
    accumulator: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    queries: tl.tensor,
    row_positions: tl.tensor,
    row_firsts: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    table: tl.tensor,
    kv_head: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    length: tl.tensor,
    score_scale: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Continue the online softmax over the keys [first, last), whole tiles. MASKED: some keys are hidden from rows.
    row_firsts: the start of each row's attention chunk, with CHUNK.
    """
    columns = tl.arange(0, BLOCK_D)
    in_head = columns < HEAD_SIZE
    for start in tl.range(first, last, KEYS):
        positions = start + tl.arange(0, KEYS)
        is_real = positions < length
        places = slots_of(table, positions, is_real, BLOCK_SIZE) * (NUM_KV_HEADS * HEAD_SIZE) + kv_head * HEAD_SIZE
        offsets = places[:, None] + columns[None, :]
        # Unmasked tiles are entirely below the length.
        if MASKED or BLOCK_D != HEAD_SIZE:
            inside = is_real[:, None] & in_head[None, :]
            keys = tl.load(key_cache + offsets, mask=inside, other=0.0)
            values = tl.load(value_cache + offsets, mask=inside, other=0.0)
        else:
            keys = tl.load(key_cache + offsets)
            values = tl.load(value_cache + offsets)
        scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="tf32x3")
        if SOFT_CAP is not None:
            scores = apply_soft_cap(scores * score_scale, SOFT_CAP)
        if MASKED:
            is_seen = positions[None, :] <= row_positions[:, None]
            if WINDOW is not None:
                is_seen &= positions[None, :] > row_positions[:, None] - WINDOW
            if CHUNK is not None:
                is_seen &= positions[None, :] >= row_firsts[:, None]
            scores = tl.where(is_seen, scores, float("-inf"))
        # The factor is applied after the maximum, so that scaling and subtracting are one instruction per score.
        factor = 1.4426950408889634 if SOFT_CAP is not None else score_scale
        new_highest = tl.maximum(highest, tl.max(scores, 1) * factor)
        # A row that has seen no key yet keeps -inf; subtracting it from itself would be NaN.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest) if MASKED else new_highest
        weights = tl.exp2(scores * factor - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weights, 1)
        accumulator = accumulator * decay[:, None]
        accumulator = tl.dot(weights.to(queries.dtype), values.to(queries.dtype), accumulator, input_precision="tf32x3")
        highest = new_highest
    return accumulator, highest, total


@kernel("block_tables", "seq_lens", "query_starts", "gone", "num_seqs", "num_q_blocks", "table_stride")
def _paged_prefill(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    output: tl.tensor,
    sinks: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    query_starts: tl.tensor,
    gone: tl.tensor,
    num_seqs: tl.tensor,
    num_q_blocks: tl.tensor,
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
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFT_CAP: tl.constexpr,
) -> None:
    """CTA (kv head of a q block). The last blocks run first: with a causal mask they have the most keys. The grid has
    one axis, because only the first one allows more than 65,535 CTAs.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    block = num_q_blocks - 1 - tl.program_id(0) // NUM_KV_HEADS
    low, high = num_seqs * 0, num_seqs  # the sequence is in [low, high); a tensor even if the loop does not run
    while low + 1 < high:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle
    row_start = tl.load(query_starts + low)
    query_len = tl.load(query_starts + low + 1) - row_start
    first_row = (block - (row_start // BLOCK_Q + low)) * BLOCK_Q
    if first_row < query_len:
        length = tl.load(seq_lens + low)
        before = length - query_len
        places = tl.arange(0, BLOCK_M)
        columns = tl.arange(0, BLOCK_D)
        rows = first_row + places // GROUP
        is_row = (places < BLOCK_Q * GROUP) & (rows < query_len)
        heads = kv_head * GROUP + places % GROUP
        offsets = heads[:, None] * HEAD_SIZE + columns[None, :]
        inside = is_row[:, None] & (columns < HEAD_SIZE)[None, :]
        tokens = (row_start + rows).to(tl.int64)
        queries = tl.load(query + tokens[:, None] * query_stride + offsets, mask=inside, other=0.0)
        row_positions = before + rows
        end = tl.minimum(before + first_row + BLOCK_Q, length)
        # Keys visible to every row of the block: whole tiles up to the first row's own position.
        first = 0
        seen_by_all = (before + first_row + 1) // KEYS * KEYS
        if WINDOW is not None:
            first = tl.maximum(before + first_row - WINDOW + 1, 0) // KEYS * KEYS
            seen_by_all = first
        row_firsts = row_positions
        if CHUNK is not None:
            # Tiles start at the first row's attention chunk, so that most are whole; if another chunk starts among the
            # rows, all tiles are masked.
            moved = tl.load(gone + low)
            row_firsts = (row_positions + moved) // CHUNK * CHUNK - moved
            chunk = (before + first_row + moved) // CHUNK
            first = tl.maximum(chunk * CHUNK - moved, 0)
            whole = first + (before + first_row + 1 - first) // KEYS * KEYS
            seen_by_all = tl.where((end - 1 + moved) // CHUNK == chunk, whole, first)
        accumulator = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        if sinks is not None:  # as if its key were the first one
            highest = tl.load(sinks + heads, mask=is_row, other=0.0) * 1.4426950408889634
            total += 1.0
        table = block_tables + low.to(tl.int64) * table_stride
        # Each loop is entered only if it runs at least once: a loop of matrix instructions that may run zero times
        # gives their accumulators a second definition, and ptxas then serialises them.
        if WINDOW is None and first < seen_by_all:
            accumulator, highest, total = _attend_keys(
                accumulator, highest, total, queries, row_positions, row_firsts, key_cache, value_cache, table, kv_head,
                first, seen_by_all, length, score_scale,
                NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCK_D, KEYS, WINDOW, CHUNK, SOFT_CAP, MASKED=False,
            )  # fmt: skip
        if seen_by_all < end:
            accumulator, highest, total = _attend_keys(
                accumulator, highest, total, queries, row_positions, row_firsts, key_cache, value_cache, table, kv_head,
                seen_by_all, end, length, score_scale,
                NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCK_D, KEYS, WINDOW, CHUNK, SOFT_CAP, MASKED=True,
            )  # fmt: skip
        # Padding rows may have seen no key with a window.
        result = accumulator * (value_scale / tl.where(total == 0.0, 1.0, total))[:, None]
        tl.store(output + tokens[:, None] * output_stride + offsets, result.to(output.dtype.element_ty), mask=inside)


def paged_prefill_triton(
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
    facts: DeviceFacts | None = None,
) -> torch.Tensor:
    """Launch the kernel. `max_query_len` selects the tile, and may exceed every sequence's length; `output` may be a
    slice of a larger batch's.

    Raises:
        ValueError: shapes do not match.
    """
    check_attention_shapes("paged_prefill", query, key_cache, block_tables, seq_lens)
    check_chunks("paged_prefill", chunk_size, gone, seq_lens, window)
    num_tokens, num_heads, head_size = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    group, num_seqs = num_heads // num_kv_heads, seq_lens.shape[0]
    output = torch.empty_like(query) if output is None else output
    if num_tokens == 0:
        return output
    config = prefill_config(head_size, group, max_query_len, query.element_size(), facts or device_facts(query.device))
    num_q_blocks = num_tokens // (config.rows // group) + num_seqs
    _paged_prefill[(num_kv_heads * num_q_blocks,)](
        query,
        key_cache,
        value_cache,
        output,
        sinks,
        block_tables,
        seq_lens,
        query_starts,
        gone,
        num_seqs,
        num_q_blocks,
        block_tables.stride(0),
        query.stride(0),
        output.stride(0),
        score_scale(scale, key_scale, soft_cap),
        value_scale,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=block_size,
        BLOCK_D=max(MIN_ROWS, next_power_of_2(head_size)),
        BLOCK_M=config.rows,
        KEYS=config.keys,
        WINDOW=window,
        CHUNK=chunk_size,
        SOFT_CAP=soft_cap,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return output


def score_scale(scale: float, key_scale: float, soft_cap: float | None) -> float:
    """Return the factor of raw scores: converted to the base-2 logarithm at once, unless a soft cap is applied
    first.
    """
    return scale * key_scale * (1.0 if soft_cap is not None else LOG2_E)


def check_attention_shapes(
    name: str, query: torch.Tensor, key_cache: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor
) -> None:
    """Check the shapes.

    Raises:
        ValueError: shapes do not match; the message names the kernel.
    """
    num_kv_heads, head_size = key_cache.shape[2:]
    if query.shape[1] % num_kv_heads or query.shape[2] != head_size or query.stride()[1:] != (head_size, 1):
        raise ValueError(
            f"{name}: query {list(query.shape)} does not fit the cache {list(key_cache.shape)}: num_heads must be a "
            f"multiple of num_kv_heads, head_size equal, and a token's heads in a row"
        )
    if block_tables.shape[0] != seq_lens.shape[0] or block_tables.dtype != torch.int32 or head_size > 256:
        raise ValueError(
            f"{name}: block_tables is {list(block_tables.shape)} {block_tables.dtype}, seq_lens "
            f"{list(seq_lens.shape)}, head_size {head_size}; tables and lengths are int32, one row per sequence, heads "
            f"256 at most"
        )


def check_chunks(
    name: str, chunk_size: int | None, gone: torch.Tensor | None, seq_lens: torch.Tensor, window: int | None
) -> None:
    """Check the arguments of attention chunks.

    Raises:
        ValueError: they do not match; the message names the kernel.
    """
    if chunk_size is None and gone is None:
        return
    if chunk_size is None or gone is None or window is not None or gone.shape != seq_lens.shape:
        raise ValueError(
            f"{name}: chunk_size is {chunk_size}, window {window}, gone "
            f"{None if gone is None else list(gone.shape)}; pass the number of tokens before the table for each of the "
            f"{seq_lens.shape[0]} sequences, and have no window"
        )
