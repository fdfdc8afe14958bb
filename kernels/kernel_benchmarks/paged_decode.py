"""paged_decode at Llama-3.1-8B's heads: 64k tokens and more in total, few and many sequences, bf16 and float8 caches.

Compared with torch's attention over contiguous keys, which no paged cache has, and with the kernels of paged_peers.py.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from trimtab_kernels.paged_decode import paged_decode_reference, paged_decode_triton
from trimtab_kernels.reshape_and_cache import FLOAT8

from kernel_benchmarks.paged_peers import flashinfer_paged, flex_paged, on_first_call
from kernel_benchmarks.row import Row, tolerance_of

LLAMA_CONTEXT = 131_072
SHAPES = (
    (256, 1024, 1024),
    (64, 1024, 1024),
    (16, 8192, 8192),
    (1, LLAMA_CONTEXT, LLAMA_CONTEXT),
    (128, 4096, 4096),
    (256, 1024, LLAMA_CONTEXT),
    (255, 1024, 0),
)
"""(sequences, context tokens each, max_model_len, which defaults to the model's and sets the width of block tables). If
the second is 0, there is one more sequence as long as Llama's context."""


def rows(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    dtype = torch.float32 if tiny else torch.bfloat16
    heads, kv_heads, size, block = (4, 2, 16, 8) if tiny else (32, 8, 128, 16)
    for num_seqs, length, max_length in ((3, 20, 20), (3, 20, 90), (2, 20, 0)) if tiny else SHAPES:
        many = [] if max_length else [700 if tiny else LLAMA_CONTEXT]
        of_each = [length] * num_seqs + many
        variant = f" and 1 of {many[0]}" if many else "" if max_length == length else f", {max_length} allowed"
        for cache_dtype in (dtype,) if tiny else (dtype, FLOAT8):
            num_blocks = sum(-(-tokens // block) for tokens in of_each)
            shape = (num_blocks, block, kv_heads, size)
            keys, values = (torch.randn(shape, device=device, dtype=dtype).to(cache_dtype) for _ in range(2))
            query = torch.randn(len(of_each), heads, size, device=device, dtype=dtype)
            tables = _tables(of_each, max(*of_each, max_length), block, device)
            lengths = torch.tensor(of_each, dtype=torch.int32, device=device)
            tensors = (query, keys, values, tables, lengths)
            peers: dict[str, Callable[[], object]] = {}
            compiled: dict[str, Callable[[], object]] = {}
            if cache_dtype == dtype and max_length == length:
                whole = [c.view(num_seqs, -1, kv_heads, size)[:, :length] for c in (keys, values)]
                dense = [c.transpose(1, 2) for c in whole]
                attend = partial(F.scaled_dot_product_attention, query.unsqueeze(2), dense[0], dense[1])
                peers["torch SDPA, contiguous"] = partial(attend, scale=0.1, enable_gqa=True)
                flex = partial(flex_paged, query, whole[0], whole[1], scale=0.1)
                compiled["FlexAttention, pages of 128"] = on_first_call(flex)
                flashinfer = partial(flashinfer_paged, *tensors[:4], length=length, scale=0.1)
                compiled["FlashInfer"] = on_first_call(flashinfer)
            yield Row(
                f"paged_decode {num_seqs} of {length}{variant} {str(cache_dtype).removeprefix('torch.')}",
                "copy",
                2 * sum(of_each) * kv_heads * size * cache_dtype.itemsize,
                0.85,
                partial(paged_decode_triton, *tensors, scale=0.1),
                partial(paged_decode_reference, *tensors, scale=0.1),
                tolerance_of(dtype),
                peers,
                compiled,
            )


def _tables(lengths: list[int], longest: int, block: int, device: torch.device) -> torch.Tensor:
    """Return block tables as wide as the longest sequence might need, with blocks in random order."""
    counts = [-(-length // block) for length in lengths]
    order = torch.randperm(sum(counts), device=device).to(torch.int32)
    tables = torch.zeros(len(lengths), -(-longest // block), dtype=torch.int32, device=device)
    for row, count, last in zip(tables, counts, accumulate(counts), strict=True):
        row[:count] = order[last - count : last]
    return tables
