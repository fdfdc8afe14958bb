"""reshape_and_cache against its reference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from trimtab_kernels.reshape_and_cache import (
    FLOAT8,
    quantize_float8,
    reshape_and_cache,
    reshape_and_cache_reference,
    reshape_and_cache_triton,
)


@pytest.mark.parametrize("write", [reshape_and_cache, reshape_and_cache_triton])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_reshape_and_cache_matches_reference_and_writes_only_slots(
    write: Callable[..., Any], tokens: int, dtype: torch.dtype
) -> None:
    shape = (10, 8, 3, 5)
    key, value = torch.randn(tokens, 3, 5).to(dtype), torch.randn(tokens, 3, 5).to(dtype)
    slots = torch.randperm(80)[:tokens]
    ours, expected = ([torch.zeros(shape, dtype=dtype) for _ in range(2)] for _ in range(2))
    write(key, value, ours[0], ours[1], slots)
    reshape_and_cache_reference(key, value, expected[0], expected[1], slots)
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(ours[1], expected[1])


def test_reshape_and_cache_rejects_mismatched_inputs() -> None:
    cache = torch.zeros(2, 8, 3, 5)
    key, slots = torch.ones(1, 3, 5), torch.tensor([0])
    with pytest.raises(ValueError, match="do not fit together"):
        reshape_and_cache(key, key[:, :2], cache, cache, slots)
    with pytest.raises(ValueError, match="the cache holds"):
        reshape_and_cache(key, key, cache.int(), cache.int(), slots)


@pytest.mark.parametrize("write", [reshape_and_cache, reshape_and_cache_triton])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reshape_and_cache_float8_is_scaled_and_clamped(write: Callable[..., Any], dtype: torch.dtype) -> None:
    # Values that the format holds exactly: Triton's interpreter loses the carry when a conversion rounds up.
    key, value = (torch.randn(6, 2, 16).to(FLOAT8).to(dtype) for _ in range(2))
    key[0, 0, 0] = 9000.0  # beyond the format even after scaling
    caches = [torch.zeros(4, 8, 2, 16).to(FLOAT8) for _ in range(2)]
    slots = torch.tensor([31, 0, 5, 8, 9, 2])
    write(key, value, caches[0], caches[1], slots, key_scale=0.5, value_scale=0.25)
    for new, cache, scale in ((key, caches[0], 0.5), (value, caches[1], 0.25)):
        stored = cache.flatten(0, 1)[slots].float()
        expected = quantize_float8(new, scale).float()
        assert torch.equal(stored, expected)
    assert caches[0].flatten(0, 1)[31].float().max() == 448


@pytest.mark.parametrize("write", [reshape_and_cache, reshape_and_cache_triton])
@pytest.mark.parametrize("cache_dtype", [torch.float8_e5m2, torch.float16, torch.float32])
def test_reshape_and_cache_other_float8_format_uses_its_range(
    write: Callable[..., Any], cache_dtype: torch.dtype
) -> None:
    key, value = (torch.randn(4, 2, 16).to(torch.float8_e5m2).float() for _ in range(2))
    key[0, 0, 0] = 1e9 if cache_dtype == torch.float8_e5m2 else 2.0
    caches = [torch.zeros(2, 8, 2, 16).to(cache_dtype) for _ in range(2)]
    write(key, value, caches[0], caches[1], torch.tensor([15, 0, 5, 8]))
    assert torch.equal(caches[0].flatten(0, 1)[[15, 0, 5, 8]].float(), key.clamp(max=57344))
    assert torch.equal(caches[1].flatten(0, 1)[[15, 0, 5, 8]].float(), value)


def test_reshape_and_cache_does_not_write_padding_rows() -> None:
    key = torch.randn(3, 1, 4)
    caches = [torch.zeros(2, 8, 1, 4) for _ in range(2)]
    reshape_and_cache_triton(key, key, caches[0], caches[1], torch.tensor([3, -1, 9]))
    expected = torch.zeros(16, 1, 4)
    expected[[3, 9]] = key[[0, 2]]
    assert torch.equal(caches[0].flatten(0, 1), expected)


def test_reshape_and_cache_reads_slice_of_wider_projection() -> None:
    qkv = torch.randn(5, 64)
    key, value = qkv[:, 16:32].view(5, 2, 8), qkv[:, 32:48].view(5, 2, 8)
    caches = [torch.zeros(1, 8, 2, 8) for _ in range(2)]
    reshape_and_cache_triton(key, value, caches[0], caches[1], torch.arange(5))
    assert torch.equal(caches[0][0, :5], key)
    assert torch.equal(caches[1][0, :5], value)
