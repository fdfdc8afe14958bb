"""Attention over a paged cache of latent vectors for any mix of prefill chunks and decodes: multi-head latent attention
(DeepSeek-V2, arXiv:2405.04434) with its up-projections absorbed into the queries and applied after the sum.

query         [num_tokens, num_heads, width]  fp32 | bf16 | fp16, heads contiguous: the latent part, then the
              rotary part
cache         [num_blocks, block_size, 1, width]  contiguous; dtype of query, or float8: one vector per token for all
              heads; all width elements are the key, and the first kv_rank are also the value
block_tables, seq_lens, query_starts  as in paged_prefill
y             [num_tokens, num_heads, kv_rank]

A vector is read once for both GEMMs. All heads read the same vectors, so a CTA takes consecutive rows of a sequence,
across tokens and heads:
```
rows of a sequence   | token 0: head 0 .. 127 | token 1: head 0 .. 127 | token 2 …
CTAs                 |    0     |     1       |     2     |     3      |    4 …
```
As in paged_prefill, a float8 cache contains x / scale, float32 is multiplied as three tf32 GEMMs, and softmax
statistics are fp32. Compute-bound: 2 * num_heads * (width + kv_rank) * sum(visible keys per token) FLOPs. Source: own.
"""

from dataclasses import dataclass

import torch

from trimtab_kernels.launch.device_facts import HOPPER, DeviceFacts, device_facts
from trimtab_kernels.launch.jit import jit, kernel, next_power_of_2, tl
from trimtab_kernels.paged_prefill import MIN_ROWS, paged_prefill_reference, score_scale, slots_of

ROW_BYTES = 16
"""Bytes that are copied at once. Triton 3.6 assumes that a token's slot is a multiple of the block size when it derives
the alignment of its row: rows of 168 bytes were read at unaligned addresses, and the device was lost."""
NARROW_ROWS, WIDE_ROWS = 32, 64
"""Rows of a tile at most. 64 are for Hopper's warp-group instructions: their sums take half of the registers, and
queries and two tiles of keys take 216 KiB of shared memory. Other devices use 32."""
DEEPSEEK_WIDTH = 576
"""Largest width for which two CTAs of 32 rows fit into the shared memory."""


def latent_prefill_reference(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    kv_rank: int,
    scale: float,
    cache_scale: float = 1.0,
) -> torch.Tensor:
    """Return the result of paged_prefill_reference with the keys as values, cut to kv_rank."""
    attended = paged_prefill_reference(
        query,
        cache,
        cache,
        block_tables,
        seq_lens,
        query_starts,
        scale=scale,
        key_scale=cache_scale,
        value_scale=cache_scale,
    )
    return attended[..., :kv_rank].contiguous()


