"""Mixture of experts (MoE) with a gated MLP per expert (Shazeer et al. 2017, arXiv:1701.06538), as in Qwen3-MoE:

y[t] = sum over the top_k experts e of token t:  weight[t, e] * W2[e] @ silu_and_mul(W13[e] @ x[t])

x              [num_tokens, hidden_size]                          fp32 | bf16 | fp16
router_logits  [num_tokens, num_experts]                          dtype of x
w13            [num_local_experts, 2 * intermediate_size, hidden_size]  gate rows, then up rows
w2             [num_local_experts, hidden_size, intermediate_size]
expert_map     [num_experts] int64: an expert's local index, below 0 if another rank holds it; None if all are local.
               [num_patterns, num_experts]: token t reads row t % num_patterns, so that copies of an expert share it
y              like x: with an expert_map, the local experts' part of the sum
w13_bias       [num_local_experts, 2 * intermediate_size], w2_bias [num_local_experts, hidden_size], or None; w2's is
               weighted like the expert's output
clamps         (alpha, limit): gate and up are clamped to the limit, and (up + 1) * gate * sigmoid(alpha * gate)
               replaces silu_and_mul (gpt-oss)
sigmoid        sigmoid routing (Llama 4, DeepSeek-V3): moe/sigmoid_routing.py
Without `sigmoid`, the softmax over all experts is computed in fp32 before the top_k are selected; `renormalize` divides
by their sum. The weights may be float8 with block scales (w8a8_block_fp8). On CUDA, four kernels of `moe/` compute it.
Memory-bound for few tokens: the weights of the active experts. Source: own.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from trimtab_kernels.launch.device_facts import DeviceFacts, device_facts
from trimtab_kernels.launch.gemm_config import GemmConfig
from trimtab_kernels.moe.alignment import align_triton
from trimtab_kernels.moe.combination import combine_triton
from trimtab_kernels.moe.grouped_gemm import grouped_gemm_triton, moe_config
from trimtab_kernels.moe.routing import route_triton
from trimtab_kernels.moe.sigmoid_routing import SigmoidRouting, route_by_sigmoid, route_by_sigmoid_triton
from trimtab_kernels.reshape_and_cache import FLOAT8
from trimtab_kernels.silu_and_mul import clamped_gate, silu_and_mul, silu_and_mul_triton
from trimtab_kernels.w8a8_block_fp8 import dequantize_blocks, quantize_groups_triton

Expert = Callable[[int, torch.Tensor], torch.Tensor]
"""(its local index, rows [num_rows, hidden_size]) -> the same shape."""


def route(router_logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights [num_tokens, top_k] of the logits' dtype, experts [num_tokens, top_k] int64)."""
    probabilities = router_logits.softmax(dim=-1, dtype=torch.float32)
    weights, experts = probabilities.topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(router_logits.dtype), experts


def map_to_local_experts(experts: torch.Tensor, expert_map: torch.Tensor) -> torch.Tensor:
    """Map experts [num_tokens, top_k] by expert_map."""
    if expert_map.dim() == 1:
        return expert_map[experts]
    patterns = torch.arange(experts.shape[0], device=experts.device) % expert_map.shape[0]
    return expert_map[patterns[:, None], experts]


def fused_moe_reference(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    top_k: int,
    renormalize: bool,
    expert_map: torch.Tensor | None = None,
    *,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    clamps: tuple[float, float] | None = None,
    sigmoid: SigmoidRouting | None = None,
) -> torch.Tensor:
    """Compute one expert after the other, each over the tokens routed to it."""

    def compute(expert: int, rows: torch.Tensor) -> torch.Tensor:
        gate_up = F.linear(rows, w13[expert], None if w13_bias is None else w13_bias[expert])
        wide = silu_and_mul(gate_up) if clamps is None else clamped_gate(gate_up, *clamps)
        return F.linear(wide, w2[expert], None if w2_bias is None else w2_bias[expert])

    return sum_of_experts(x, router_logits, compute, top_k, renormalize, expert_map, sigmoid=sigmoid)


