"""Mapped ranges with fixed addresses: pages mapped over time, on a fake driver that enforces the rules."""

import gc
import random

import pytest
import torch
from fake_cuda import PAGE, CUresult, FakeCuda, FakeMemory
from trimtab_engine.device.address_range import AddressRange
from trimtab_engine.device.kv_cache import KVCache, KVLayers
from trimtab_engine.device.mapped_range import MappedRange, page_bytes_for
from trimtab_modelspec.kv_groups import uniform_group

MIB, GIB = 1 << 20, 1 << 30


def a_range(fake: FakeCuda, *sizes: int) -> AddressRange:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return FakeMemory(fake).reserve([(s, s + n) for s, n in zip(starts, sizes, strict=True)], PAGE)


def a_cache(fake: FakeCuda, cap_blocks: int = 64) -> KVCache:
    return KVCache(
        # 640 bytes of a block in a region: blocks share pages
        layers=KVLayers(uniform_group(3, 1, 10), torch.float32),
        cap_blocks=cap_blocks,
        block_size=16,
        memory=FakeMemory(fake),
    )


@pytest.mark.parametrize(
    ("device_bytes", "num_regions", "page"),
    [
        (141 * GIB, 64, 8 * MIB),  # an H200 and 32 layers: 512 MiB at most are lost to rounding
        (141 * GIB, 160, 2 * MIB),  # 80 layers
        (24 * GIB, 64, 2 * MIB),  # never below the granularity
        (141 * GIB, 2, 64 * MIB),  # nor larger than useful
    ],
)
def test_a_page_is_as_large_as_the_rounding_may_cost(device_bytes: int, num_regions: int, page: int) -> None:
    assert page_bytes_for(device_bytes, num_regions, 2 * MIB) == page


def test_ten_gib_more_on_an_h200_are_fewer_than_four_thousand_calls() -> None:
    regions, page = 64, page_bytes_for(141 * GIB, 64, 2 * MIB)
    pages = 10 * GIB // page
    assert pages == 1280
    assert 3 * pages + regions == 3904  # create, map and release of each page; access once per region


def test_only_the_first_page_of_a_new_range_is_mapped() -> None:
    fake = FakeCuda()
    memory = a_range(fake, 8 * PAGE, 8 * PAGE)
    assert fake.calls[0] == ("cuMemAddressReserve", 16 * PAGE, PAGE, 0, 0)
    assert fake.mapped_bytes == memory.resident_bytes() == PAGE


def test_each_region_grows_at_its_end_by_whole_pages_with_one_access_call() -> None:
    fake = FakeCuda()
    memory = a_range(fake, 8 * PAGE, 8 * PAGE)
    (start,) = fake.ranges
    fake.calls.clear()
    memory.keep([PAGE + 1, 3 * PAGE])
    assert [call for call in fake.calls if call[0] in ("cuMemMap", "cuMemSetAccess")] == [
        ("cuMemMap", start + PAGE, PAGE, 0, 102, 0),
        ("cuMemSetAccess", start + PAGE, PAGE, 1),
        ("cuMemMap", start + 8 * PAGE, PAGE, 0, 103, 0),
        ("cuMemMap", start + 9 * PAGE, PAGE, 0, 104, 0),
        ("cuMemMap", start + 10 * PAGE, PAGE, 0, 105, 0),
        ("cuMemSetAccess", start + 8 * PAGE, 3 * PAGE, 1),
    ]
    assert memory.resident_bytes() == 5 * PAGE
    fake.check()


def test_a_region_shrinks_from_its_end_after_the_device_has_finished() -> None:
    fake = FakeCuda()
    memory = a_range(fake, 8 * PAGE, 8 * PAGE)
    (start,) = fake.ranges
    memory.keep([8 * PAGE, 8 * PAGE])
    fake.calls.clear()
    memory.keep([2 * PAGE - 1, 5 * PAGE])
    assert fake.calls == [
        ("synchronize",),
        *[("cuMemUnmap", start + page * PAGE, PAGE) for page in (7, 6, 5, 4, 3, 2, 15, 14, 13)],
    ]
    assert fake.mapped_bytes == 7 * PAGE
    fake.calls.clear()
    memory.keep([2 * PAGE, 5 * PAGE])
    assert fake.calls == [], "existing pages cost nothing"


