"""Merge of the partial results of latent_decode, for sequences that span several splits, by log-sum-exp.

split_sums        [num_groups * 2 * ctas, rows of a tile, kv_rank] float32: sums of weighted vectors, relative to
split_statistics  [num_groups * 2 * ctas, rows of a tile, 2] float32: the highest score, and the total of weights
seq_lens          [num_seqs] int32
y                 [num_seqs * query_len, num_heads, kv_rank]; rows of sequences within one split are already written

A CTA computes COLUMNS columns of one row (a token's head) and reads many of its splits at once; one CTA that merges a
whole tile of rows takes 3.3 us per split. The splits follow from the lengths, as in latent_decode, so a captured graph
merges sequences of any length. Splits are merged in the order of their keys.
Memory-bound: splits * rows * kv_rank * 4 bytes, from the L2 cache. Source: own.
"""

import torch

from trimtab_kernels.latent_prefill import LatentTile
from trimtab_kernels.launch.jit import cdiv, jit, kernel, next_power_of_2, tl
from trimtab_kernels.paged_decode import SEARCHED_LENGTHS, _split_size, _tiles_of, _tiles_of_rows

MERGED_COLUMNS, MERGED_SPLITS = 128, 32
"""Columns and splits read at once: 32 values per thread."""
NUM_WARPS = 4


@jit
def _tiles_before(
    sequence: tl.tensor, seq_lens: tl.tensor, num_seqs: tl.tensor, KEYS: tl.constexpr, ROWS: tl.constexpr
) -> tl.tensor:
    """Return the tiles of the sequences before this one."""
    before = 0
    for first_row in tl.range(0, sequence, ROWS):
        tiles = _tiles_of_rows(seq_lens, seq_lens, first_row, num_seqs, None, None, KEYS, ROWS)
        before += tl.sum(tl.where(first_row + tl.arange(0, ROWS) < sequence, tiles, 0), 0)
    return before


@kernel("seq_lens", "num_seqs", "query_len")
def _latent_merge(
    split_sums: tl.tensor,
    split_statistics: tl.tensor,
    seq_lens: tl.tensor,
    output: tl.tensor,
    num_seqs: tl.tensor,
    query_len: tl.tensor,
    output_stride: tl.tensor,
    cache_scale: tl.tensor,
    NUM_HEADS: tl.constexpr,
    KV_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    KEYS: tl.constexpr,
    CTAS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    LENGTHS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """CTA (row of a sequence, block of columns, sequence)."""
    row = tl.program_id(0)
    sequence = tl.program_id(2)
    _, split_tiles = _split_size(seq_lens, seq_lens, num_seqs, None, None, KEYS, CTAS, MIN_TILES, CTAS, LENGTHS)
    before = _tiles_before(sequence, seq_lens, num_seqs, KEYS, LENGTHS)
    length = tl.load(seq_lens + sequence)
    _, tiles = _tiles_of(length, length, None, None, KEYS)
    first_cta = before // split_tiles
    num_splits = (before + tiles - 1) // split_tiles - first_cta + 1
    if num_splits > 1:
        first_split = 2 * ((row // BLOCK_M) * CTAS + first_cta) + 1
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        sums = tl.zeros([COLUMNS], dtype=tl.float32)
        highest = float("-inf")
        total = 0.0
        for start in tl.range(0, num_splits, SPLITS):
            splits = start + tl.arange(0, SPLITS)
            is_real = splits < num_splits
            # The first split is the second one of its CTA, and the others are the first ones of their CTAs.
            rows = ((first_split + tl.maximum(2 * splits - 1, 0)) * BLOCK_M + row % BLOCK_M).to(tl.int64)
            own = tl.load(split_statistics + 2 * rows, mask=is_real, other=float("-inf"))
            own_total = tl.load(split_statistics + 2 * rows + 1, mask=is_real, other=0.0)
            inside = is_real[:, None] & (columns < KV_RANK)[None, :]
            values = tl.load(split_sums + rows[:, None] * KV_RANK + columns[None, :], mask=inside, other=0.0)
            new_highest = tl.maximum(highest, tl.max(own, 0))
            finite = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            weights = tl.exp2(own - finite)
            decay = tl.exp2(highest - finite)
            total = total * decay + tl.sum(own_total * weights, 0)
            sums = sums * decay + tl.sum(values * weights[:, None], 0)
            highest = new_highest
        result = sums * (cache_scale / tl.where(total == 0.0, 1.0, total))
        token = sequence.to(tl.int64) * query_len + row // NUM_HEADS
        target = output + token * output_stride + (row % NUM_HEADS) * KV_RANK
        tl.store(target + columns, result.to(output.dtype.element_ty), mask=columns < KV_RANK)


def merge_latents(
    split_sums: torch.Tensor,
    split_statistics: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    *,
    query_len: int,
    cache_scale: float,
    tile: LatentTile,
    ctas: int,
    min_tiles: int,
) -> None:
    """Launch the kernel over the results of latent_decode with the same tile, `ctas` and `min_tiles`."""
    num_seqs, kv_rank = seq_lens.shape[0], output.shape[2]
    num_heads = output.shape[1]
    columns = min(MERGED_COLUMNS, next_power_of_2(kv_rank))
    _latent_merge[(query_len * num_heads, cdiv(kv_rank, columns), num_seqs)](
        split_sums,
        split_statistics,
        seq_lens,
        output,
        num_seqs,
        query_len,
        output.stride(0),
        cache_scale,
        NUM_HEADS=num_heads,
        KV_RANK=kv_rank,
        BLOCK_M=tile.rows,
        KEYS=tile.keys,
        CTAS=ctas,
        MIN_TILES=min_tiles,
        LENGTHS=SEARCHED_LENGTHS,
        COLUMNS=columns,
        SPLITS=MERGED_SPLITS,
        num_warps=NUM_WARPS,
    )
