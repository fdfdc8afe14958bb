"""Swapped-out blocks: what is copied is what comes back, and host memory is pinned where a device copies it itself."""

import mmap

import pytest
import torch
from fake_cuda import FakeCuda, FakeMemory
from trimtab_engine.address_range import HostMemory
from trimtab_engine.kv_cache import HOST, KVCache, KVLayers
from trimtab_engine.swap_cache import SwapCache


def a_cache(memory: HostMemory | FakeMemory, num_blocks: int, *, dtype: torch.dtype = torch.float32) -> KVCache:
    cache = KVCache(
        num_layers=2,
        cap_blocks=num_blocks,
        block_size=8,
        num_kv_heads=2,
        head_size=12,
        dtype=dtype,
        memory=memory,
        draft=KVLayers(num_layers=1, num_kv_heads=1, head_size=10, dtype=dtype),
    )
    cache.map_blocks(num_blocks)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_come_back_as_they_went_in_every_layer_of_both_models(dtype: torch.dtype) -> None:
    cache, host = a_cache(HostMemory(), 6, dtype=dtype), a_cache(HostMemory(), 4, dtype=dtype)
    swap = SwapCache(cache, host)
    regions = (*cache.keys, *cache.values)
    before = [torch.randn(region.shape).to(dtype) for region in regions]
    for region, content in zip(regions, before, strict=True):
        region.copy_(content)
    assert swap.copy([(5, 0), (1, 3)], [])() >= 0.0
    for region in regions:
        region.zero_()
    assert swap.copy([], [(0, 2), (3, 4)])() > 0.0
    for region, content in zip(regions, before, strict=True):
        assert torch.equal(region[[2, 4]].float(), content[[5, 1]].float())
        assert not region[[0, 1, 3, 5]].float().any()
    assert swap.copy([], [])() == 0.0


def test_mapped_blocks_are_copied_as_well() -> None:
    fake = FakeCuda()
    cache = a_cache(FakeMemory(fake), 6)
    swap = SwapCache(cache, a_cache(HostMemory(), 6))
    cache.keys[2][5] = 7.0
    swap.copy([(5, 1)], [(1, 0)])
    assert float(cache.keys[2][0].mean()) == 7.0
    fake.check()


def test_pinned_memory_is_pinned_once_from_its_first_byte_to_its_last() -> None:
    pinned: list[tuple[int, int]] = []
    cache = a_cache(HostMemory(lambda address, size: pinned.append((address, size))), 3)
    assert pinned == [(cache.keys[0].data_ptr(), cache.reserved_bytes)]
    assert cache.reserved_bytes % mmap.PAGESIZE == 0
    assert isinstance(HOST, HostMemory)
