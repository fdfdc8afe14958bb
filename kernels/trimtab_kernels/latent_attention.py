"""Attention of a step over a paged cache of latent vectors. latent_decode processes decodes and drafts of equal
lengths, latent_prefill all other tokens. On the CPU, paged_attention processes all, with one kv head whose values are
its keys.

query    [num_tokens, num_heads, width]            fp32 | bf16 | fp16: the latent part, then the rotary part
key      [num_tokens, 1, width]                    of this step, already written to the cache; not read by the kernels
cache    [num_blocks, block_size, 1, width]        dtype of query, or float8: times cache_scale
y        [num_tokens, num_heads, kv_rank]          sums of the first kv_rank elements of each key

A step has the layout of paged_batch, whose metadata is the same for all kernels. Source: own.
"""

from functools import partial
from typing import Any

import torch

from trimtab_kernels.latent_decode import latent_decode_triton
from trimtab_kernels.latent_prefill import latent_prefill_reference, latent_prefill_triton
from trimtab_kernels.paged_attention import AttentionMetadata, paged_attention
from trimtab_kernels.paged_batch import PagedBatch

MAX_SHARED_TOKENS = 8
"""Tokens of a sequence whose keys may be split over CTAs: drafts. Longer chunks have enough rows for all CTAs, and
their partial results would be as large as the rows."""


def attend_latent_batch(
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    *,
    kv_rank: int,
    cache_scale: float = 1.0,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend over a step: query [rows, num_heads, width]; rows from num_tokens on are padding and yield zeros. This
    step's vectors are already in the cache. `output` receives the result, [rows, num_heads, kv_rank] and contiguous.
    """
    if output is None:
        output = torch.empty((*query.shape[:2], kv_rank), dtype=query.dtype, device=query.device)
    first, last, longest = batch.num_decodes, batch.num_tokens, batch.max_query_len
    num_chunks = batch.seq_lens.shape[0] - first
    options: dict[str, Any] = {"kv_rank": kv_rank, "scale": scale, "cache_scale": cache_scale}
    of_decodes = (cache, batch.block_tables[:first], batch.seq_lens[:first])
    of_chunks = (cache, batch.block_tables[first:], batch.seq_lens[first:])
    if first:
        latent_decode_triton(query[:first], *of_decodes, query_len=1, output=output[:first], **options)
    if last > first:
        rows, attended = query[first:last], output[first:last]
        if longest <= MAX_SHARED_TOKENS and last - first == num_chunks * longest:  # equally many rows of each
            latent_decode_triton(rows, *of_chunks, query_len=longest, output=attended, **options)
        else:
            starts = batch.query_starts
            latent_prefill_triton(rows, *of_chunks, starts, max_query_len=longest, output=attended, **options)
    if last < query.shape[0]:
        output[last:] = 0
    return output


def attend_latent_batch_reference(
    query: torch.Tensor,
    cache: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    *,
    kv_rank: int,
    cache_scale: float = 1.0,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attend_latent_batch with the kernels' reference, one sequence at a time."""
    output = query.new_zeros((*query.shape[:2], kv_rank)) if output is None else output.zero_()
    first, last = batch.num_decodes, batch.num_tokens
    if last:
        each = torch.arange(first, dtype=torch.int32, device=query.device)
        output[:last] = latent_prefill_reference(
            query[:last],
            cache,
            batch.block_tables,
            batch.seq_lens,
            torch.cat([each, batch.query_starts + first]),
            kv_rank=kv_rank,
            scale=scale,
            cache_scale=cache_scale,
        )
    return output


def warm_up_latent_attention(query: torch.Tensor, cache: torch.Tensor, *, kv_rank: int) -> None:
    """Launch every variant that a step's layers may choose, on rows of padding, so that serving compiles nothing.

    query [1, num_heads, width]. Neither reads nor changes the cache, which may not be mapped yet.
    """
    lengths, starts = (torch.zeros(count, dtype=torch.int32, device=query.device) for count in (1, 2))
    tables = torch.zeros(1, 1, dtype=torch.int32, device=query.device)
    for longest in range(1, MAX_SHARED_TOKENS + 1):
        rows = query.expand(longest, -1, -1).contiguous()
        for separate_merge in (False, True):
            latent_decode_triton(
                rows,
                cache,
                tables,
                lengths,
                query_len=longest,
                kv_rank=kv_rank,
                scale=1.0,
                separate_merge=separate_merge,
            )
    for exponent in range(7):  # up to a tile's rows of one head
        latent_prefill_triton(
            query, cache, tables, lengths, starts, max_query_len=1 << exponent, kv_rank=kv_rank, scale=1.0
        )


def latent_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    *,
    kv_rank: int,
    cache_scale: float = 1.0,
) -> torch.Tensor:
    """Return the attention of a step.

    Raises:
        ValueError: shapes do not match.
    """
    attend = partial(
        attend_latent_batch if query.is_cuda else attend_latent_batch_reference,
        kv_rank=kv_rank,
        cache_scale=cache_scale,
    )
    if metadata.outside is not None:
        return metadata.outside(query, lambda rows, batch, y: attend(rows, cache, batch, scale, output=y))
    if metadata.paged is not None:
        return attend(query, cache, metadata.paged, scale)
    attended = paged_attention(
        query, key, key, cache, cache, metadata, scale, key_scale=cache_scale, value_scale=cache_scale
    )
    return attended[..., :kv_rank]
