"""Softmax routing:  softmax over all experts in fp32, the top_k of them, renormalised on request.

router_logits  [num_tokens, num_experts]  fp32 | bf16 | fp16
expert_map     [num_experts] int64: an expert's local index, below 0 if another rank holds it; None if all are local.
               [num_patterns, num_experts]: token t reads row t % num_patterns
weights        [num_tokens, top_k] fp32, rounded to the logits' dtype as transformers does
experts        [num_tokens, top_k] int32: local indices, -1 if another rank holds the expert

A token with a NaN among its logits has NaN weights and valid experts.

The reference is fused_moe's `route`. Latency-bound: a few hundred values per token. Source: own.
"""

import torch

from trimtab_kernels.launch.jit import jit, kernel, next_power_of_2, tl


@jit
def store_choice(
    values: tl.tensor,
    chosen: tl.tensor,
    token: tl.tensor,
    expert_map: tl.tensor,
    weights: tl.tensor,
    experts: tl.tensor,
    num_patterns: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Store a token's experts as this rank's indices, and their weights. expert_map may be None."""
    places = tl.arange(0, BLOCK_K)
    is_place = places < TOP_K
    if expert_map is not None:
        row = expert_map + token % num_patterns * NUM_EXPERTS
        chosen = tl.maximum(tl.load(row + chosen, mask=is_place, other=-1), -1).to(tl.int32)
    tl.store(weights + token * TOP_K + places, values, mask=is_place)
    tl.store(experts + token * TOP_K + places, chosen, mask=is_place)


def num_patterns_of(expert_map: torch.Tensor | None) -> int:
    """Return the rows of an expert map, of which each token reads one."""
    return 1 if expert_map is None or expert_map.dim() == 1 else expert_map.shape[0]


@kernel()
def _route(
    router_logits: tl.tensor,
    expert_map: tl.tensor,
    weights: tl.tensor,
    experts: tl.tensor,
    stride: tl.tensor,
    num_patterns: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
) -> None:
    """One CTA per token. The best expert is selected TOP_K times: cheaper than a sort for the usual 1 to 8."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    logits = tl.load(router_logits + token * stride + columns, mask=columns < NUM_EXPERTS, other=float("-inf"))
    scores = logits.to(tl.float32)
    shifted = tl.exp(scores - tl.max(scores, 0))
    left = shifted / tl.sum(shifted, 0)
    places = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], dtype=tl.int32)
    values = tl.zeros([BLOCK_K], dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        best = tl.max(left, 0)
        # the lowest of equal ones; NaN is not equal to any
        expert = tl.min(tl.where(left == best, columns, NUM_EXPERTS - 1), 0)
        chosen = tl.where(places == place, expert, chosen)
        values = tl.where(places == place, best, values)
        left = tl.where(columns == expert, -1.0, left)
    if RENORMALIZE:
        values = values / tl.sum(values, 0)
    rounded = values.to(router_logits.dtype.element_ty).to(tl.float32)
    store_choice(rounded, chosen, token, expert_map, weights, experts, num_patterns, NUM_EXPERTS, TOP_K, BLOCK_K)


def empty_choice(router_logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uninitialised (weights [num_tokens, top_k] float32, experts likewise int32)."""
    shape = router_logits.shape[0], top_k
    weights = torch.empty(shape, dtype=torch.float32, device=router_logits.device)
    return weights, torch.empty(shape, dtype=torch.int32, device=router_logits.device)


def warps_for(num_experts: int) -> int:
    """Return the warps of a CTA that has a token's experts in its registers."""
    return 1 if num_experts <= 128 else 4


def route_triton(
    router_logits: torch.Tensor, top_k: int, renormalize: bool, expert_map: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights, experts)."""
    num_tokens, num_experts = router_logits.shape
    weights, experts = empty_choice(router_logits, top_k)
    if num_tokens:
        _route[(num_tokens,)](
            router_logits,
            expert_map,
            weights,
            experts,
            router_logits.stride(0),
            num_patterns_of(expert_map),
            NUM_EXPERTS=num_experts,
            BLOCK=next_power_of_2(num_experts),
            TOP_K=top_k,
            BLOCK_K=next_power_of_2(top_k),
            RENORMALIZE=renormalize,
            num_warps=warps_for(num_experts),
        )
    return weights, experts
