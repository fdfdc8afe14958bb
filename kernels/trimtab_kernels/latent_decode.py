"""Attention of a few new tokens per sequence, the same number for each, over a paged cache of latent vectors: decodes,
and drafts to verify.

query         [num_seqs * query_len, num_heads, width]; all other arguments as in latent_prefill, query_len rows of
              tokens per sequence, the last of them its newest
seq_lens      [num_seqs] int32: tokens in the cache, including the new ones; 0 marks a padding row, which yields zeros
y             [num_seqs * query_len, num_heads, kv_rank]

CTAs share the key tiles of all sequences as in paged_decode. If a sequence has more rows (tokens times heads) than a
tile, each group of BLOCK_M rows has its own CTAs. Splits are merged by the last CTA to finish, or by a separate launch
(latent_merge) if a few sequences have many splits. Equal inputs give equal outputs.
Memory-bound: sum(seq_lens) * width * cache itemsize bytes, up to about 100 heads; compute-bound above. Source: own.
"""

import torch

from trimtab_kernels.latent_merge import merge_latents
from trimtab_kernels.latent_prefill import (
    LatentTile,
    attend_latents,
    check_latent_shapes,
    latent_prefill_reference,
    latent_queries,
    latent_tile,
)
from trimtab_kernels.launch.arrivals import arrival_counters
from trimtab_kernels.launch.device_facts import DeviceFacts, device_facts
from trimtab_kernels.launch.jit import cdiv, jit, kernel, next_power_of_2, tl
from trimtab_kernels.paged_decode import MAX_SPLITS, SEARCHED_LENGTHS, _find_sequence, _split_size, _tiles_of
from trimtab_kernels.paged_prefill import MIN_ROWS, score_scale

MIN_SHARE_TOKENS, MIN_SHARE_OF_MANY = 512, 128
"""Minimum tokens of a split if one CTA merges all splits, and if many CTAs do. Writing and reading a partial result of
16 rows in fp32 takes the time of 57 tokens."""
MANY_SPLITS = 2
"""CTAs per sequence from which on a separate launch merges: one CTA takes 3.3 us per split on an H200, and a launch
takes about as much for all splits."""
TWO_CTAS_BYTES = 2 * 56 << 10
"""Shared memory of two CTAs with 16 rows; with 32 rows only Hopper's is large enough."""
MERGED_COLUMNS, MERGED_SPLITS = 64, 8
"""Columns and splits that are read at once from each row: 64 values per thread in a tile of 16 rows and 4 warps."""


def latent_decode_reference(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    query_len: int,
    kv_rank: int,
    scale: float,
    cache_scale: float = 1.0,
) -> torch.Tensor:
    """Return the result of latent_prefill_reference with query_len rows per sequence."""
    starts = torch.arange(seq_lens.shape[0] + 1, dtype=torch.int32, device=query.device) * query_len
    return latent_prefill_reference(
        query, cache, block_tables, seq_lens, starts, kv_rank=kv_rank, scale=scale, cache_scale=cache_scale
    )


def has_separate_merge(num_seqs: int, ctas: int) -> bool:
    """Return True if a separate launch merges the splits of `num_seqs` sequences that `ctas` per row group share."""
    return num_seqs * MANY_SPLITS <= ctas


