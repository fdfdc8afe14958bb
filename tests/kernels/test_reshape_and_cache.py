"""reshape_and_cache against its reference."""

import pytest
import torch
from trimtab_kernels.reshape_and_cache import reshape_and_cache, reshape_and_cache_reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_it_matches_the_reference_and_touches_nothing_else(tokens: int, dtype: torch.dtype) -> None:
    shape = (10, 8, 3, 5)
    key, value = torch.randn(tokens, 3, 5).to(dtype), torch.randn(tokens, 3, 5).to(dtype)
    slots = torch.randperm(80)[:tokens]
    ours, expected = ([torch.zeros(shape, dtype=dtype) for _ in range(2)] for _ in range(2))
    reshape_and_cache(key, value, ours[0], ours[1], slots)
    reshape_and_cache_reference(key, value, expected[0], expected[1], slots)
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(ours[1], expected[1])


def test_what_does_not_fit_is_refused() -> None:
    cache = torch.zeros(2, 8, 3, 5)
    key, slots = torch.ones(1, 3, 5), torch.tensor([0])
    with pytest.raises(ValueError, match="do not fit together"):
        reshape_and_cache(key, key[:, :2], cache, cache, slots)
    with pytest.raises(ValueError, match="the cache holds"):
        reshape_and_cache(key.bfloat16(), key.bfloat16(), cache, cache, slots)
