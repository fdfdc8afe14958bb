"""latent_decode and latent_prefill at DeepSeek-V3's widths: its heads on one GPU, and on eight tensor-parallel ranks.
Without targets, because no GPU had run them when they were written.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from trimtab_kernels.latent_decode import latent_decode_reference, latent_decode_triton
from trimtab_kernels.latent_prefill import latent_prefill_reference, latent_prefill_triton

from kernel_benchmarks.row import Row, tolerance_of

DECODES = ((16, 128, 4096, 1), (16, 1, 131_072, 1), (16, 64, 4096, 2), (128, 64, 4096, 1))
"""(heads, sequences, tokens of context each, new tokens each)"""
PROMPTS = ((128, 1, 2048), (16, 2, 4096))
"""(heads, sequences, tokens): limited by the memory of the reference's score matrix."""
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def rows(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    kv_rank, width = (24, 32) if tiny else (512, 576)
    dtype = torch.float32 if tiny else torch.bfloat16
    how: dict[str, Any] = {"kv_rank": kv_rank, "scale": width**-0.5}
    for heads, num_seqs, length, query_len in ((4, 3, 20, 2),) if tiny else DECODES:
        tensors = _tensors(heads, num_seqs, length, query_len, width, dtype, device)
        ours, reference = (
            partial(attend, *tensors, query_len=query_len, **how)
            for attend in (latent_decode_triton, latent_decode_reference)
        )
        name = f"latent_decode {heads} heads, {num_seqs} of {length}" + f", {query_len} tokens" * (query_len > 1)
        moved = num_seqs * length * width * dtype.itemsize
        yield Row(name, "copy", moved, 0.0, ours, reference, tolerance_of(dtype))
    for heads, num_seqs, length in ((4, 2, 20),) if tiny else PROMPTS:
        tensors = _tensors(heads, num_seqs, length, length, width, dtype, device)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * length
        yield Row(
            f"latent_prefill {heads} heads, {num_seqs} of {length}",
            "sheet",
            2 * num_seqs * heads * (width + kv_rank) * length * (length + 1) / 2,
            0.0,
            partial(latent_prefill_triton, *tensors, starts, max_query_len=length, **how),
            partial(latent_prefill_reference, *tensors, starts, **how),
            tolerance_of(dtype),
        )


def _tensors(
    heads: int, num_seqs: int, length: int, query_len: int, width: int, dtype: torch.dtype, device: torch.device
) -> Tensors:
    """Return queries, a cache of blocks in random order, block tables and lengths."""
    block = 16
    per_sequence = -(-length // block)
    cache = torch.randn(num_seqs * per_sequence, block, 1, width, device=device, dtype=dtype)
    tables = torch.randperm(num_seqs * per_sequence, device=device).to(torch.int32).view(num_seqs, per_sequence)
    lengths = torch.full((num_seqs,), length, dtype=torch.int32, device=device)
    return torch.randn(num_seqs * query_len, heads, width, device=device, dtype=dtype), cache, tables, lengths
