"""paged_prefill: causal prompts at Llama-3.1-8B's heads, compared with torch's dense attention; on Hopper each shape
also with the warp-specialised kernel, so that one run shows which is correct and faster.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from trimtab_kernels.paged_prefill import paged_prefill_reference, paged_prefill_triton
from trimtab_kernels.paged_prefill_gluon import is_supported, paged_prefill_gluon

from kernel_benchmarks.row import Row, tolerance_of

BAR = 0.60
"""Target share of the data sheet's rate, at 8k tokens. Shorter prompts have no target."""
BAR_TOKENS = 8192


def rows(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    dtype = torch.float32 if tiny else torch.bfloat16
    heads, kv_heads, size, block = (4, 2, 16, 8) if tiny else (32, 8, 128, 16)
    for num_seqs, length in ((2, 20),) if tiny else ((1, 8192), (8, 1024), (2, 4096)):
        per_sequence = -(-length // block)
        num_blocks = num_seqs * per_sequence
        keys, values = (torch.randn(num_blocks, block, kv_heads, size, device=device, dtype=dtype) for _ in range(2))
        query = torch.randn(num_seqs * length, heads, size, device=device, dtype=dtype)
        tables = torch.randperm(num_blocks, device=device).to(torch.int32).view(num_seqs, per_sequence)
        lengths = torch.full((num_seqs,), length, dtype=torch.int32, device=device)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * length
        tensors = (query, keys, values, tables, lengths, starts)
        q = query.view(num_seqs, length, heads, size).transpose(1, 2)
        k, v = (torch.randn(num_seqs, kv_heads, length, size, device=device, dtype=dtype) for _ in range(2))

        def dense(backend: SDPBackend, q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        flops = 4 * num_seqs * heads * size * length * (length + 1) / 2
        bar = BAR if length >= BAR_TOKENS else 0.0
        reference = partial(paged_prefill_reference, *tensors, scale=0.1)
        peers: dict[str, Callable[[], object]] = {
            "torch SDPA flash": partial(dense, SDPBackend.FLASH_ATTENTION),
            "torch SDPA cuDNN": partial(dense, SDPBackend.CUDNN_ATTENTION),
        }
        name, limit, tolerance = f"paged_prefill {num_seqs} of {length}", "sheet", tolerance_of(dtype)
        ours = partial(paged_prefill_triton, *tensors, max_query_len=length, scale=0.1)
        yield Row(name, limit, flops, bar, ours, reference, tolerance, peers)
        if is_supported(query, keys, max_query_len=length):
            specialised = partial(paged_prefill_gluon, *tensors, scale=0.1)
            yield Row(f"{name}, in Gluon", limit, flops, bar, specialised, reference, tolerance)
