"""Items are cached within the byte limit; concurrent requests share one computation."""

import asyncio

import pytest
from trimtab_engine.errors import InvalidRequest
from trimtab_engine.multimodal.items import MultiModalItem, Patches
from trimtab_engine.multimodal.processor_cache import ProcessorCache

TABLE = bytes(1024)


class Maker:
    """Makes items of a size, and counts them. Waits for `go`, and raises the given exception."""

    def __init__(self, size: int = 2048, raises: Exception | None = None) -> None:
        self.size, self.raises, self.count = size, raises, 0
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self) -> MultiModalItem:
        self.count += 1
        await self.go.wait()
        if self.raises is not None:
            raise self.raises
        return MultiModalItem("image", b"", 1, (1, 2, 2), Patches(1, bytes(self.size - len(TABLE)), TABLE))


async def test_an_item_is_made_once() -> None:
    lookups: list[bool] = []
    cache, make = ProcessorCache(10_000, lookups.append), Maker()
    assert await cache.get(b"a", make) is await cache.get(b"a", make)
    assert (make.count, lookups, cache.num_bytes) == (1, [False, True], 2048)


async def test_the_least_recently_used_goes_when_the_bytes_do_not_suffice() -> None:
    cache, make = ProcessorCache(2 * 2048), Maker()
    for name in (b"a", b"b", b"a", b"c"):  # b is the oldest when c is added
        await cache.get(name, make)
    assert (len(cache), cache.num_bytes, make.count) == (2, 4096, 3)
    await cache.get(b"a", make)
    await cache.get(b"c", make)
    assert make.count == 3
    await cache.get(b"b", make)
    assert make.count == 4


async def test_oversized_item_is_not_cached_and_evicts_nothing() -> None:
    cache = ProcessorCache(4096)
    await cache.get(b"a", Maker())
    assert (await cache.get(b"large", Maker(5000))).patches is not None
    assert (len(cache), cache.num_bytes) == (1, 2048)


async def test_a_cache_of_nothing_keeps_nothing() -> None:
    cache, make = ProcessorCache(0), Maker()
    await cache.get(b"a", make)
    await cache.get(b"a", make)
    assert (make.count, len(cache)) == (2, 0)


async def test_requests_at_once_wait_for_one() -> None:
    cache, make = ProcessorCache(10_000), Maker()
    make.go.clear()
    waiting = [asyncio.create_task(cache.get(b"a", make)) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # the first caller is cancelled
    await asyncio.sleep(0)
    make.go.set()
    assert await waiting[1] is await waiting[2]
    assert make.count == 1


async def test_a_failure_is_for_all_who_wait_and_is_not_kept() -> None:
    cache, make = ProcessorCache(10_000), Maker(raises=InvalidRequest("broken"))
    answers = await asyncio.gather(*(cache.get(b"a", make) for _ in range(2)), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["broken", "broken"]
    assert make.count == 1
    with pytest.raises(InvalidRequest, match="broken"):
        await cache.get(b"a", make)
    assert make.count == 2


async def test_cleared_item_is_recomputed_even_if_pending() -> None:
    cache, make = ProcessorCache(10_000), Maker()
    await cache.get(b"a", make)
    make.go.clear()
    waiting = asyncio.create_task(cache.get(b"b", make))
    await asyncio.sleep(0)
    cache.clear()
    make.go.set()
    await waiting
    assert (len(cache), cache.num_bytes) == (0, 0)


async def test_request_after_clear_starts_a_second_computation() -> None:
    cache, old, new = ProcessorCache(10_000), Maker(2048), Maker(3072)
    old.go.clear()
    first = asyncio.create_task(cache.get(b"a", old))
    await asyncio.sleep(0)
    cache.clear()
    assert await cache.known(b"a") is None
    new.go.clear()
    later = [asyncio.create_task(cache.get(b"a", new)) for _ in range(2)]
    await asyncio.sleep(0)
    old.go.set()
    await first
    later.append(asyncio.create_task(cache.get(b"a", new)))  # the old one's end ends no other's making
    await asyncio.sleep(0)
    new.go.set()
    items = await asyncio.gather(*later)
    assert len({id(item) for item in items}) == 1
    assert (await cache.known(b"a") is items[0], new.count, cache.num_bytes) == (True, 1, 3072)


async def test_failing_source_fails_only_its_own_callers() -> None:
    cache, dead, good = ProcessorCache(10_000), Maker(raises=InvalidRequest("dead link")), Maker()
    dead.go.clear()
    good.go.clear()
    asked = [
        cache.get(b"a", dead, source="dead"),
        cache.get(b"a", good, source="good"),
        cache.get(b"a", good, source="good"),
    ]
    waiting = [asyncio.create_task(each) for each in asked]
    await asyncio.sleep(0)
    by_name = asyncio.create_task(cache.known(b"a"))
    await asyncio.sleep(0)
    dead.go.set()
    with pytest.raises(InvalidRequest, match="dead link"):
        await waiting[0]
    good.go.set()
    assert await waiting[1] is await waiting[2] is await by_name
    assert (dead.count, good.count, cache.num_bytes) == (1, 1, 2048)


async def test_first_completed_source_is_cached_and_counted_once() -> None:
    cache, first, second = ProcessorCache(10_000), Maker(2048), Maker(3072)
    second.go.clear()
    waiting = asyncio.create_task(cache.get(b"a", second, source="second"))
    await asyncio.sleep(0)
    kept = await cache.get(b"a", first, source="first")
    second.go.set()
    assert await waiting is not kept
    assert (await cache.known(b"a") is kept, len(cache), cache.num_bytes) == (True, 1, 2048)


async def test_name_lookup_raises_if_all_sources_fail() -> None:
    cache, dead = ProcessorCache(10_000), Maker(raises=InvalidRequest("dead link"))
    dead.go.clear()
    waiting = asyncio.create_task(cache.get(b"a", dead, source="dead"))
    await asyncio.sleep(0)
    by_name = asyncio.create_task(cache.known(b"a"))
    await asyncio.sleep(0)
    dead.go.set()
    answers = await asyncio.gather(waiting, by_name, return_exceptions=True)
    assert [str(answer) for answer in answers] == ["dead link", "dead link"]
    assert await cache.known(b"a") is None
