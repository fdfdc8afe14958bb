"""rope_and_cache against the references of its steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from trimtab_kernels.reshape_and_cache import FLOAT8
from trimtab_kernels.rope_and_cache import (
    Norms,
    rope_and_cache,
    rope_and_cache_reference,
    rope_and_cache_triton,
    split_heads,
)

NUM_BLOCKS, BLOCK_SIZE = 6, 8
BOTH = pytest.mark.parametrize("compute", [rope_and_cache, rope_and_cache_triton])


@dataclass
class Case:
    """Inputs of one step, which run any implementation on copies."""

    num_heads: int
    num_kv_heads: int
    size: int
    tokens: int
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    has_norms: bool = False

    def __post_init__(self) -> None:
        width = (self.num_heads + 2 * self.num_kv_heads) * self.size
        self.qkv = torch.randn(self.tokens, width).to(self.dtype)
        angles = torch.rand(self.tokens, self.size // 2) * 100
        self.rotation = torch.complex(angles.cos(), angles.sin())
        self.slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[: self.tokens]
        weights = torch.rand(2, self.size).to(self.dtype) + 0.5
        self.norms = Norms(weights[0], weights[1], 1e-6) if self.has_norms else None

    def run(self, compute: Callable[..., Any], **changes: Any) -> tuple[torch.Tensor, ...]:
        """Return (query, key, value, key cache, value cache)."""
        shape = (NUM_BLOCKS, BLOCK_SIZE, self.num_kv_heads, self.size)
        caches = [torch.zeros(shape).to(self.cache_dtype or self.dtype) for _ in range(2)]
        heads = compute(self.qkv.clone(), self.rotation, *caches, self.slots, norms=self.norms, **changes)
        return (*heads, *caches)


def assert_same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], tolerance: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "tokens"), [(1, 1, 2, 1), (4, 2, 64, 7), (9, 3, 10, 33), (40, 1, 80, 3)]
)
def test_rope_and_cache_equals_its_steps(
    compute: Callable[..., Any], num_heads: int, num_kv_heads: int, size: int, tokens: int, has_norms: bool, dtype: Any
) -> None:
    case = Case(num_heads, num_kv_heads, size, tokens, dtype, has_norms=has_norms)
    tolerance = 4 * torch.finfo(dtype).eps
    assert_same(case.run(compute), case.run(rope_and_cache_reference), tolerance)


@BOTH
@pytest.mark.parametrize("cache_dtype", [FLOAT8, torch.float8_e5m2])
def test_rope_and_cache_float8_cache_is_scaled_and_clamped(
    compute: Callable[..., Any], cache_dtype: torch.dtype
) -> None:
    case = Case(4, 2, 16, 5, torch.bfloat16, cache_dtype)
    # Exactly representable values without rotation: Triton's interpreter loses the carry when a conversion rounds up.
    case.qkv = torch.randn(case.qkv.shape).to(cache_dtype).to(torch.bfloat16)
    case.qkv[0] = 60000.0
    case.rotation = torch.ones_like(case.rotation)
    scales = {"key_scale": 0.5, "value_scale": 0.25}
    assert_same(case.run(compute, **scales), case.run(rope_and_cache_reference, **scales), 0.0)


def test_rope_and_cache_rotates_padding_without_caching_it() -> None:
    case = Case(2, 1, 8, 4)
    case.slots = torch.tensor([9, -1, 3])  # the second and the fourth token are padding
    query, key, value, *caches = case.run(rope_and_cache_triton)
    expected = case.run(rope_and_cache_reference)
    torch.testing.assert_close(query, expected[0])
    for cache, new in zip(caches, (key, value), strict=True):
        held = torch.zeros(NUM_BLOCKS * BLOCK_SIZE, 1, 8)
        held[[9, 3]] = new[[0, 2]]
        assert torch.equal(cache.flatten(0, 1), held)


def test_rope_and_cache_on_cpu_skips_negative_slots_if_padded() -> None:
    case = Case(2, 1, 8, 3)
    case.slots = torch.tensor([5, -1, 6])
    assert_same(case.run(rope_and_cache, is_padded=True), case.run(rope_and_cache_reference), 1e-5)


def test_rope_and_cache_supports_row_stride() -> None:
    case = Case(3, 1, 4, 6)
    wide = torch.full((6, 32), 7.0)
    wide[:, :20] = case.qkv
    caches = [torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 1, 4) for _ in range(2)]
    found = rope_and_cache_triton(wide[:, :20], case.rotation, caches[0], caches[1], case.slots)
    assert_same((*found, *caches), case.run(rope_and_cache_reference), 1e-5)
    assert torch.all(wide[:, 20:] == 7.0)


def test_rope_and_cache_works_in_place() -> None:
    case = Case(2, 1, 8, 3)
    caches = [torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 1, 8) for _ in range(2)]
    heads = rope_and_cache_triton(case.qkv, case.rotation, caches[0], caches[1], case.slots)
    for found, view in zip(heads, split_heads(case.qkv, 1, 8), strict=True):
        assert found.data_ptr() == view.data_ptr()


def test_rope_and_cache_without_tokens_launches_nothing() -> None:
    case = Case(2, 1, 8, 0)
    query, *_ = case.run(rope_and_cache_triton)
    assert query.shape == (0, 2, 8)


def test_rope_and_cache_rejects_mismatched_inputs() -> None:
    case = Case(2, 1, 8, 3)
    cache = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 1, 8)
    with pytest.raises(ValueError, match="twice the cache's heads"):
        rope_and_cache(case.qkv[:, :15], case.rotation, cache, cache, case.slots)
    with pytest.raises(ValueError, match="rotation a row per token"):
        rope_and_cache(case.qkv, case.rotation[:2], cache, cache, case.slots)
    norms = Norms(torch.ones(4), torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match=r"norms are \[4\] and \[8\]"):
        rope_and_cache(case.qkv, case.rotation, cache, cache, case.slots, norms=norms)
