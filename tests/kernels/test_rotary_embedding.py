"""rotary_embedding against its reference and against transformers' rotate-half form."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from trimtab_kernels.rotary_embedding import (
    interleave_pairs,
    rotary_embedding,
    rotary_embedding_reference,
    rotary_embedding_triton,
)


def rotations(num_tokens: int, half: int) -> torch.Tensor:
    angles = torch.rand(num_tokens, half) * 100
    return torch.complex(angles.cos(), angles.sin())


@pytest.mark.parametrize("rotate", [rotary_embedding, rotary_embedding_triton])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 1, 2), (7, 12, 64), (33, 3, 10)])
def test_rotary_embedding_matches_reference(
    rotate: Callable[..., Any], tokens: int, heads: int, size: int, dtype: torch.dtype
) -> None:
    x = torch.randn(tokens, heads, size).to(dtype)
    rotation = rotations(tokens, size // 2)
    tolerance = 4 * torch.finfo(dtype).eps
    expected = rotary_embedding_reference(x, rotation)
    torch.testing.assert_close(rotate(x, rotation), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rotate", [rotary_embedding, rotary_embedding_triton])
def test_rotary_embedding_reads_slice_of_wider_projection(rotate: Callable[..., Any]) -> None:
    qkv = torch.randn(5, 5 * 8)
    x = qkv[:, : 4 * 8].view(5, 4, 8)
    rotation = rotations(5, 4)
    torch.testing.assert_close(rotate(x, rotation), rotary_embedding(x.contiguous(), rotation))


def test_interleaved_heads_keep_dot_products_of_halves_form() -> None:
    """transformers pairs i with i + size/2; after interleave_pairs q·k is the same."""
    size, tokens = 16, 6
    q, k = torch.randn(tokens, 1, size), torch.randn(tokens, 1, size)
    rotation = rotations(tokens, size // 2)
    cos, sin = (torch.cat((part, part), dim=-1).unsqueeze(1) for part in (rotation.real, rotation.imag))

    def halves(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def pairs(x: torch.Tensor) -> torch.Tensor:
        moved = interleave_pairs(x.squeeze(1).t().contiguous(), size).t().unsqueeze(1).contiguous()
        return rotary_embedding(moved, rotation)

    expected = (halves(q) * halves(k)).sum(-1)
    torch.testing.assert_close((pairs(q) * pairs(k)).sum(-1), expected, rtol=1e-5, atol=1e-5)


def test_rotary_embedding_rejects_mismatched_shapes() -> None:
    with pytest.raises(ValueError, match="head_size must be even"):
        rotary_embedding(torch.ones(2, 1, 8), rotations(2, 3))
