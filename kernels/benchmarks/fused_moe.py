"""fused_moe at Qwen3-30B-A3B's and, for one of eight ranks, DeepSeek-V3's shapes."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from trimtab_kernels.fused_moe import fused_moe_reference, fused_moe_triton

from benchmarks.row import Row, tolerance_of

COMPUTE_BOUND_TOKENS = 128
"""Tokens per expert from where the products, not the weights, take the time: about FLOP/s over bytes/s, halved."""


def rows(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    dtype = torch.float32 if tiny else torch.bfloat16
    shapes = ((4, 2, 16, 24),) if tiny else ((128, 8, 2048, 768), (32, 8, 7168, 2048))
    for num_experts, top_k, hidden, wide in shapes:
        w13 = torch.randn(num_experts, 2 * wide, hidden, device=device, dtype=dtype) * hidden**-0.5
        w2 = torch.randn(num_experts, hidden, wide, device=device, dtype=dtype) * wide**-0.5
        for num_tokens in (5,) if tiny else (1, 64, 1024, 8192):
            x = torch.randn(num_tokens, hidden, device=device, dtype=dtype)
            logits = torch.randn(num_tokens, num_experts, device=device, dtype=dtype)
            slots = num_tokens * top_k
            # Experts that some token chose, on average; exact for one token.
            hit = num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)
            is_small = slots / num_experts < COMPUTE_BOUND_TOKENS
            peers: dict[str, Callable[[], object]] = {}
            if not tiny and slots % num_experts == 0:
                copies = x.repeat_interleave(top_k, dim=0)
                ends = torch.arange(1, num_experts + 1, device=device, dtype=torch.int32) * (slots // num_experts)
                peers["torch._grouped_mm, both products, balanced"] = partial(_both_products, copies, w13, w2, ends)
            yield Row(
                f"fused_moe {num_experts} experts {hidden}x{wide}, {num_tokens} tokens",
                "read" if is_small else "bf16",
                hit * 3 * wide * hidden * dtype.itemsize if is_small else 6 * slots * hidden * wide,
                0.65,
                partial(fused_moe_triton, x, logits, w13, w2, top_k, True),
                partial(fused_moe_reference, x, logits, w13, w2, top_k, True),
                4 * tolerance_of(dtype),  # rounded after each of two products, in another order
                peers,
            )


def _both_products(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, ends: torch.Tensor) -> object:
    """The two products alone: no routing, alignment, activation or combination."""
    grouped: Any = torch._grouped_mm
    wide = grouped(x, w13.transpose(1, 2), offs=ends)[:, : w2.shape[2]].contiguous()
    return grouped(wide, w2.transpose(1, 2), offs=ends)
