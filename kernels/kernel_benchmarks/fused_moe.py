"""fused_moe at the shapes of Qwen3-30B-A3B and, for one of eight ranks, DeepSeek-V3, the latter also in float8
blocks.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from trimtab_kernels.fused_moe import fused_moe_reference, fused_moe_triton, route
from trimtab_kernels.reshape_and_cache import FLOAT8
from trimtab_kernels.silu_and_mul import silu_and_mul_reference
from trimtab_kernels.w8a8_block_fp8 import dequantize_blocks, quantize_groups_triton

from kernel_benchmarks.row import Row, tolerance_of

COMPUTE_BOUND_TOKENS = {torch.bfloat16: 128, torch.float32: 128, FLOAT8: 256}
"""Tokens per expert from which on the GEMMs, not the weights, take the time: about FLOP/s over bytes/s, halved."""
FLOAT8_TOLERANCE = 2**-4
"""An activation between two GEMMs may be rounded to either side, by 2**-4 of itself."""
BLOCK = 128


def rows(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    dtype = torch.float32 if tiny else torch.bfloat16
    shapes = [(128, 8, 2048, 768, dtype), (32, 8, 7168, 2048, dtype), (32, 8, 7168, 2048, FLOAT8)]
    for num_experts, top_k, hidden, wide, kind in [(4, 2, 16, 24, dtype), (4, 2, 256, 128, FLOAT8)] if tiny else shapes:
        w13, w13_scales = _weights(num_experts, 2 * wide, hidden, kind, device)
        w2, w2_scales = _weights(num_experts, hidden, wide, kind, device)
        scales: dict[str, Any] = {"w13_scales": w13_scales, "w2_scales": w2_scales}
        for num_tokens in (5,) if tiny else (1, 64, 1024, 8192):
            x = torch.randn(num_tokens, hidden, device=device, dtype=dtype)
            logits = _logits(num_tokens, num_experts, device, dtype)
            slots = num_tokens * top_k
            # Experts chosen by at least one token, on average; exact for one token.
            hit = num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)
            is_small = slots / num_experts < COMPUTE_BOUND_TOKENS[kind]
            peers: dict[str, Callable[[], object]] = {}
            if not tiny and kind != FLOAT8 and slots % num_experts == 0:
                copies = x.repeat_interleave(top_k, dim=0)
                ends = torch.arange(1, num_experts + 1, device=device, dtype=torch.int32) * (slots // num_experts)
                peers["torch._grouped_mm, both GEMMs, balanced"] = partial(_both_gemms, copies, w13, w2, ends)
            shape = f"{num_experts} experts {hidden}x{wide}{' float8' if kind == FLOAT8 else ''}"
            yield Row(
                f"fused_moe {shape}, {num_tokens} tokens",
                "read" if is_small else "fp8" if kind == FLOAT8 else "bf16",
                hit * 3 * wide * hidden * kind.itemsize if is_small else 6 * slots * hidden * wide,
                0.65,
                partial(fused_moe_triton, x, logits, w13, w2, top_k, True, **scales),
                partial(_reference, x, logits, w13, w2, top_k, **scales),
                # Otherwise rounded after each of two GEMMs, in another order.
                FLOAT8_TOLERANCE if kind == FLOAT8 else 4 * tolerance_of(dtype),
                peers,
            )


def _weights(
    num_experts: int, rows: int, columns: int, kind: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weights whose outputs stay near 1, and their block scales, if any."""
    if kind != FLOAT8:
        return torch.randn(num_experts, rows, columns, device=device, dtype=kind) * columns**-0.5, None
    weights = torch.stack([torch.randn(rows, columns, device=device).to(FLOAT8) for _ in range(num_experts)])
    blocks = num_experts, -(-rows // BLOCK), -(-columns // BLOCK)
    return weights, (torch.rand(blocks, device=device) + 0.5) * columns**-0.5


def _logits(num_tokens: int, num_experts: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return distinct logits per token: the choice among equal ones is undefined, and bfloat16 has few values."""
    order = torch.rand(num_tokens, num_experts, device=device).argsort(dim=-1)
    return (order / 16 - num_experts / 32).to(dtype)


def _reference(
    x: torch.Tensor,
    logits: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    top_k: int,
    *,
    w13_scales: torch.Tensor | None,
    w2_scales: torch.Tensor | None,
) -> torch.Tensor:
    """Compute the reference. float8: activations are rounded as by the kernels, which a separate test checks."""
    if w13_scales is None or w2_scales is None:
        return fused_moe_reference(x, logits, w13, w2, top_k, True)
    w13, w2 = dequantize_blocks(w13, w13_scales, x.dtype), dequantize_blocks(w2, w2_scales, x.dtype)
    weights, experts = route(logits, top_k, True)
    y = torch.zeros_like(x, dtype=torch.float32)
    rounded = _round_to_float8(x)
    for expert in range(len(w13)):
        tokens, places = torch.where(experts == expert)
        if len(tokens):
            wide = silu_and_mul_reference(F.linear(rounded[tokens], w13[expert]))
            y.index_add_(
                0, tokens, F.linear(_round_to_float8(wide), w2[expert]).float() * weights[tokens, places, None].float()
            )
    return y


def _round_to_float8(rows: torch.Tensor) -> torch.Tensor:
    """Round to float8 with a scale per group, and convert back."""
    values, scales = quantize_groups_triton(rows)
    return (values.float() * scales.repeat_interleave(BLOCK, dim=1)[:, : rows.shape[1]]).to(rows.dtype)


def _both_gemms(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, ends: torch.Tensor) -> object:
    """Compute only the two GEMMs: no routing, alignment, activation or combination."""
    grouped: Any = torch._grouped_mm
    wide = grouped(x, w13.transpose(1, 2), offs=ends)[:, : w2.shape[2]].contiguous()
    return grouped(wide, w2.transpose(1, 2), offs=ends)
