"""Weighted sum of a token's experts, without reading other ranks' experts."""

import pytest
import torch
from trimtab_kernels.moe.combination import combine_triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 300, 1500])
def test_combine_sums_local_experts(size: int, dtype: torch.dtype) -> None:
    parts, weights = torch.randn(6, size).to(dtype), torch.rand(3, 2)
    experts = torch.tensor([[0, 4], [-1, 1], [-1, -1]], dtype=torch.int32)
    parts[[2, 4, 5]] = float("nan")  # never written by the GEMM
    expected = torch.stack([
        parts[0].float() * weights[0, 0] + parts[1].float() * weights[0, 1],
        parts[3].float() * weights[1, 1],
        torch.zeros(size),
    ])  # fmt: skip
    ours = combine_triton(parts, weights, experts)
    torch.testing.assert_close(ours.float(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
