"""silu_and_mul against its reference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from trimtab_kernels.silu_and_mul import clamped_gate, silu_and_mul, silu_and_mul_reference, silu_and_mul_triton


@pytest.mark.parametrize("gate", [silu_and_mul, silu_and_mul_triton])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (7, 1536), (3, 4097)])
def test_silu_and_mul_matches_reference(gate: Callable[..., Any], rows: int, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, 2 * size).to(dtype)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(gate(x), silu_and_mul_reference(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (7, 1536), (3, 2049)])
def test_clamped_gate_is_clamped_to_limit(rows: int, size: int, dtype: torch.dtype) -> None:
    x = (torch.randn(rows, 2 * size) * 3).to(dtype)
    ours = silu_and_mul_triton(x, (1.702, 2.5))
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours.float(), clamped_gate(x.float(), 1.702, 2.5), rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter
def test_clamped_gate_propagates_nan() -> None:
    """Clamped as a number, NaN would become the limit and hide the error."""
    x = torch.ones(3, 8)
    x[1, 2] = x[2, 5] = float("nan")
    assert silu_and_mul_triton(x, (1.702, 2.5)).isnan().nonzero().tolist() == [[1, 2], [2, 1]]


def test_silu_and_mul_leaves_input_unchanged() -> None:
    x = torch.randn(3, 8)
    before = x.clone()
    silu_and_mul(x)
    assert torch.equal(x, before)


def test_silu_and_mul_rejects_odd_width() -> None:
    with pytest.raises(ValueError, match="gate and up"):
        silu_and_mul(torch.ones(2, 7))
