"""Routing by sigmoids, against its definition one token at a time."""

import pytest
import torch
from trimtab_kernels.moe.sigmoid_routing import SigmoidRouting, route_by_sigmoid


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("num_groups", "num_top_groups"), [(1, 1), (4, 2), (4, 4)])
def test_experts_are_the_best_of_the_best_groups_by_score_and_bias(
    num_groups: int, num_top_groups: int, renormalize: bool
) -> None:
    generator = torch.Generator().manual_seed(num_top_groups)
    logits, bias = torch.randn(9, 12, generator=generator), torch.randn(12, generator=generator)
    routing = SigmoidRouting(bias=bias, num_groups=num_groups, num_top_groups=num_top_groups, factor=2.5)
    weights, experts = route_by_sigmoid(logits, 3, renormalize, routing)
    size = 12 // num_groups
    for scores, own_weights, own in zip(logits.sigmoid(), weights, experts, strict=True):
        judged = (scores + bias).tolist()
        groups = [range(first, first + size) for first in range(0, 12, size)]
        groups.sort(key=lambda group: -sum(sorted(judged[e] for e in group)[-2:]))
        allowed = [e for group in groups[:num_top_groups] for e in group]
        assert own.tolist() == sorted(allowed, key=lambda e: -judged[e])[:3]
        expected = scores[own] / scores[own].sum() if renormalize else scores[own]
        torch.testing.assert_close(own_weights, 2.5 * expected)


def test_without_a_bias_logits_decide_where_scores_are_rounded_alike() -> None:
    _, experts = route_by_sigmoid(torch.tensor([[40.0, 42.0, 41.0]]), 2, False, SigmoidRouting())
    assert experts.tolist() == [[1, 2]]
