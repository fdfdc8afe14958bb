"""A step's inputs for the Triton attention kernels, and their launches: decodes by paged_decode, the rest by
paged_prefill.

```
query rows   |-- one per decode --|---- chunk 0 ----|-- chunk 1 --|- padding -|
```
All integers of a step are copied to the device at once. `attend_paged_batch_reference` takes the same values on the
CPU, where the engine plans attention differently: steps with inputs at fixed addresses are thus tested without a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trimtab_kernels.paged_decode import paged_decode_reference, paged_decode_triton
from trimtab_kernels.paged_prefill import paged_prefill_reference
from trimtab_kernels.paged_prefill_gluon import prefill


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Sequences [0, num_decodes) have one query row each; the others [query_starts[i], query_starts[i + 1]) after them.

    block_tables [num_seqs, width], seq_lens [num_seqs], query_starts [num_seqs - num_decodes + 1]: int32, on the
    device. max_query_len is the longest chunk; 0 if there is none. gone [num_seqs] int32: the number of tokens before
    each table, with attention chunks.
    """

    num_tokens: int
    num_decodes: int
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    max_query_len: int
    gone: torch.Tensor | None = None

    def split_gone(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return `gone` of the decodes, and of the other sequences."""
        if self.gone is None:
            return None, None
        return self.gone[: self.num_decodes], self.gone[self.num_decodes :]


def build_paged_batch(
    decodes: list[tuple[list[int], int]],
    chunks: list[tuple[list[int], int, int]],
    *,
    block_size: int,
    device: torch.device,
    gone: Sequence[int] | None = None,
) -> PagedBatch:
    """Build a batch from decodes, (block table, context length with the new token), and chunks, (block table, tokens
    before, tokens now). `gone`: the number of tokens before each table, of decodes and then of chunks.
    """
    tables = [table for table, _ in decodes] + [table for table, _, _ in chunks]
    lengths = [length for _, length in decodes] + [before + now for _, before, now in chunks]
    starts = [0]
    for _, _, now in chunks:
        starts.append(starts[-1] + now)
    counts = [-(-length // block_size) for length in lengths]
    width = max(counts, default=1)
    values: list[int] = []
    for table, count in zip(tables, counts, strict=True):
        values += table[:count]
        values += [0] * (width - count)
    num_seqs = len(lengths)
    packed = torch.tensor([*values, *lengths, *(gone or ()), *starts], dtype=torch.int32)
    if device.type == "cuda":
        packed = packed.pin_memory().to(device, non_blocking=True)
    return PagedBatch(
        num_tokens=len(decodes) + starts[-1],
        num_decodes=len(decodes),
        block_tables=packed[: num_seqs * width].view(num_seqs, width),
        seq_lens=packed[num_seqs * width : num_seqs * (width + 1)],
        query_starts=packed[len(packed) - len(starts) :],
        max_query_len=max((now for _, _, now in chunks), default=0),
        gone=None if gone is None else packed[num_seqs * (width + 1) : num_seqs * (width + 2)],
    )


def attend_paged_batch(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    *,
    window: int | None = None,
    chunk_size: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend over a step: query [rows, num_heads, head_size]; rows from num_tokens on are padding and yield zeros. This
    step's keys and values are already in the cache. `output` receives the result; like query and contiguous.
    """
    if output is None:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    first, last = batch.num_decodes, batch.num_tokens
    gone_of_decodes, gone_of_chunks = batch.split_gone()
    if first:
        paged_decode_triton(
            query[:first],
            key_cache,
            value_cache,
            batch.block_tables[:first],
            batch.seq_lens[:first],
            scale=scale,
            window=window,
            chunk_size=chunk_size,
            gone=gone_of_decodes,
            soft_cap=soft_cap,
            sinks=sinks,
            key_scale=key_scale,
            value_scale=value_scale,
            output=output[:first],
        )
    if last > first:
        prefill(
            query[first:last],
            key_cache,
            value_cache,
            batch.block_tables[first:],
            batch.seq_lens[first:],
            batch.query_starts,
            max_query_len=batch.max_query_len,
            scale=scale,
            window=window,
            chunk_size=chunk_size,
            gone=gone_of_chunks,
            soft_cap=soft_cap,
            sinks=sinks,
            key_scale=key_scale,
            value_scale=value_scale,
            output=output[first:last],
        )
    if last < query.shape[0]:
        output[last:] = 0
    return output


def attend_paged_batch_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    *,
    window: int | None = None,
    chunk_size: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attend_paged_batch with the kernels' references, one sequence at a time."""
    output = torch.zeros_like(query) if output is None else output.zero_()
    first, last = batch.num_decodes, batch.num_tokens
    gone_of_decodes, gone_of_chunks = batch.split_gone()
    tables, lengths = batch.block_tables, batch.seq_lens
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    if first:
        output[:first] = paged_decode_reference(
            query[:first],
            key_cache,
            value_cache,
            tables[:first],
            lengths[:first],
            scale=scale,
            window=window,
            chunk_size=chunk_size,
            gone=gone_of_decodes,
            soft_cap=soft_cap,
            sinks=sinks,
            **scales,
        )
    if last > first:
        output[first:last] = paged_prefill_reference(
            query[first:last],
            key_cache,
            value_cache,
            tables[first:],
            lengths[first:],
            batch.query_starts,
            scale=scale,
            window=window,
            chunk_size=chunk_size,
            gone=gone_of_chunks,
            soft_cap=soft_cap,
            sinks=sinks,
            **scales,
        )
    return output


def warm_up_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    window: int | None = None,
    chunk_size: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Launch every variant that a step's layers of one KV group may choose, on a row of padding, so that serving
    compiles nothing.

    query [1, num_heads, head_size]. Neither reads nor changes the cache, which may not be mapped yet.
    """
    tables = torch.zeros(1, 1, dtype=torch.int32, device=query.device)
    lengths, starts = (torch.zeros(count, dtype=torch.int32, device=query.device) for count in (1, 2))
    gone = None if chunk_size is None else lengths
    sequences = (query, key_cache, value_cache, tables, lengths)
    paged_decode_triton(*sequences, scale=1.0, window=window, chunk_size=chunk_size, gone=gone, sinks=sinks)
    for longest in (1, 2, 4, 8, 16, 32, 64, 128):
        prefill(
            *sequences,
            starts,
            max_query_len=longest,
            scale=1.0,
            window=window,
            chunk_size=chunk_size,
            gone=gone,
            sinks=sinks,
        )
