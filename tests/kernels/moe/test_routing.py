"""route in Triton's interpreter against fused_moe's reference."""

import pytest
import torch
from trimtab_kernels.fused_moe import route
from trimtab_kernels.moe.routing import route_triton


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (6, 2), (128, 8), (200, 3)])
def test_route_matches_reference(num_experts: int, top_k: int, renormalize: bool) -> None:
    logits = torch.randn(5, num_experts)
    weights, experts = route_triton(logits, top_k, renormalize)
    expected_weights, expected = route(logits, top_k, renormalize)
    assert torch.equal(experts.long(), expected)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


def test_route_returns_local_expert_indices() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    _, experts = route_triton(logits, 3, True, torch.tensor([0, -1, 1, -5]))
    assert experts.tolist() == [[-1, 1, -1]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
@pytest.mark.parametrize("wrong", [[1], [0, 5], range(6)])
def test_route_nan_logit_gives_nan_weights_and_valid_experts(wrong: list[int]) -> None:
    logits = torch.randn(3, 6)
    logits[1, wrong] = torch.nan
    weights, experts = route_triton(logits, 2, True)
    assert bool(((experts >= 0) & (experts < 6)).all())
    assert weights.isnan().tolist() == [[False, False], [True, True], [False, False]]
    _, local = route_triton(logits, 2, True, torch.arange(6))
    assert torch.equal(local, experts)
