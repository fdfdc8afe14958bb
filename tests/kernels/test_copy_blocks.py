"""copy_blocks against its reference: inside a cache, and between two of different sizes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from trimtab_kernels.copy_blocks import copy_blocks, copy_blocks_reference, copy_blocks_triton

COPIES = (copy_blocks, copy_blocks_triton, partial(copy_blocks_triton, max_ctas=2))
"""The Triton variants run in the interpreter."""


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [2, 96, 4098])
def test_copy_blocks_within_cache(copy: Callable[..., Any], dtype: torch.dtype, elements: int) -> None:
    ours = torch.randn(3, 9, elements).to(dtype)
    expected = ours.clone()
    pairs = torch.tensor([[0, 5], [2, 8], [0, 1]])
    copy(ours, ours, pairs)
    copy_blocks_reference(expected, expected, pairs)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("copy", COPIES)
def test_copy_blocks_between_caches_with_region_stride(copy: Callable[..., Any]) -> None:
    source = torch.randn(2, 4, 80)[:, :, :64].contiguous()
    destination = torch.zeros(2, 7, 64)
    wide = torch.zeros(4, 7, 64)
    pairs = torch.tensor([[3, 6], [1, 0]])
    copy(source, wide[::2], pairs)
    copy_blocks_reference(source, destination, pairs)
    assert torch.equal(wide[::2], destination)
    assert not wide[1::2].any(), "the regions between are untouched"


@pytest.mark.parametrize("copy", COPIES)
def test_copy_blocks_as_words_for_any_content(copy: Callable[..., Any]) -> None:
    """Regions of float8 with a stride, viewed as 64-bit words, as the KV cache moves them."""
    memory = torch.randint(0, 256, (3 * 1024,), dtype=torch.uint8)
    words = memory.view(torch.int64).as_strided((3, 7, 10), (128, 10, 1))  # blocks of 80 bytes, regions of 1024
    expected = memory.clone()
    for region in range(3):
        start = 1024 * region
        expected[start + 160 : start + 240] = expected[start + 480 : start + 560]
    copy(words, words, torch.tensor([[6, 2]]))
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("copy", COPIES)
def test_copy_blocks_without_pairs_does_nothing(copy: Callable[..., Any]) -> None:
    cache = torch.ones(1, 2, 4)
    copy(cache, cache, torch.empty(0, 2, dtype=torch.int64))
    assert torch.equal(cache, torch.ones(1, 2, 4))


def test_copy_blocks_rejects_different_caches() -> None:
    pairs = torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match="must be alike"):
        copy_blocks(torch.ones(1, 2, 4), torch.ones(1, 2, 8), pairs)
    with pytest.raises(ValueError, match="must be alike"):
        copy_blocks(torch.ones(1, 2, 4), torch.ones(1, 2, 4).half(), pairs)