def sum_of_experts(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    compute: Expert,
    top_k: int,
    renormalize: bool,
    expert_map: torch.Tensor | None = None,
    *,
    sigmoid: SigmoidRouting | None = None,
) -> torch.Tensor:
    """Compute the MoE for experts of any kind."""
    if sigmoid is None:
        weights, experts = route(router_logits, top_k, renormalize)
    else:
        weights, experts = route_by_sigmoid(router_logits, top_k, renormalize, sigmoid)
    weighs_inputs = sigmoid is not None and sigmoid.weighs_inputs
    if expert_map is not None:
        experts = map_to_local_experts(experts, expert_map)
    y = torch.zeros_like(x)
    for expert in sorted(set(experts.flatten().tolist())):
        if expert < 0:
            continue
        tokens, places = torch.where(experts == expert)
        weight = weights[tokens, places, None]
        product = compute(expert, x[tokens] * weight if weighs_inputs else x[tokens])
        y.index_add_(0, tokens, product if weighs_inputs else product * weight)
    return y


def fused_moe_triton(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    top_k: int,
    renormalize: bool,
    expert_map: torch.Tensor | None = None,
    *,
    w13_scales: torch.Tensor | None = None,
    w2_scales: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    clamps: tuple[float, float] | None = None,
    sigmoid: SigmoidRouting | None = None,
    config: GemmConfig | None = None,
    facts: DeviceFacts | None = None,
) -> torch.Tensor:
    """Launch the kernels. Shapes must have been checked. float8 weights have scales, and then the activations are
    quantised before each GEMM.
    """
    num_tokens = x.shape[0]
    if num_tokens == 0:
        return torch.empty_like(x)
    num_experts, n, k = w13.shape
    config = config or moe_config(num_tokens, top_k, num_experts, n, k, w13.dtype, facts or device_facts(x.device))
    if sigmoid is None:
        weights, experts = route_triton(router_logits, top_k, renormalize, expert_map)
    else:
        weights, experts = route_by_sigmoid_triton(router_logits, top_k, renormalize, sigmoid, expert_map)
    alignment = align_triton(experts, num_experts, config.block_m)
    num_slots = num_tokens * top_k

    def product(
        rows: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        a, a_scales = quantize_groups_triton(rows) if b.dtype == FLOAT8 else (rows.contiguous(), None)
        return grouped_gemm_triton(
            a, b, alignment, num_slots, config, x.dtype, a_scales=a_scales, b_scales=b_scales, bias=bias
        )

    rows = x
    if sigmoid is not None and sigmoid.weighs_inputs:  # then one row per slot
        rows = (x.unsqueeze(1) * weights.to(x.dtype).unsqueeze(2)).view(num_slots, -1)
        weights = torch.ones_like(weights)
    wide = silu_and_mul_triton(product(rows, w13, w13_scales, w13_bias), clamps)
    return combine_triton(product(wide, w2, w2_scales, w2_bias), weights, experts)


def fused_moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    top_k: int,
    renormalize: bool,
    expert_map: torch.Tensor | None = None,
    *,
    w13_scales: torch.Tensor | None = None,
    w2_scales: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    clamps: tuple[float, float] | None = None,
    sigmoid: SigmoidRouting | None = None,
) -> torch.Tensor:
    """Return the MoE output of the experts in w13 and w2.

    Raises:
        ValueError: shapes do not match.
    """
    num_experts = router_logits.shape[1]
    known = num_experts if expert_map is None else expert_map.shape[-1]
    if w13.shape[2] != x.shape[1] or 2 * w2.shape[2] != w13.shape[1] or known != num_experts or top_k > num_experts:
        raise ValueError(
            f"fused_moe: x {list(x.shape)}, router_logits {list(router_logits.shape)}, w13 {list(w13.shape)}, "
            f"w2 {list(w2.shape)}, top_k {top_k} do not fit together"
        )
    more: dict[str, Any] = {"w13_bias": w13_bias, "w2_bias": w2_bias, "clamps": clamps, "sigmoid": sigmoid}
    if x.is_cuda:
        more |= {"w13_scales": w13_scales, "w2_scales": w2_scales}
        return fused_moe_triton(x, router_logits, w13, w2, top_k, renormalize, expert_map, **more)
    if w13_scales is not None and w2_scales is not None:
        w13, w2 = dequantize_blocks(w13, w13_scales, x.dtype), dequantize_blocks(w2, w2_scales, x.dtype)
    return fused_moe_reference(x, router_logits, w13, w2, top_k, renormalize, expert_map, **more)
