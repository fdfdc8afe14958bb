"""Swapping on a real CUDA device, through pinned memory. Skipped without one."""

import pytest
import torch
from trimtab_engine.device.device import Device
from trimtab_engine.device.kv_cache import KVCache, KVLayers
from trimtab_engine.device.swap_cache import SwapCache
from trimtab_modelspec.kv_groups import uniform_group

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def caches() -> tuple[KVCache, KVCache]:
    """64 blocks on the device, 32 on the host."""
    device = Device("cuda")
    layers = KVLayers(uniform_group(4, 8, 128), torch.bfloat16)
    cache = KVCache(layers=layers, block_size=16, cap_blocks=64, memory=device.memory)
    host = KVCache(layers=layers, block_size=16, cap_blocks=32, memory=device.swap_memory)
    cache.map_blocks(64)
    host.map_blocks(32)
    return cache, host


def test_blocks_come_back_as_they_went_and_time_is_measured() -> None:
    cache, host = caches()
    swap = SwapCache(cache, host)
    content = []
    for region in (*cache.keys, *cache.values):
        region[:64] = torch.randn_like(region[:64])
        content.append(region[10:20].clone())
    swap.copy([(10 + i, i) for i in range(10)], [])
    for region in (*cache.keys, *cache.values):
        region[:64] = 0
    swap.copy([], [(i, 40 + i) for i in range(10)])
    for region, expected in zip((*cache.keys, *cache.values), content, strict=True):
        assert torch.equal(region[40:50], expected)
    torch.cuda.synchronize()
    swapped = swap.take_swapped()
    assert swapped.seconds > 0
    assert swapped.num_blocks == 20


def test_a_step_that_writes_a_block_waits_for_it_to_have_gone() -> None:
    cache, host = caches()
    swap = SwapCache(cache, host)
    for number in range(100):
        for region in (*cache.keys, *cache.values):
            region[:32] = number
        swap.copy([(block, block) for block in range(32)], [], slots=[40 * 16])  # nothing of it is written yet
        swap.copy([], [], slots=[block * 16 for block in range(32)])
        for region in (*cache.keys, *cache.values):
            region[:32] = -1
        if number % 10 == 0:
            torch.cuda.synchronize()
            assert all(bool((region == number).all()) for region in (*host.keys, *host.values))
