"""fused_moe against a plain sum over tokens and their experts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from trimtab_kernels.fused_moe import fused_moe, fused_moe_reference, fused_moe_triton
from trimtab_kernels.launch.gemm_config import GemmConfig
from trimtab_kernels.moe.sigmoid_routing import SigmoidRouting
from trimtab_kernels.silu_and_mul import silu_and_mul_reference

CONFIG = GemmConfig(16, 32, 32, 2, 4, 2)
NUM_EXPERTS, TOP_K, HIDDEN, WIDE = 6, 2, 12, 20


def an_input(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    shapes = (
        (num_tokens, HIDDEN),
        (num_tokens, NUM_EXPERTS),
        (NUM_EXPERTS, 2 * WIDE, HIDDEN),
        (NUM_EXPERTS, HIDDEN, WIDE),
    )
    x, logits, w13, w2 = (torch.randn(shape, generator=generator) for shape in shapes)
    return x, logits, w13, w2


def by_token(
    x: torch.Tensor, logits: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, renormalize: bool
) -> torch.Tensor:
    rows = []
    for token, scores in zip(x, logits.softmax(dim=-1), strict=True):
        best = scores.topk(TOP_K)
        total = best.values.sum() if renormalize else 1.0
        outputs = [w2[e] @ silu_and_mul_reference((w13[e] @ token)[None])[0] for e in best.indices]
        rows.append(sum((w / total * y for w, y in zip(best.values, outputs, strict=True)), torch.zeros(HIDDEN)))
    return torch.stack(rows)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 7, 65])
def test_token_gets_weighted_sum_of_its_experts(num_tokens: int, renormalize: bool) -> None:
    inputs = an_input(num_tokens)
    output = fused_moe(*inputs, TOP_K, renormalize)
    torch.testing.assert_close(output, by_token(*inputs, renormalize), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("weighs_inputs", [True, False])
def test_sigmoid_routing_weights_inputs_or_outputs(weighs_inputs: bool) -> None:
    x, logits, w13, w2 = an_input(9)
    output = fused_moe(x, logits, w13, w2, TOP_K, False, sigmoid=SigmoidRouting(weighs_inputs=weighs_inputs))
    for token, scores, y in zip(x, logits.sigmoid(), output, strict=True):
        expected = torch.zeros(HIDDEN)
        for expert in scores.topk(TOP_K).indices:
            weight = scores[expert]
            row = token * weight if weighs_inputs else token
            own = w2[expert] @ silu_and_mul_reference((w13[expert] @ row)[None])[0]
            expected += own if weighs_inputs else own * weight
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)


def test_partial_sums_of_two_ranks_add_up() -> None:
    x, logits, w13, w2 = an_input(9)
    whole = fused_moe(x, logits, w13, w2, TOP_K, True)
    parts = torch.zeros_like(whole)
    for held in ([0, 2, 5], [4, 1, 3]):  # in any order
        expert_map = torch.full((NUM_EXPERTS,), -1)
        expert_map[held] = torch.arange(len(held))
        parts += fused_moe(x, logits, w13[held], w2[held], TOP_K, True, expert_map)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-4)


def test_fused_moe_rejects_mismatched_shapes() -> None:
    x, logits, w13, w2 = an_input(2)
    with pytest.raises(ValueError, match="do not fit together"):
        fused_moe(x, logits, w13, w2[:, :, 1:], TOP_K, True)
    with pytest.raises(ValueError, match="top_k 7"):
        fused_moe(x, logits, w13, w2, NUM_EXPERTS + 1, True)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 7, 20])
def test_fused_moe_kernels_match_reference(num_tokens: int, renormalize: bool) -> None:
    inputs = an_input(num_tokens)
    ours = fused_moe_triton(*inputs, TOP_K, renormalize, config=CONFIG)
    torch.testing.assert_close(ours, by_token(*inputs, renormalize), rtol=1e-5, atol=1e-4)


def test_fused_moe_kernels_skip_experts_of_other_ranks() -> None:
    x, logits, w13, w2 = an_input(9)
    held = [4, 1, 3]
    expert_map = torch.full((NUM_EXPERTS,), -1)
    expert_map[held] = torch.arange(len(held))
    expected = fused_moe_reference(x, logits, w13[held], w2[held], TOP_K, True, expert_map)
    ours = fused_moe_triton(x, logits, w13[held], w2[held], TOP_K, True, expert_map, config=CONFIG)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-4)


def a_map_with_copies() -> tuple[torch.Tensor, list[list[int]]]:
    """Return (map of slots, slots of ranks by expert). Expert 0 has three copies, two on the first of two ranks; expert
    3 has one on each.
    """
    slots = [[0, 1, 2, 0, 3], [3, 0, 4, 5]]
    whole = [*slots[0], *slots[1]]
    places = [[slot for slot, held in enumerate(whole) if held == expert] for expert in range(NUM_EXPERTS)]
    return torch.tensor([[there[p % len(there)] for there in places] for p in range(6)]), slots


@pytest.mark.parametrize("num_tokens", [1, 7, 20])
def test_tokens_alternate_among_copies_of_expert(num_tokens: int) -> None:
    x, logits, w13, w2 = an_input(num_tokens)
    slot_of, slots = a_map_with_copies()
    whole = fused_moe(x, logits, w13, w2, TOP_K, True)
    parts = torch.zeros_like(whole)
    for held, (first, end) in zip(slots, [(0, 5), (5, 9)], strict=True):
        expert_map = torch.where((slot_of >= first) & (slot_of < end), slot_of - first, -1)
        own = fused_moe(x, logits, w13[held], w2[held], TOP_K, True, expert_map)
        kernels = fused_moe_triton(x, logits, w13[held], w2[held], TOP_K, True, expert_map, config=CONFIG)
        torch.testing.assert_close(kernels, own, rtol=1e-5, atol=1e-4)
        parts += own
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-4)


def test_fused_moe_kernels_select_default_configuration() -> None:
    inputs = an_input(5)
    torch.testing.assert_close(fused_moe_triton(*inputs, TOP_K, True), by_token(*inputs, True), rtol=1e-5, atol=1e-4)


def biases() -> dict[str, torch.Tensor]:
    w13_bias, w2_bias = torch.linspace(-1, 1, 6 * 40), torch.linspace(2, -2, 6 * 12)
    return {"w13_bias": w13_bias.view(6, 40), "w2_bias": w2_bias.view(6, 12)}


def groups() -> SigmoidRouting:
    return SigmoidRouting(bias=torch.linspace(1, -1, 6), num_groups=3, num_top_groups=2, factor=2.5)


MIXTURES: dict[str, Callable[[], dict[str, Any]]] = {
    "biases": biases,
    "clamps": lambda: {"clamps": (1.702, 1.5)},
    "both": lambda: biases() | {"clamps": (1.702, 1.5)},  # gpt-oss
    "weighted inputs": lambda: {"sigmoid": SigmoidRouting(weighs_inputs=True)},  # Llama 4
    "groups": lambda: {"sigmoid": groups()},
}


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("held", [None, [4, 1, 3]], ids=["", "some held"])
def test_fused_moe_kernels_support_biases_clamps_and_sigmoids(mixture: str, held: list[int] | None) -> None:
    x, logits, w13, w2 = an_input(17)
    more = MIXTURES[mixture]()
    expert_map = None
    if held is not None:
        expert_map = torch.full((NUM_EXPERTS,), -1)
        expert_map[held] = torch.arange(len(held))
        w13, w2 = w13[held], w2[held]
        more = {name: value[held] if name.endswith("_bias") else value for name, value in more.items()}
    expected = fused_moe_reference(x, logits, w13, w2, TOP_K, True, expert_map, **more)
    ours = fused_moe_triton(x, logits, w13, w2, TOP_K, True, expert_map, config=CONFIG, **more)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-4)