@dataclass(frozen=True, slots=True)
class LatentTile:
    """Query rows and keys of a tile, warps, and tiles in flight."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def latent_tile(num_rows: int, width: int, itemsize: int, cache_itemsize: int, facts: DeviceFacts) -> LatentTile:
    """Return the tile for up to `num_rows` rows (tokens times heads) of a sequence that read the same keys.

    A key of DeepSeek-V3 has 576 elements, and queries are read again for each tile of keys, so tall tiles use more keys
    if the shared memory allows it. Tiles of 16 rows, and with Hopper's memory those of 32 if all are that small, run
    two CTAs per multiprocessor. Conversions of a float8 cache take the registers of more rows; float32 is for
    correctness only.

    Raises:
        ValueError: the tile does not fit.
    """
    if itemsize == 4:
        least_bytes = 3 * MIN_ROWS * width * itemsize  # queries, keys, and keys in the dtype of the queries
        if least_bytes > facts.shared_bytes:
            raise ValueError(
                f"attention over latent vectors of {width} in float32 takes {least_bytes >> 10} KiB of a GPU's shared "
                f"memory, and this one has {facts.shared_bytes >> 10} KiB; use bfloat16 or float16"
            )
        return LatentTile(rows=MIN_ROWS, keys=16, num_warps=8, num_stages=1)
    if cache_itemsize == 1:
        return LatentTile(rows=MIN_ROWS, keys=32, num_warps=8, num_stages=2)
    rows = max(MIN_ROWS, next_power_of_2(num_rows))
    two_fit = rows == 2 * MIN_ROWS and width <= DEEPSEEK_WIDTH and facts.has_hopper_shared_memory
    if rows == MIN_ROWS or two_fit:
        return LatentTile(rows, keys=32, num_warps=4, num_stages=3)
    rows = min(rows, WIDE_ROWS if facts.capability == HOPPER else NARROW_ROWS)
    if facts.has_hopper_shared_memory:
        return LatentTile(rows, keys=64, num_warps=8, num_stages=2)
    return LatentTile(rows, keys=32, num_warps=8, num_stages=3)


@jit
def latent_queries(
    query: tl.tensor,
    places: tl.tensor,
    is_row: tl.tensor,
    scale: tl.tensor,
    IS_FLOAT8: tl.constexpr,
    KV_RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> tl.tensor:
    """Return the rows that start at `places`: ([rows, BLOCK_C] latent part, [rows, BLOCK_R] rotary part, scale of the
    scores). IS_FLOAT8: with such a cache they are float16, divided by their largest value (see paged_decode's
    _load_query_pairs).
    """
    latents = tl.arange(0, BLOCK_C)
    rotated = tl.arange(0, BLOCK_R)
    in_latent = is_row[:, None] & (latents < KV_RANK)[None, :]
    in_rotated = is_row[:, None] & (rotated < WIDTH - KV_RANK)[None, :]
    plain = tl.load(query + places[:, None] + latents[None, :], mask=in_latent, other=0.0)
    rotary = tl.load(query + places[:, None] + KV_RANK + rotated[None, :], mask=in_rotated, other=0.0)
    if IS_FLOAT8 and plain.dtype != tl.float32:
        largest = tl.max(tl.max(tl.abs(plain.to(tl.float32)), 1), 0)
        largest = tl.maximum(largest, tl.max(tl.max(tl.abs(rotary.to(tl.float32)), 1), 0))
        largest = tl.maximum(largest, 1e-30)
        plain = (plain.to(tl.float32) / largest).to(tl.float16)
        rotary = (rotary.to(tl.float32) / largest).to(tl.float16)
        scale = scale * largest
    return plain, rotary, scale


@jit
def attend_latents(
    accumulator: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    plain: tl.tensor,
    rotary: tl.tensor,
    limits: tl.tensor,
    cache: tl.tensor,
    table: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    scale: tl.tensor,
    KV_RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    KEYS: tl.constexpr,
) -> tl.tensor:
    """Continue the online softmax over the keys [first, last): return (sums [rows, BLOCK_C], highest scores [rows],
    totals of weights [rows]). Row i sees the first limits[i] tokens.
    """
    latents = tl.arange(0, BLOCK_C)
    rotated = tl.arange(0, BLOCK_R)
    for start in tl.range(first, last, KEYS):
        positions = start + tl.arange(0, KEYS)
        is_real = positions < last
        places = slots_of(table, positions, is_real, BLOCK_SIZE) * WIDTH
        in_latent, in_rotated = is_real[:, None], is_real[:, None]
        if BLOCK_C != KV_RANK:
            in_latent &= (latents < KV_RANK)[None, :]
        if BLOCK_R != WIDTH - KV_RANK:
            in_rotated &= (rotated < WIDTH - KV_RANK)[None, :]
        vectors = tl.load(cache + places[:, None] + latents[None, :], mask=in_latent, other=0.0).to(plain.dtype)
        rotary_part = tl.load(cache + places[:, None] + KV_RANK + rotated[None, :], mask=in_rotated, other=0.0)
        scores = tl.dot(plain, tl.trans(vectors), input_precision="tf32x3")
        scores = tl.dot(rotary, tl.trans(rotary_part.to(plain.dtype)), scores, input_precision="tf32x3")
        scores = tl.where(positions[None, :] < limits[:, None], scores, float("-inf"))
        # The factor is applied after the maximum, so that scaling and subtracting are one instruction per score.
        new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
        # A row that has seen no key yet keeps -inf; subtracting it from itself would be NaN.
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores * scale - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weights, 1)
        accumulator = accumulator * decay[:, None]
        accumulator = tl.dot(weights.to(plain.dtype), vectors, accumulator, input_precision="tf32x3")
        highest = new_highest
    return accumulator, highest, total


@kernel("block_tables", "seq_lens", "query_starts", "num_seqs", "num_row_blocks", "table_stride")
def _latent_prefill(
    query: tl.tensor,
    cache: tl.tensor,
    output: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    query_starts: tl.tensor,
    num_seqs: tl.tensor,
    num_row_blocks: tl.tensor,
    table_stride: tl.tensor,
    query_stride: tl.tensor,
    output_stride: tl.tensor,
    score_scale: tl.tensor,
    cache_scale: tl.tensor,
    NUM_HEADS: tl.constexpr,
    KV_RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """CTA b belongs to the last sequence i with query_starts[i] * NUM_HEADS // BLOCK_M + i <= b; some have no rows. The
    last blocks run first: with a causal mask they have the most keys.
    """
    block = num_row_blocks - 1 - tl.program_id(0)
    low, high = num_seqs * 0, num_seqs  # the sequence is in [low, high); a tensor even if the loop does not run
    while low + 1 < high:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) * NUM_HEADS // BLOCK_M + middle <= block:
            low = middle
        else:
            high = middle
    first_token = tl.load(query_starts + low)
    query_len = tl.load(query_starts + low + 1) - first_token
    first_row = (block - (first_token * NUM_HEADS // BLOCK_M + low)) * BLOCK_M
    if first_row < query_len * NUM_HEADS:
        length = tl.load(seq_lens + low)
        rows = first_row + tl.arange(0, BLOCK_M)
        is_row = rows < query_len * NUM_HEADS
        tokens = (first_token + rows // NUM_HEADS).to(tl.int64)
        heads = rows % NUM_HEADS
        is_float8: tl.constexpr = cache.dtype.element_ty.is_fp8()
        plain, rotary, scale = latent_queries(
            query, tokens * query_stride + heads * WIDTH, is_row, score_scale,
            is_float8, KV_RANK, WIDTH, BLOCK_C, BLOCK_R,
        )  # fmt: skip
        limits = length - query_len + rows // NUM_HEADS + 1
        last = tl.minimum(length - query_len + (first_row + BLOCK_M - 1) // NUM_HEADS + 1, length)
        accumulator = tl.zeros([BLOCK_M, BLOCK_C], dtype=tl.float32)
        highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        table = block_tables + low.to(tl.int64) * table_stride
        # Entered only if it runs at least once: a loop of matrix instructions that may run zero times gives their
        # accumulators a second definition, and ptxas then serialises them.
        if last > 0:
            accumulator, highest, total = attend_latents(
                accumulator, highest, total, plain, rotary, limits, cache, table, length * 0, last, scale,
                KV_RANK, WIDTH, BLOCK_SIZE, BLOCK_C, BLOCK_R, KEYS,
            )  # fmt: skip
        result = accumulator * (cache_scale / tl.where(total == 0.0, 1.0, total))[:, None]
        latents = tl.arange(0, BLOCK_C)
        places = (tokens * output_stride + heads * KV_RANK)[:, None] + latents[None, :]
        inside = is_row[:, None] & (latents < KV_RANK)[None, :]
        tl.store(output + places, result.to(output.dtype.element_ty), mask=inside)


def latent_prefill_triton(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    max_query_len: int,
    kv_rank: int,
    scale: float,
    cache_scale: float = 1.0,
    output: torch.Tensor | None = None,
    facts: DeviceFacts | None = None,
) -> torch.Tensor:
    """Launch the kernel. `max_query_len` selects the tile, and may exceed every sequence's length; `output` may be a
    slice of a larger batch's.

    Raises:
        ValueError: shapes do not match.
    """
    check_latent_shapes("latent_prefill", query, cache, block_tables, seq_lens, kv_rank)
    num_tokens, num_heads, width = query.shape
    output = query.new_empty((num_tokens, num_heads, kv_rank)) if output is None else output
    if num_tokens == 0:
        return output
    facts = facts or device_facts(query.device)
    tile = latent_tile(max_query_len * num_heads, width, query.element_size(), cache.element_size(), facts)
    num_seqs = seq_lens.shape[0]
    num_row_blocks = num_tokens * num_heads // tile.rows + num_seqs
    _latent_prefill[(num_row_blocks,)](
        query,
        cache,
        output,
        block_tables,
        seq_lens,
        query_starts,
        num_seqs,
        num_row_blocks,
        block_tables.stride(0),
        query.stride(0),
        output.stride(0),
        score_scale(scale, cache_scale, None),
        cache_scale,
        NUM_HEADS=num_heads,
        KV_RANK=kv_rank,
        WIDTH=width,
        BLOCK_SIZE=cache.shape[1],
        BLOCK_C=max(MIN_ROWS, next_power_of_2(kv_rank)),
        BLOCK_R=max(MIN_ROWS, next_power_of_2(width - kv_rank)),
        BLOCK_M=tile.rows,
        KEYS=tile.keys,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return output


def check_latent_shapes(
    name: str,
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_rank: int,
) -> None:
    """Check the shapes.

    Raises:
        ValueError: shapes do not match; the message names the kernel.
    """
    width = query.shape[2]
    if cache.shape[2:] != (1, width) or query.stride()[1:] != (width, 1) or not 0 < kv_rank < width:
        raise ValueError(
            f"{name}: query {list(query.shape)} and latent vectors of {kv_rank} do not fit the cache "
            f"{list(cache.shape)}: the cache needs one head with the query's head size, larger than kv_rank, and "
            f"the query contiguous heads"
        )
    row_bytes = width * min(cache.element_size(), query.element_size())
    if query.device.type != "cpu" and row_bytes % ROW_BYTES:
        raise ValueError(
            f"{name}: a token's {width} elements take {row_bytes} bytes in the cache; a GPU reads {ROW_BYTES} at a "
            f"time, so that they must be a multiple of {ROW_BYTES}"
        )
    if block_tables.shape[0] != seq_lens.shape[0] or block_tables.dtype != torch.int32:
        raise ValueError(
            f"{name}: block_tables is {list(block_tables.shape)} {block_tables.dtype}, seq_lens "
            f"{list(seq_lens.shape)}; tables and lengths are int32, one row per sequence"
        )