def latent_ctas(num_row_groups: int, tile: LatentTile, facts: DeviceFacts) -> int:
    """Return the CTAs per row group: as many as are resident at once, so that all splits end together. With four warps,
    registers allow a second CTA, and shared memory does except on Ada; eight warps take most of the registers.
    """
    per_sm = 2 if tile.num_warps == 4 and facts.shared_bytes > TWO_CTAS_BYTES else 1
    return max(1, per_sm * facts.num_sms // num_row_groups)


@jit
def _merge_columns(
    split_sums: tl.tensor,
    split_statistics: tl.tensor,
    highest: tl.tensor,
    first_split: tl.tensor,
    num_splits: tl.tensor,
    columns: tl.tensor,
    is_row: tl.tensor,
    KV_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
) -> tl.tensor:
    """Return [BLOCK_M, COLUMNS]: sums of weighted values, relative to the highest scores [BLOCK_M] of all splits."""
    members = tl.arange(0, BLOCK_M)
    sums = tl.zeros([BLOCK_M, COLUMNS], dtype=tl.float32)
    for start in tl.range(0, num_splits, SPLITS):
        splits = start + tl.arange(0, SPLITS)
        is_real = (splits < num_splits)[:, None] & is_row[None, :]
        rows = (first_split + tl.maximum(2 * splits - 1, 0))[:, None] * BLOCK_M + members[None, :]
        own = tl.load(split_statistics + 2 * rows, mask=is_real, other=float("-inf"))
        weights = tl.exp2(own - highest[None, :])
        places = rows[:, :, None].to(tl.int64) * KV_RANK + columns[None, None, :]
        inside = is_real[:, :, None] & (columns < KV_RANK)[None, None, :]
        sums += tl.sum(tl.load(split_sums + places, mask=inside, other=0.0) * weights[:, :, None], 0)
    return sums


@jit
def _merge_statistics(
    split_statistics: tl.tensor,
    first_split: tl.tensor,
    num_splits: tl.tensor,
    is_row: tl.tensor,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,
) -> tl.tensor:
    """Return ([BLOCK_M] highest scores, finite; [BLOCK_M] totals of weights relative to them). The first split is the
    second one of its CTA, and the others are the first ones of their CTAs: every second one from first_split + 1 on.
    """
    members = tl.arange(0, BLOCK_M)
    highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in tl.range(0, num_splits, SPLITS):
        splits = start + tl.arange(0, SPLITS)
        is_real = (splits < num_splits)[:, None] & is_row[None, :]
        rows = (first_split + tl.maximum(2 * splits - 1, 0))[:, None] * BLOCK_M + members[None, :]
        own = tl.load(split_statistics + 2 * rows, mask=is_real, other=float("-inf"))
        own_total = tl.load(split_statistics + 2 * rows + 1, mask=is_real, other=0.0)
        new_highest = tl.maximum(highest, tl.max(own, 0))
        finite = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        total = total * tl.exp2(highest - finite) + tl.sum(own_total * tl.exp2(own - finite[None, :]), 0)
        highest = new_highest
    return tl.where(highest == float("-inf"), 0.0, highest), total


@kernel("block_tables", "seq_lens", "num_seqs", "table_stride", "query_len")
def _latent_decode(
    query: tl.tensor,
    cache: tl.tensor,
    output: tl.tensor,
    split_sums: tl.tensor,
    split_statistics: tl.tensor,
    arrivals: tl.tensor,
    block_tables: tl.tensor,
    seq_lens: tl.tensor,
    num_seqs: tl.tensor,
    table_stride: tl.tensor,
    query_len: tl.tensor,
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
    CTAS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MOST_PARTS: tl.constexpr,
    LENGTHS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGES: tl.constexpr,
) -> None:
    """CTA (row group, split): neighbouring CTAs read the same blocks at the same time. MERGES: the last CTA merges the
    splits; otherwise they are left to latent_merge.
    """
    group = tl.program_id(0)
    program = tl.program_id(1)
    members = tl.arange(0, BLOCK_M)
    rows = group * BLOCK_M + members
    is_row = rows < query_len * NUM_HEADS
    own_tokens = rows // NUM_HEADS
    heads = rows % NUM_HEADS
    latents = tl.arange(0, BLOCK_C)
    is_float8: tl.constexpr = cache.dtype.element_ty.is_fp8()
    num_tiles, split_tiles = _split_size(
        seq_lens, seq_lens, num_seqs, None, None, KEYS, CTAS, MIN_TILES, MOST_PARTS, LENGTHS
    )
    tile = program * split_tiles
    last_tile = tl.minimum(tile + split_tiles, num_tiles)
    sequence, before = _find_sequence(tile, seq_lens, seq_lens, num_seqs, None, None, KEYS, LENGTHS)
    while tile < last_tile:
        length = tl.load(seq_lens + sequence)
        _, tiles = _tiles_of(length, length, None, None, KEYS)
        stop = tl.minimum(before + tiles, last_tile)
        tokens = sequence.to(tl.int64) * query_len + own_tokens
        plain, turned, scale = latent_queries(
            query, tokens * query_stride + heads * WIDTH, is_row, score_scale,
            is_float8, KV_RANK, WIDTH, BLOCK_C, BLOCK_R,
        )  # fmt: skip
        limits = length - query_len + own_tokens + 1
        accumulator = tl.zeros([BLOCK_M, BLOCK_C], dtype=tl.float32)
        highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        first = (tile - before) * KEYS
        last = tl.minimum((stop - before) * KEYS, length)
        table = block_tables + sequence.to(tl.int64) * table_stride
        # Entered only if it runs at least once, as in latent_prefill.
        if first < last:
            accumulator, highest, total = attend_latents(
                accumulator, highest, total, plain, turned, limits, cache, table, first, last, scale,
                KV_RANK, WIDTH, BLOCK_SIZE, BLOCK_C, BLOCK_R, KEYS,
            )  # fmt: skip
        target = output + tokens * output_stride + heads * KV_RANK
        first_cta = before // split_tiles
        num_splits = (before + tiles - 1) // split_tiles - first_cta + 1
        if num_splits == 1:
            result = accumulator * (cache_scale / tl.where(total == 0.0, 1.0, total))[:, None]
            inside = is_row[:, None] & (latents < KV_RANK)[None, :]
            tl.store(target[:, None] + latents[None, :], result.to(output.dtype.element_ty), mask=inside)
        else:
            # Each CTA has at most two partial results: of a sequence that started before its split, and of one that
            # continues after it.
            first_split = 2 * (group * CTAS + first_cta) + 1
            split = 2 * (group * CTAS + program) + (tile == before).to(tl.int32)
            split_rows = split * BLOCK_M + members
            places = split_rows[:, None].to(tl.int64) * KV_RANK + latents[None, :]
            tl.store(split_sums + places, accumulator, mask=is_row[:, None] & (latents < KV_RANK)[None, :])
            tl.store(split_statistics + 2 * split_rows, highest, mask=is_row)
            tl.store(split_statistics + 2 * split_rows + 1, total, mask=is_row)
            if MERGES:
                # All threads store before one of them increments the counter; the last CTA reads after it has seen the
                # full count.
                tl.debug_barrier()
                counter = arrivals + group * CTAS + first_cta
                if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                    merged_highest, totals = _merge_statistics(
                        split_statistics, first_split, num_splits, is_row, BLOCK_M, SPLITS
                    )
                    factor = cache_scale / tl.where(totals == 0.0, 1.0, totals)
                    for first_column in tl.range(0, KV_RANK, COLUMNS):
                        columns = first_column + tl.arange(0, COLUMNS)
                        sums = _merge_columns(
                            split_sums, split_statistics, merged_highest, first_split, num_splits, columns, is_row,
                            KV_RANK, BLOCK_M, COLUMNS, SPLITS,
                        )  # fmt: skip
                        merged = (sums * factor[:, None]).to(output.dtype.element_ty)
                        tl.store(
                            target[:, None] + columns[None, :],
                            merged,
                            mask=is_row[:, None] & (columns < KV_RANK)[None, :],
                        )
                    tl.store(counter, 0)  # for the next launch
        tile = stop
        before += tiles
        sequence += 1


def latent_decode_triton(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    query_len: int,
    kv_rank: int,
    scale: float,
    cache_scale: float = 1.0,
    output: torch.Tensor | None = None,
    ctas: int | None = None,
    facts: DeviceFacts | None = None,
    separate_merge: bool | None = None,
) -> torch.Tensor:
    """Launch the kernel. `ctas` per row group and `separate_merge` override the defaults.

    Raises:
        ValueError: shapes do not match.
    """
    check_latent_shapes("latent_decode", query, cache, block_tables, seq_lens, kv_rank)
    num_tokens, num_heads, width = query.shape
    num_seqs, block_size = seq_lens.shape[0], cache.shape[1]
    if num_tokens != num_seqs * query_len:
        raise ValueError(f"latent_decode: {num_tokens} rows are not {query_len} of each of {num_seqs} sequences")
    output = query.new_empty((num_tokens, num_heads, kv_rank)) if output is None else output
    if num_tokens == 0:
        return output
    facts = facts or device_facts(query.device)
    tile = latent_tile(query_len * num_heads, width, query.element_size(), cache.element_size(), facts)
    groups = cdiv(query_len * num_heads, tile.rows)
    ctas = ctas or latent_ctas(groups, tile, facts)
    separate_merge = has_separate_merge(num_seqs, ctas) if separate_merge is None else separate_merge
    min_tiles = cdiv(MIN_SHARE_OF_MANY if separate_merge else MIN_SHARE_TOKENS, tile.keys)
    # Upper bound given by the block tables.
    most_tiles = num_seqs * max(1, cdiv(block_tables.shape[1] * block_size, tile.keys))
    splits = (groups * 2 * ctas, tile.rows)
    split_sums = torch.empty(*splits, kv_rank, dtype=torch.float32, device=query.device)
    split_statistics = torch.empty(*splits, 2, dtype=torch.float32, device=query.device)
    most_parts = ctas if separate_merge else MAX_SPLITS
    _latent_decode[(groups, min(ctas, cdiv(most_tiles, min_tiles)))](
        query,
        cache,
        output,
        split_sums,
        split_statistics,
        arrival_counters(query.device, groups * ctas),
        block_tables,
        seq_lens,
        num_seqs,
        block_tables.stride(0),
        query_len,
        query.stride(0),
        output.stride(0),
        score_scale(scale, cache_scale, None),
        cache_scale,
        NUM_HEADS=num_heads,
        KV_RANK=kv_rank,
        WIDTH=width,
        BLOCK_SIZE=block_size,
        BLOCK_C=max(MIN_ROWS, next_power_of_2(kv_rank)),
        BLOCK_R=max(MIN_ROWS, next_power_of_2(width - kv_rank)),
        BLOCK_M=tile.rows,
        KEYS=tile.keys,
        CTAS=ctas,
        MIN_TILES=min_tiles,
        MOST_PARTS=most_parts,
        LENGTHS=SEARCHED_LENGTHS,
        COLUMNS=MERGED_COLUMNS,
        SPLITS=max(1, MERGED_SPLITS * MIN_ROWS * tile.num_warps // (4 * tile.rows)),
        MERGES=not separate_merge,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if separate_merge:
        merge_latents(
            split_sums,
            split_statistics,
            seq_lens,
            output,
            query_len=query_len,
            cache_scale=cache_scale,
            tile=tile,
            ctas=ctas,
            min_tiles=min_tiles,
        )
    return output
