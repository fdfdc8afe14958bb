"""rms_norm against its reference: odd sizes, every dtype, strides."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from trimtab_kernels.rms_norm import add_rms_norm, gather_rms_norm, rms_norm, rms_norm_reference, rms_norm_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (7, 576), (3, 4097)])
def test_rms_norm_matches_reference(rows: int, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5), rtol=tolerance, atol=1e-6
    )


def test_rms_norm_supports_row_stride() -> None:
    wide = torch.randn(5, 96)
    weight = torch.randn(48)
    torch.testing.assert_close(rms_norm(wide[:, :48], weight), rms_norm(wide[:, :48].contiguous(), weight))


def test_rms_norm_rejects_weight_of_other_size_or_dtype() -> None:
    with pytest.raises(ValueError, match="weight must be"):
        rms_norm(torch.ones(2, 8), torch.ones(7))
    with pytest.raises(ValueError, match="weight must be"):
        rms_norm(torch.ones(2, 8), torch.ones(8, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (7, 576), (3, 4097), (33, 64)])
def test_rms_norm_kernel_matches_reference(rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, size + 3).to(dtype)[:, :size], torch.randn(size).to(dtype)
    tolerance = 4 * torch.finfo(dtype).eps
    expected = rms_norm_reference(x, weight, 1e-5)
    torch.testing.assert_close(rms_norm_triton(x, weight, 1e-5), expected, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("norm", [rms_norm, lambda x, weight: rms_norm_triton(x, weight, 1e-6)])
def test_rms_norm_normalises_heads_of_wider_projection(norm: Callable[..., Any]) -> None:
    qkv, weight = torch.randn(5, 7 * 16), torch.randn(16)
    heads = qkv[:, : 3 * 16].view(5, 3, 16)
    torch.testing.assert_close(norm(heads, weight), rms_norm_reference(heads, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_updates_residual_first(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(9, 72).to(dtype), torch.randn(9, 72).to(dtype), torch.randn(72).to(dtype)
    expected_sum = residual + x
    expected = rms_norm_reference(expected_sum, weight, 1e-6)
    tolerance = 4 * torch.finfo(dtype).eps
    kept = residual.clone()
    torch.testing.assert_close(add_rms_norm(x, kept, weight), expected, rtol=tolerance, atol=1e-6)
    assert torch.equal(kept, expected_sum)
    kept = residual.clone()
    fused = rms_norm_triton(x, weight, 1e-6, residual=kept)
    # The interpreter truncates where hardware rounds to bfloat16: one epsilon.
    torch.testing.assert_close(kept, expected_sum, rtol=torch.finfo(dtype).eps, atol=0)
    torch.testing.assert_close(fused, expected, rtol=tolerance, atol=1e-6)


def test_gather_rms_norm_normalises_selected_rows_in_order() -> None:
    x, weight, rows = torch.randn(9, 40), torch.randn(40), torch.tensor([8, 0, 3, 3])
    expected = rms_norm_reference(x[rows], weight, 1e-6)
    torch.testing.assert_close(gather_rms_norm(x, rows, weight), expected)
    torch.testing.assert_close(rms_norm_triton(x, weight, 1e-6, rows=rows), expected)


def test_rms_norm_rejects_mismatched_residual_and_rows() -> None:
    x, weight = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match="residual contiguous"):
        add_rms_norm(x, torch.ones(3, 8), weight)
    with pytest.raises(ValueError, match="int64"):
        gather_rms_norm(x, torch.tensor([0], dtype=torch.int32), weight)
