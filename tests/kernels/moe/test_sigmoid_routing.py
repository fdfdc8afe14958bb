"""Sigmoid routing against its definition, one token at a time."""

import pytest
import torch
from trimtab_kernels.moe.sigmoid_routing import SigmoidRouting, route_by_sigmoid, route_by_sigmoid_triton


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("num_groups", "num_top_groups"), [(1, 1), (4, 2), (4, 4)])
def test_sigmoid_routing_selects_best_experts_of_best_groups(
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


def test_sigmoid_routing_without_bias_orders_by_logits() -> None:
    _, experts = route_by_sigmoid(torch.tensor([[40.0, 42.0, 41.0]]), 2, False, SigmoidRouting())
    assert experts.tolist() == [[1, 2]]


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_groups", "num_top_groups"),
    [(1, 1, 1, 1), (6, 1, 1, 1), (6, 2, 3, 2), (16, 1, 1, 1), (200, 3, 5, 2), (256, 8, 8, 4)],
)
def test_sigmoid_routing_kernel_matches_reference(
    num_experts: int, top_k: int, num_groups: int, num_top_groups: int, has_bias: bool, renormalize: bool
) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    logits = torch.randn(5, num_experts, generator=generator)
    bias = torch.randn(num_experts, generator=generator) if has_bias else None
    routing = SigmoidRouting(bias=bias, num_groups=num_groups, num_top_groups=num_top_groups, factor=2.5)
    weights, experts = route_by_sigmoid_triton(logits, top_k, renormalize, routing)
    expected_weights, expected = route_by_sigmoid(logits, top_k, renormalize, routing)
    assert torch.equal(experts.long(), expected)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


def test_sigmoid_routing_returns_local_expert_indices() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    _, experts = route_by_sigmoid_triton(logits, 3, True, SigmoidRouting(), torch.tensor([0, -1, 1, -5]))
    assert experts.tolist() == [[-1, 1, -1]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("routing", [SigmoidRouting(), SigmoidRouting(num_groups=3, num_top_groups=2)], ids=str)
@pytest.mark.parametrize("wrong", [[1], [0, 5], range(6)])
def test_sigmoid_routing_nan_logit_gives_nan_weights_and_valid_experts(
    wrong: list[int], routing: SigmoidRouting
) -> None:
    logits = torch.randn(3, 6)
    logits[1, wrong] = torch.nan
    weights, experts = route_by_sigmoid_triton(logits, 2, True, routing)
    assert bool(((experts >= 0) & (experts < 6)).all())
    assert weights.isnan().tolist() == [[False, False], [True, True], [False, False]]
