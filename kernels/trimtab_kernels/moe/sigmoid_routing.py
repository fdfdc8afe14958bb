"""Sigmoid routing: each expert's score is the sigmoid of its logit (Llama 4, DeepSeek-V3).

router_logits  [num_tokens, num_experts]  fp32 | bf16 | fp16
y              weights [num_tokens, top_k] of the logits' dtype, experts [num_tokens, top_k] int64; of the Triton kernel
               fp32, rounded to the logits' dtype, and int32: local indices, -1 if another rank holds the expert
               The scores are computed in fp32. Expert groups and the selection bias are DeepSeek-V3's
               (arXiv:2412.19437, section 2.1.2): a group is ranked by its two best experts. A token with a NaN among
               its logits has NaN weights and valid experts. `route_by_sigmoid` is the reference. Latency-bound. Source:
               own.
"""

from dataclasses import dataclass

import torch

from trimtab_kernels.launch.jit import jit, kernel, next_power_of_2, tl
from trimtab_kernels.moe.routing import empty_choice, num_patterns_of, store_choice, warps_for

LEAST_SUM = 1e-20  # minimum divisor of weights, as in the released code


@dataclass(frozen=True, slots=True)
class SigmoidRouting:
    """Selection and weighting of experts. bias [num_experts] float32 is added to the scores for the selection only;
    experts are selected from the best num_top_groups of num_groups; `factor` multiplies the weights.
    """

    weighs_inputs: bool = False
    """True if an expert's inputs are weighted instead of its outputs."""
    bias: torch.Tensor | None = None
    num_groups: int = 1
    num_top_groups: int = 1
    factor: float = 1.0


def route_by_sigmoid(
    router_logits: torch.Tensor, top_k: int, renormalize: bool, routing: SigmoidRouting
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weights, experts) as described in the module; `renormalize` divides the weights by their sum."""
    logits = router_logits.float()
    scores = logits.sigmoid()
    # Without a bias, the logits have the order of the scores, and remain distinct if scores are rounded to 1.
    choice = logits if routing.bias is None else scores + routing.bias
    if routing.num_top_groups < routing.num_groups:
        choice = _mask_other_groups(choice, routing)
    experts = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM)
    return (weights * routing.factor).to(router_logits.dtype), experts


def _mask_other_groups(choice: torch.Tensor, routing: SigmoidRouting) -> torch.Tensor:
    """Return the scores with -inf for the experts of all other groups."""
    groups = choice.view(choice.shape[0], routing.num_groups, -1)
    best = groups.topk(2, dim=-1).values.sum(dim=-1).topk(routing.num_top_groups, dim=-1).indices
    is_left_out = torch.ones(groups.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, best, False)
    return groups.masked_fill(is_left_out.unsqueeze(-1), float("-inf")).flatten(1)


@jit
def _first_of(best: tl.tensor, values: tl.tensor, places: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """Return the lowest place with the best value; NaN is not equal to any value, and selects the last place."""
    return tl.min(tl.where(values == best, places, COUNT - 1), 0)


@jit
def _mask_other_groups_kernel(
    choice: tl.tensor,
    columns: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_TOP_GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
) -> tl.tensor:
    """Return the scores with -inf for the experts of all other groups."""
    group_of = columns // (NUM_EXPERTS // NUM_GROUPS)
    groups = tl.arange(0, BLOCK_GROUPS)
    worth = tl.full([BLOCK_GROUPS], float("-inf"), dtype=tl.float32)
    for group in tl.static_range(NUM_GROUPS):
        own = tl.where((group_of == group) & (columns < NUM_EXPERTS), choice, float("-inf"))
        best = tl.max(own, 0)
        others = tl.where(columns == _first_of(best, own, columns, NUM_EXPERTS), float("-inf"), own)
        worth = tl.where(groups == group, best + tl.max(others, 0), worth)
    is_kept = columns < 0
    for _ in tl.static_range(NUM_TOP_GROUPS):
        group = _first_of(tl.max(worth, 0), worth, groups, NUM_GROUPS)
        is_kept |= group_of == group
        worth = tl.where(groups == group, float("-inf"), worth)
    return tl.where(is_kept, choice, float("-inf"))


@kernel()
def _route_by_sigmoid(
    router_logits: tl.tensor,
    bias: tl.tensor,
    expert_map: tl.tensor,
    weights: tl.tensor,
    experts: tl.tensor,
    stride: tl.tensor,
    num_patterns: tl.tensor,
    factor: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_TOP_GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
) -> None:
    """One CTA per token; bias may be None."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_expert = columns < NUM_EXPERTS
    logits = tl.load(router_logits + token * stride + columns, mask=is_expert, other=float("-inf")).to(tl.float32)
    scores = tl.sigmoid(logits)
    choice = logits
    if bias is not None:
        choice = tl.where(is_expert, scores + tl.load(bias + columns, mask=is_expert, other=0.0), float("-inf"))
    if NUM_TOP_GROUPS < NUM_GROUPS:
        choice = _mask_other_groups_kernel(choice, columns, NUM_EXPERTS, NUM_GROUPS, NUM_TOP_GROUPS, BLOCK_GROUPS)
    places = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], dtype=tl.int32)
    values = tl.zeros([BLOCK_K], dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        expert = _first_of(tl.max(choice, 0), choice, columns, NUM_EXPERTS)
        chosen = tl.where(places == place, expert, chosen)
        values = tl.where(places == place, tl.sum(tl.where(columns == expert, scores, 0.0), 0), values)
        choice = tl.where(columns == expert, float("-inf"), choice)
    if RENORMALIZE:
        values = values / (tl.sum(values, 0) + 1e-20)
    values = values * factor + 0.0 * tl.sum(tl.where(is_expert, scores, 0.0), 0)  # NaN of any expert propagates
    rounded = values.to(router_logits.dtype.element_ty).to(tl.float32)
    store_choice(rounded, chosen, token, expert_map, weights, experts, num_patterns, NUM_EXPERTS, TOP_K, BLOCK_K)


def route_by_sigmoid_triton(
    router_logits: torch.Tensor,
    top_k: int,
    renormalize: bool,
    routing: SigmoidRouting,
    expert_map: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel and return (weights, experts) as described in the module."""
    num_tokens, num_experts = router_logits.shape
    weights, experts = empty_choice(router_logits, top_k)
    if num_tokens:
        _route_by_sigmoid[(num_tokens,)](
            router_logits,
            routing.bias,
            expert_map,
            weights,
            experts,
            router_logits.stride(0),
            num_patterns_of(expert_map),
            float(routing.factor),
            NUM_EXPERTS=num_experts,
            BLOCK=next_power_of_2(num_experts),
            TOP_K=top_k,
            BLOCK_K=next_power_of_2(top_k),
            RENORMALIZE=renormalize,
            NUM_GROUPS=routing.num_groups,
            NUM_TOP_GROUPS=routing.num_top_groups,
            BLOCK_GROUPS=next_power_of_2(routing.num_groups),
            num_warps=warps_for(num_experts),
        )
    return weights, experts
