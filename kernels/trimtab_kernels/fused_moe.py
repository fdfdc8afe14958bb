"""Mixture of experts with a gated MLP in each (Shazeer et al. 2017, arXiv:1701.06538), as Qwen3-MoE computes it:

y[t] = sum over the top_k experts e of token t:  weight[t, e] * W2[e] @ silu_and_mul(W13[e] @ x[t])

x              [num_tokens, hidden_size]                          fp32 | bf16 | fp16
router_logits  [num_tokens, num_experts]                          dtype of x
w13            [num_local_experts, 2 * intermediate_size, hidden_size]  gate rows, then up rows
w2             [num_local_experts, hidden_size, intermediate_size]
expert_map     [num_experts] int64: an expert's local index, below 0 where another rank holds it; None: all are local
y              like x: with an expert_map the local experts' part of the sum
The softmax over all experts is taken in fp32 before the top_k are chosen; `renormalize` divides by their sum.
Bound by memory for few tokens: the weights of the experts that are hit. Source: own.
"""

import torch
import torch.nn.functional as F

from trimtab_kernels.silu_and_mul import silu_and_mul


def route(router_logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights [num_tokens, top_k] of the logits' dtype, experts [num_tokens, top_k] int64)."""
    probabilities = router_logits.softmax(dim=-1, dtype=torch.float32)
    weights, experts = probabilities.topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(router_logits.dtype), experts


def fused_moe_reference(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    top_k: int,
    renormalize: bool,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """One expert after the other, each over the tokens that chose it."""
    weights, experts = route(router_logits, top_k, renormalize)
    if expert_map is not None:
        experts = expert_map[experts]
    y = torch.zeros_like(x)
    for expert in sorted(set(experts.flatten().tolist())):
        if expert < 0:
            continue
        tokens, places = torch.where(experts == expert)
        wide = silu_and_mul(F.linear(x[tokens], w13[expert]))
        y.index_add_(0, tokens, F.linear(wide, w2[expert]) * weights[tokens, places, None])
    return y


def fused_moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    top_k: int,
    renormalize: bool,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """The mixture of the experts that w13 and w2 hold. Raises ValueError where shapes do not fit."""
    num_experts = router_logits.shape[1]
    known = num_experts if expert_map is None else expert_map.shape[0]
    if w13.shape[2] != x.shape[1] or 2 * w2.shape[2] != w13.shape[1] or known != num_experts or top_k > num_experts:
        raise ValueError(
            f"fused_moe: x {list(x.shape)}, router_logits {list(router_logits.shape)}, w13 {list(w13.shape)}, "
            f"w2 {list(w2.shape)}, top_k {top_k} do not fit together"
        )
    return fused_moe_reference(x, router_logits, w13, w2, top_k, renormalize, expert_map)
