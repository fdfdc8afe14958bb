"""Mapped KV memory on a real CUDA device. Skipped without one."""

import time

import pytest
import torch
from trimtab_engine.device.device import Device
from trimtab_engine.device.kv_cache import KVCache, KVLayers
from trimtab_modelspec.kv_groups import uniform_group

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GIB = 1 << 30


def a_cache(device: Device, cap_blocks: int) -> KVCache:
    """Blocks of 2 MiB: 32 layers, 8 heads of 128, bfloat16."""
    return KVCache(
        layers=KVLayers(uniform_group(32, 8, 128), torch.bfloat16),
        cap_blocks=cap_blocks,
        block_size=16,
        memory=device.memory,
    )


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_memory_comes_and_goes_with_the_blocks_and_content_and_addresses_stay() -> None:
    device = Device("cuda")
    cache = a_cache(device, cap_blocks=2048)
    if not cache.releases_memory:
        pytest.skip("cuda-bindings is not installed")
    before = free_bytes()
    cache.map_blocks(512)
    assert before - free_bytes() == pytest.approx(GIB, abs=cache.rounding_bytes)
    regions = (*cache.keys, *cache.values)
    addresses = [region.data_ptr() for region in regions]
    for number, region in enumerate(regions):
        region[:512] = float(number)
    cache.map_blocks(1024)
    cache.copy_blocks([(511, 1023)])
    cache.unmap_above(256)
    cache.map_blocks(512)
    assert [region.data_ptr() for region in regions] == addresses
    for number, region in enumerate(regions):
        assert bool((region[:256] == float(number)).all())
    cache.unmap_above(0)
    assert before - free_bytes() <= cache.rounding_bytes


def test_a_captured_graph_reads_what_was_mapped_after_it_was_captured() -> None:
    device = Device("cuda")
    cache = a_cache(device, cap_blocks=1024)
    if not cache.releases_memory:
        pytest.skip("cuda-bindings is not installed")
    cache.map_blocks(8)
    block = torch.zeros(1, dtype=torch.int64, device=device.torch)
    keys = cache.keys[5]
    keys[:8] = 1.0
    torch.index_select(keys, 0, block)  # warm up outside of the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read = torch.index_select(keys, 0, block)
    cache.map_blocks(1024)
    keys[1000] = 7.0
    block.fill_(1000)
    graph.replay()
    torch.cuda.synchronize()
    assert float(read.float().mean()) == 7.0


def test_ten_gib_are_mapped_and_unmapped_within_200_ms() -> None:
    device = Device("cuda")
    if free_bytes() < 24 * GIB:
        pytest.skip("needs 24 GiB free")
    cache = a_cache(device, cap_blocks=8192)
    if not cache.releases_memory:
        pytest.skip("cuda-bindings is not installed")
    cache.map_blocks(1024)
    seconds = []
    for num_blocks in (1024 + 5120, 1024):
        torch.cuda.synchronize()
        began = time.perf_counter()
        if num_blocks > cache.num_blocks:
            cache.map_blocks(num_blocks)
        else:
            cache.unmap_above(num_blocks)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    print(f"10 GiB: grown in {seconds[0] * 1e3:.0f} ms, shrunk in {seconds[1] * 1e3:.0f} ms")
    assert max(seconds) <= 0.2
