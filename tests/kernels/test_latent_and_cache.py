"""latent_and_cache against the references of its steps."""

import pytest
import torch
from trimtab_kernels.latent_and_cache import latent_and_cache, latent_and_cache_reference, latent_and_cache_triton

FLOAT8 = torch.float8_e4m3fn


def tensors_of(
    num_tokens: int, num_heads: int, kv_rank: int, size: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Return inputs as in a layer: rotary parts within longer heads, `kept` rows within wider ones."""
    generator = torch.Generator().manual_seed(5)
    width = kv_rank + size
    query = torch.full((num_tokens, num_heads, width), 7.0).to(dtype)
    heads = torch.randn(num_tokens, num_heads, 12 + size, generator=generator).to(dtype)
    kept = torch.randn(num_tokens, width + 4, generator=generator).to(dtype)
    norm = torch.rand(kv_rank, generator=generator).to(dtype) + 0.5
    angles = torch.rand(num_tokens, size // 2, generator=generator) * 6
    rotation = torch.complex(angles.cos(), angles.sin())
    cache = torch.zeros(9, 8, 1, width).to(cache_dtype)
    slots = (torch.randperm(72, generator=generator)[:num_tokens]).to(torch.int64)
    return query, heads[:, :, 12:], kept[:, :width], norm, rotation, cache, slots


@pytest.mark.parametrize(("kv_rank", "size"), [(512, 64), (24, 8), (10, 6), (48, 20)])
@pytest.mark.parametrize("num_heads", [1, 5, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_latent_and_cache_equals_its_steps(dtype: torch.dtype, num_heads: int, kv_rank: int, size: int) -> None:
    query, rotated, kept, norm, rotation, cache, slots = tensors_of(5, num_heads, kv_rank, size, dtype, dtype)
    own_query, own_cache = query.clone(), cache.clone()
    slots[2] = -1
    few = slots[:4]  # the fifth token is padding
    key = latent_and_cache_reference(query, rotated, kept, norm, 1e-6, rotation, cache, few)
    own_key = latent_and_cache_triton(own_query, rotated, kept.clone(), norm, 1e-6, rotation, own_cache, few)
    tolerance = 4 * torch.finfo(dtype).eps
    for ours, expected in ((own_key, key), (own_query, query), (own_cache, cache)):
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    assert (own_query[:, :, :kv_rank] == 7.0).all(), "another's"
    assert int((own_cache != 0).any(-1).sum()) == 3


@pytest.mark.parametrize("cache_dtype", [FLOAT8, torch.float8_e5m2])
def test_latent_and_cache_float8_cache_is_scaled_and_clamped(cache_dtype: torch.dtype) -> None:
    """Uses exactly representable values, and a norm and rotation that change none: Triton's interpreter loses the carry
    when a conversion rounds up.
    """
    query, rotated, kept, norm, rotation, cache, slots = tensors_of(4, 2, 24, 8, torch.float32, cache_dtype)
    kept = torch.cat([kept[:, :24].sign(), kept[:, 24:].to(cache_dtype).float()], dim=1)
    norm, rotation, own_cache = norm.to(cache_dtype).float(), torch.ones_like(rotation), cache.clone()
    norm[5] = 60000.0
    rows = kept.clone()
    latent_and_cache_reference(query, rotated, kept, norm, 0.0, rotation, cache, slots, scale=0.25)
    latent_and_cache_triton(query, rotated, rows, norm, 0.0, rotation, own_cache, slots, scale=0.25)
    torch.testing.assert_close(own_cache.float(), cache.float(), rtol=0, atol=0)
    assert own_cache.float().abs().max() == torch.finfo(cache_dtype).max


@pytest.mark.cpu
@pytest.mark.parametrize("is_padded", [False, True])
def test_latent_and_cache_on_cpu_equals_reference(is_padded: bool) -> None:
    query, rotated, kept, norm, rotation, cache, slots = tensors_of(5, 3, 24, 8, torch.float32, torch.float32)
    own_query, own_cache = query.clone(), cache.clone()
    if is_padded:
        slots[1] = -1
    key = latent_and_cache_reference(query, rotated, kept, norm, 1e-6, rotation, cache, slots)
    own_key = latent_and_cache(
        own_query, rotated, kept, norm, 1e-6, rotation, own_cache, slots, is_padded=is_padded
    )  # fmt: skip
    for ours, expected in ((own_key, key), (own_query, query), (own_cache, cache)):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_latent_and_cache_rejects_mismatched_inputs() -> None:
    query, rotated, kept, norm, rotation, cache, slots = tensors_of(5, 3, 24, 8, torch.float32, torch.float32)
    with pytest.raises(ValueError, match="latent_and_cache: query"):
        latent_and_cache(query[:, :, :30], rotated, kept, norm, 1e-6, rotation, cache, slots)
    with pytest.raises(ValueError, match="do not fit together"):
        latent_and_cache(query, rotated, kept, norm, 1e-6, rotation[:, :2], cache, slots)