def test_growth_that_fails_half_way_leaves_everything_as_it_was() -> None:
    fake = FakeCuda(free_bytes=6 * PAGE)
    memory = a_range(fake, 8 * PAGE, 8 * PAGE)
    memory.keep([2 * PAGE, PAGE])
    maps = dict(fake.maps)
    with pytest.raises(MemoryError, match="cuMemCreate"):
        memory.keep([4 * PAGE, 4 * PAGE])
    assert fake.maps == maps
    assert fake.free_bytes == 3 * PAGE
    fake.check()
    memory.keep([3 * PAGE, 3 * PAGE])
    assert memory.resident_bytes() == 6 * PAGE


def test_access_that_is_denied_leaves_everything_as_it_was() -> None:
    fake = FakeCuda()
    memory = a_range(fake, 8 * PAGE)
    fake.fails["cuMemSetAccess"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(RuntimeError, match="cuMemSetAccess"):
        memory.keep([4 * PAGE])
    assert memory.resident_bytes() == PAGE
    fake.check()


def test_a_closed_range_has_given_everything_back() -> None:
    fake = FakeCuda()
    before = fake.free_bytes
    memory = a_range(fake, 8 * PAGE, 8 * PAGE)
    memory.keep([3 * PAGE, 4 * PAGE])
    assert isinstance(memory, MappedRange)
    memory.close()
    assert (fake.ranges, fake.maps, fake.free_bytes) == ({}, {}, before)


def test_range_is_freed_with_last_tensor() -> None:
    fake = FakeCuda()
    before = fake.free_bytes
    memory: AddressRange | None = a_range(fake, 8 * PAGE, 8 * PAGE)
    assert memory is not None
    memory.keep([3 * PAGE, 4 * PAGE])
    part: torch.Tensor | None = memory.whole[PAGE : 2 * PAGE].view(torch.int64)
    memory = None
    gc.collect()
    assert fake.mapped_bytes == 7 * PAGE, "a layer's keys are still read"
    part = None
    gc.collect()
    assert part is None
    assert (fake.ranges, fake.maps, fake.free_bytes) == ({}, {}, before)


def test_random_sizes_of_a_kv_cache_keep_its_content_addresses_and_books() -> None:
    fake = FakeCuda()
    cache = a_cache(fake)
    regions = (*cache.keys, *cache.values)
    addresses = [region.data_ptr() for region in regions]
    choose = random.Random(4)
    written = 0
    for _ in range(60):
        num_blocks = choose.randint(0, 64)
        if num_blocks > cache.num_blocks:
            cache.map_blocks(num_blocks)
            for number, region in enumerate(regions):
                region[written:num_blocks] = torch.arange(written, num_blocks).view(-1, 1, 1, 1) + 100.0 * number
        else:
            cache.unmap_above(num_blocks)
        written = num_blocks
        for number, region in enumerate(regions):
            assert region[:written, 0, 0, 0].tolist() == [100.0 * number + block for block in range(written)]
        assert [region.data_ptr() for region in regions] == addresses
        assert cache.mapped_bytes <= cache.resident_bytes() <= cache.mapped_bytes + cache.rounding_bytes
        assert cache.resident_bytes() == fake.mapped_bytes
        fake.check()


def test_failed_growth_keeps_size_and_reaches_other_ranks() -> None:
    fake = FakeCuda(free_bytes=12 * PAGE)
    cache = a_cache(fake)
    cache.map_blocks(4)
    told: list[object] = []
    cache.mirror = told.append
    with pytest.raises(MemoryError):
        cache.map_blocks(64)
    assert cache.num_blocks == 4
    assert [getattr(change, "num_blocks", None) for change in told] == [64, 4]


def test_cap_cannot_fall_below_mapped_blocks() -> None:
    cache = a_cache(FakeCuda())
    cache.map_blocks(4)
    cache.limit(10)
    assert (cache.cap_blocks, cache.reserved_num_blocks) == (10, 64)
    assert cache.keys[0].shape[0] == 64
    with pytest.raises(ValueError, match="cap is 10"):
        cache.map_blocks(11)
    with pytest.raises(ValueError, match="outside 4 mapped to 64 reserved"):
        cache.limit(3)
