"""w8a8_block_fp8 against dequantised float32 GEMMs; the kernels run in Triton's interpreter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from trimtab_kernels.launch.arrivals import arrival_counters
from trimtab_kernels.launch.gemm_config import GemmConfig
from trimtab_kernels.w8a8_block_fp8 import (
    quantize_groups,
    quantize_groups_reference,
    quantize_groups_triton,
    w8a8_block_fp8,
    w8a8_block_fp8_reference,
    w8a8_block_fp8_triton,
)

FLOAT8 = torch.float8_e4m3fn
SMALL = GemmConfig(16, 32, 128, 2, 4, 2)


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = -(-k // 128)
    return (
        torch.randn(m, k).to(FLOAT8),
        torch.rand(m, groups) + 0.1,
        torch.randn(n, k).to(FLOAT8),
        torch.rand(-(-n // 128), groups) + 0.1,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("quantize", [quantize_groups, quantize_groups_triton])
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (5, 100), (3, 2176)])
def test_quantize_groups_scales_activations(
    quantize: Callable[..., Any], rows: int, columns: int, dtype: torch.dtype
) -> None:
    # Exact in the format at scales 2^0..2^2: the interpreter loses the carry when a conversion rounds up.
    x = torch.randn(rows, columns).clamp(-3, 3).to(FLOAT8)
    x[:, ::128] = 448.0
    wide = (x.float() * 2.0 ** torch.randint(0, 3, (rows, 1))).to(dtype)
    a, scales = quantize(wide)
    expected, expected_scales = quantize_groups_reference(wide)
    assert torch.equal(a.float(), expected.float())
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)


def test_quantised_activations_are_close_to_originals() -> None:
    x = torch.randn(7, 300) * 5
    a, scales = quantize_groups(x)
    torch.testing.assert_close(a.float() * scales.repeat_interleave(128, dim=1)[:, :300], x, rtol=2**-4, atol=1e-2)
    zeros, _ = quantize_groups(torch.zeros(1, 128))
    assert not zeros.float().any()


@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 128), (7, 200, 256), (33, 48, 384), (16, 64, 320)])
@pytest.mark.parametrize("split_k", [1, 2, 3])
def test_w8a8_block_fp8_kernel_matches_reference(m: int, n: int, k: int, split_k: int) -> None:
    tensors = operands(m, n, k)
    config = GemmConfig(16, 32, 128, 2, 4, 2, split_k)
    expected = w8a8_block_fp8_reference(*tensors, torch.float32)
    ours = w8a8_block_fp8_triton(*tensors, torch.float32, config=config)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_last_cta_adds_splits_in_order(dtype: torch.dtype) -> None:
    """Seven steps of K among four CTAs: one of them has a single step, which must be included."""
    tensors = operands(17, 96, 7 * 128)
    config = GemmConfig(16, 32, 128, 2, 4, 2, 4)
    ours = w8a8_block_fp8_triton(*tensors, dtype, config=config)
    expected = w8a8_block_fp8_reference(*tensors, torch.float32)
    torch.testing.assert_close(ours.float(), expected, rtol=2e-3, atol=1e-3)
    assert torch.equal(w8a8_block_fp8_triton(*tensors, dtype, config=config), ours)
    assert not arrival_counters(ours.device, 8).any(), "the next launch counts from 0"


@pytest.mark.parametrize("block_k", [64, 128])
@pytest.mark.parametrize("block_n", [64, 256])
def test_tiles_wider_than_block_and_steps_shorter_than_group(block_n: int, block_k: int) -> None:
    tensors = operands(9, 300, 256)
    config = GemmConfig(16, block_n, block_k, 1, 4, 2)
    expected = w8a8_block_fp8_reference(*tensors, torch.float32)
    ours = w8a8_block_fp8_triton(*tensors, torch.float32, config=config)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)


def test_w8a8_block_fp8_without_tokens_launches_nothing() -> None:
    assert w8a8_block_fp8_triton(*operands(0, 128, 128), torch.bfloat16, config=SMALL).shape == (0, 128)


@pytest.mark.cpu
def test_w8a8_block_fp8_on_cpu_uses_reference_and_rejects_mismatches() -> None:
    a, a_scales, b, b_scales = operands(3, 128, 256)
    expected = w8a8_block_fp8_reference(a, a_scales, b, b_scales, torch.bfloat16)
    assert torch.equal(w8a8_block_fp8(a, a_scales, b, b_scales, torch.bfloat16), expected)
    with pytest.raises(ValueError, match="equal columns"):
        w8a8_block_fp8(a[:, :128], a_scales, b, b_scales, torch.bfloat16)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        w8a8_block_fp8(a.float(), a_scales, b, b_scales, torch.bfloat16)
