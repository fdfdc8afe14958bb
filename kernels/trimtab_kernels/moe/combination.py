"""Weighted sum of each token's experts:  y[t] = sum over p of weights[t, p] * parts[t * top_k + p], experts[t, p] >= 0.

parts    [num_tokens * top_k, hidden_size]  fp32 | bf16 | fp16; rows of experts held elsewhere are not read
weights  [num_tokens, top_k] fp32; experts [num_tokens, top_k] int32
y        [num_tokens, hidden_size], dtype of parts; summed in fp32, rounded once
Memory-bound: (top_k + 1) * num_tokens * hidden_size * itemsize bytes. Source: own.
"""

import torch

from trimtab_kernels.launch.jit import cdiv, kernel, next_power_of_2, tl

BLOCK_COLUMNS = 1024


@kernel()
def _combine(
    parts: tl.tensor,
    weights: tl.tensor,
    experts: tl.tensor,
    y: tl.tensor,
    size: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        slot = token * TOP_K + place
        is_read = tl.where(inside, tl.load(experts + slot), -1) >= 0
        part = tl.load(parts + slot * size + columns, mask=is_read, other=0.0)
        total += part.to(tl.float32) * tl.load(weights + slot)
    tl.store(y + token * size + columns, total.to(y.dtype.element_ty), mask=inside)


def combine_triton(parts: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Launch the kernel."""
    num_tokens, top_k = weights.shape
    size = parts.shape[1]
    y = torch.empty(num_tokens, size, dtype=parts.dtype, device=parts.device)
    block = min(BLOCK_COLUMNS, next_power_of_2(size))
    _combine[(num_tokens, cdiv(size, block))](parts, weights, experts, y, size, TOP_K=top_k, BLOCK=block, num_warps=4)
    return y
