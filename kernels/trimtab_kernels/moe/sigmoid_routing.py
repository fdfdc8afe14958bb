"""Which experts a token gets where each expert's score is the sigmoid of its logit (Llama 4, DeepSeek-V3), in torch's
operators.

router_logits  [num_tokens, num_experts]  fp32 | bf16 | fp16
y              weights [num_tokens, top_k] of the logits' dtype, experts [num_tokens, top_k] int64
The scores are taken in fp32. Groups of experts and the numbers that are added for the choice are DeepSeek-V3's
(arXiv:2412.19437, section 2.1.2): a group counts by its two best experts. No Triton kernel has it yet. Source: own.
"""

from dataclasses import dataclass

import torch

LEAST_SUM = 1e-20  # by which weights are divided at least, as in the released code


@dataclass(frozen=True, slots=True)
class SigmoidRouting:
    """How experts are chosen and weighted. bias [num_experts] float32 is added to the scores for the choice alone;
    experts of the best num_top_groups of num_groups are chosen; `factor` multiplies the weights."""

    weighs_inputs: bool = False
    """What an expert gets is weighted, not what it yields."""
    bias: torch.Tensor | None = None
    num_groups: int = 1
    num_top_groups: int = 1
    factor: float = 1.0


def route_by_sigmoid(
    router_logits: torch.Tensor, top_k: int, renormalize: bool, routing: SigmoidRouting
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, experts) as in the module's words; `renormalize` divides the weights by their sum."""
    logits = router_logits.float()
    scores = logits.sigmoid()
    # Without a bias the logits are in the order of the scores, and stay apart where scores are both rounded to 1.
    choice = logits if routing.bias is None else scores + routing.bias
    if routing.num_top_groups < routing.num_groups:
        choice = _of_the_best_groups(choice, routing)
    experts = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + LEAST_SUM)
    return (weights * routing.factor).to(router_logits.dtype), experts


def _of_the_best_groups(choice: torch.Tensor, routing: SigmoidRouting) -> torch.Tensor:
    """The same with -inf for the experts of all other groups."""
    groups = choice.view(choice.shape[0], routing.num_groups, -1)
    best = groups.topk(2, dim=-1).values.sum(dim=-1).topk(routing.num_top_groups, dim=-1).indices
    is_left_out = torch.ones(groups.shape[:2], dtype=torch.bool, device=choice.device).scatter_(1, best, False)
    return groups.masked_fill(is_left_out.unsqueeze(-1), float("-inf")).flatten(1)
