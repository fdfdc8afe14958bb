"""KV cache memory: reserved once, resident when written, released when unmapped."""

import pytest
import torch
from trimtab_engine.device.kv_cache import HOST, KVCache, KVLayers
from trimtab_modelspec.kv_groups import uniform_group

MIB = 1 << 20


def a_cache(cap_blocks: int = 64, *, num_layers: int = 3, kv_heads: int = 2, head_size: int = 64) -> KVCache:
    return KVCache(
        layers=KVLayers(uniform_group(num_layers, kv_heads, head_size), torch.float32),
        cap_blocks=cap_blocks,
        block_size=16,
        memory=HOST,
    )


def fill(cache: KVCache, first: int, last: int) -> None:
    for region in (*cache.keys, *cache.values):
        region[first:last] = 1.0


def test_reserving_makes_nothing_resident() -> None:
    cache = a_cache(cap_blocks=100_000)
    assert cache.reserved_bytes > 4000 * MIB
    assert cache.resident_bytes() == 0


def test_written_blocks_are_resident_until_unmapped() -> None:
    cache = a_cache()
    cache.map_blocks(64)
    fill(cache, 0, 64)
    assert cache.resident_bytes() == 64 * cache.bytes_per_block == cache.mapped_bytes
    cache.unmap_above(10)
    assert cache.num_blocks == 10
    assert cache.resident_bytes() == 10 * cache.bytes_per_block


def test_kept_blocks_keep_their_content_and_their_address() -> None:
    cache = a_cache()
    cache.map_blocks(64)
    fill(cache, 0, 64)
    addresses = [region.data_ptr() for region in (*cache.keys, *cache.values)]
    cache.unmap_above(7)
    cache.map_blocks(64)
    assert addresses == [region.data_ptr() for region in (*cache.keys, *cache.values)]
    for region in (*cache.keys, *cache.values):
        assert bool((region[:7] == 1).all())
        assert bool((region[7:] == 0).all())


def test_blocks_smaller_than_a_page_never_lose_a_neighbour() -> None:
    cache = a_cache(cap_blocks=13, kv_heads=1, head_size=10)  # 640 bytes a block
    cache.map_blocks(13)
    fill(cache, 0, 13)
    cache.unmap_above(5)
    assert all(bool((region[:5] == 1).all()) for region in (*cache.keys, *cache.values))
    cache.unmap_above(0)
    assert cache.resident_bytes() == 0


def test_layers_keys_and_values_do_not_overlap() -> None:
    cache = a_cache(cap_blocks=5)
    regions = (*cache.keys, *cache.values)
    for number, region in enumerate(regions):
        region.fill_(float(number))
    assert [float(region.mean()) for region in regions] == list(range(len(regions)))


def test_copied_blocks_carry_all_layers() -> None:
    cache = a_cache(cap_blocks=8)
    cache.map_blocks(8)
    for number, region in enumerate((*cache.keys, *cache.values)):
        region[6], region[7] = 10.0 + number, 20.0 + number
    cache.copy_blocks([(6, 0), (7, 3)])
    cache.copy_blocks([])
    for number, region in enumerate((*cache.keys, *cache.values)):
        assert float(region[0].mean()) == 10.0 + number
        assert float(region[3].mean()) == 20.0 + number


def test_limits_are_checked() -> None:
    cache = a_cache(cap_blocks=8)
    with pytest.raises(ValueError, match="the cap is 8"):
        cache.map_blocks(9)
    cache.map_blocks(8)
    with pytest.raises(ValueError, match="8 are mapped"):
        cache.map_blocks(7)
    with pytest.raises(ValueError, match="8 are mapped"):
        cache.unmap_above(9)
    with pytest.raises(ValueError, match="1 block or more"):
        a_cache(cap_blocks=0)


def test_draft_layers_share_block_ids_and_operations() -> None:
    draft = KVLayers(uniform_group(2, 1, 10), torch.bfloat16)
    cache = KVCache(
        layers=KVLayers(uniform_group(3, 2, 64), torch.float32),
        cap_blocks=200,
        block_size=16,
        memory=HOST,
        draft=draft,
    )
    cache.map_blocks(200)
    assert cache.bytes_per_block == 2 * 16 * (3 * 2 * 64 * 4 + 2 * 1 * 10 * 2)
    assert [tuple(keys.shape) for keys in cache.draft.keys] == [(200, 16, 1, 10)] * 2
    for number, region in enumerate((*cache.keys, *cache.values)):
        region.fill_(float(number))
    for number, region in enumerate((*cache.keys, *cache.values)):
        assert float(region.float().mean()) == float(number), "no two regions overlap"
    cache.draft.keys[1][7] = 99.0
    cache.copy_blocks([(7, 3)])
    assert float(cache.draft.keys[1][3].float().mean()) == 99.0
    cache.unmap_above(0)
    assert cache.resident_bytes() == 0
