"""Swap cache: restored blocks equal swapped-out ones, and host memory is pinned where a device copies it."""

import gc
import mmap
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, FakeMemory
from trimtab_engine.device.address_range import AddressRange, HostMemory
from trimtab_engine.device.kv_cache import HOST, KVCache, KVLayers
from trimtab_engine.device.side_stream import Work
from trimtab_engine.device.swap_cache import NOTHING_SWAPPED, Pairs, SwapCache
from trimtab_modelspec.kv_groups import uniform_group


def a_cache(memory: HostMemory | FakeMemory, num_blocks: int, *, dtype: torch.dtype = torch.float32) -> KVCache:
    cache = KVCache(
        layers=KVLayers(uniform_group(2, 2, 12), dtype),
        cap_blocks=num_blocks,
        block_size=8,
        memory=memory,
        draft=KVLayers(uniform_group(1, 1, 10), dtype),
    )
    cache.map_blocks(num_blocks)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_swapped_blocks_are_restored_in_all_layers(dtype: torch.dtype) -> None:
    cache, host = a_cache(HostMemory(), 6, dtype=dtype), a_cache(HostMemory(), 4, dtype=dtype)
    swap = SwapCache(cache, host)
    regions = (*cache.keys, *cache.values)
    before = [torch.randn(region.shape).to(dtype) for region in regions]
    for region, content in zip(regions, before, strict=True):
        region.copy_(content)
    swap.copy([(5, 0), (1, 3)], [])
    for region in regions:
        region.zero_()
    swap.copy([], [(0, 2), (3, 4)])
    swapped = swap.take_swapped()
    assert swapped.seconds > 0.0
    assert swapped.num_blocks == 4
    for region, content in zip(regions, before, strict=True):
        assert torch.equal(region[[2, 4]].float(), content[[5, 1]].float())
        assert not region[[0, 1, 3, 5]].float().any()
    swap.copy([], [])
    assert swap.take_swapped() == NOTHING_SWAPPED


def test_mapped_blocks_are_copied_as_well() -> None:
    fake = FakeCuda()
    cache = a_cache(FakeMemory(fake), 6)
    swap = SwapCache(cache, a_cache(HostMemory(), 6))
    cache.keys[2][5] = 7.0
    swap.copy([(5, 1)], [(1, 0)])
    assert float(cache.keys[2][0].mean()) == 7.0
    fake.check()


class Pins:
    """Pinned byte counts by address."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.was_mapped: list[bool] = []

    def __call__(self, address: int, num_bytes: int) -> Callable[[], None]:
        self.pinned[address] = num_bytes

        def unpin() -> None:
            del self.pinned[address]
            maps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
            self.was_mapped.append(any(int(first, 16) <= address < int(last, 16) for first, last in maps))

        return unpin


def test_pinned_memory_is_pinned_once_from_its_first_byte_to_its_last() -> None:
    pins = Pins()
    cache = a_cache(HostMemory(pins), 3)
    assert pins.pinned == {cache.keys[0].data_ptr(): cache.reserved_bytes}
    assert cache.reserved_bytes % mmap.PAGESIZE == 0
    assert isinstance(HOST, HostMemory)


def test_pinned_memory_is_unpinned_before_address_reuse() -> None:
    pins = Pins()
    reserved: AddressRange | None = HostMemory(pins).reserve([(0, 1 << 20)], mmap.PAGESIZE)
    assert reserved is not None
    view: torch.Tensor | None = reserved.whole[4096:]
    reserved = None
    gc.collect()
    assert pins.pinned, "a tensor may still be read"
    view = None
    gc.collect()
    assert (view, pins.pinned, pins.was_mapped) == (None, {}, [True])


def test_memory_that_cannot_be_pinned_is_given_back() -> None:
    def refuse(address: int, num_bytes: int) -> Callable[[], None]:
        raise MemoryError("no more")

    with pytest.raises(MemoryError, match="no more"):
        HostMemory(refuse).reserve([(0, 1 << 20)], mmap.PAGESIZE)


BLOCK_SIZE = 8
STEPS_FIRST = 0.8  # how often the steps' queue runs while the side stream is idle


@dataclass
class Operation:
    """Waits for as many operations of the other queue; has ended or not."""

    work: Work
    waits_for: int
    has_ended: bool = False

    def seconds(self) -> float | None:
        return 0.5 if self.has_ended else None


class TwoQueues:
    """A steps' queue and a side queue that run at any relative speed between marks."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self.steps: list[Operation] = []
        self.side_stream: list[Operation] = []
        self._held = 0

    def begin(self, work: Work) -> Operation:
        self.side_stream.append(Operation(work, len(self.steps)))
        return self.side_stream[-1]

    def block_steps_until(self, ticket: Any) -> None:
        self._held = max(self._held, 1 + self.side_stream.index(ticket))

    def step(self, work: Work) -> None:
        self.steps.append(Operation(work, self._held))

    def work(self, most: int) -> None:
        """Run up to `most` operations of queues that need not wait."""
        prefers_steps = self._dice.random() < STEPS_FIRST
        for _ in range(most):
            ready = []
            for queue, other in ((self.steps, self.side_stream), (self.side_stream, self.steps)):
                place = sum(operation.has_ended for operation in queue)
                ended = sum(operation.has_ended for operation in other)
                ready += [queue[place]] if place < len(queue) and queue[place].waits_for <= ended else []
            if not ready:
                return
            operation = ready[0] if prefers_steps else ready[-1]
            operation.work()
            operation.has_ended = True

    def finish(self) -> None:
        self.work(len(self.steps) + len(self.side_stream))
        assert all(operation.has_ended for operation in (*self.steps, *self.side_stream)), (
            "the queues wait for each other"
        )


def a_plan(dice: random.Random) -> list[tuple[Pairs, Pairs, list[int]]]:
    """Return steps: blocks out, blocks in, written slots. Freed or unused blocks may be written or
    reused immediately.
    """
    on_device, free_host, on_host, plan = set(range(4)), set(range(6)), set[int](), []
    for _ in range(12):
        going = dice.sample(sorted(on_device), dice.randint(0, min(len(on_device) // 2, len(free_host))))
        out = [(block, free_host.pop()) for block in going]
        on_device -= {block for block, _ in out}
        coming = dice.sample(sorted(on_host), dice.randint(0, len(on_host)))
        free = dice.sample(sorted(set(range(6)) - on_device), min(len(coming), 6 - len(on_device)))
        back = list(zip(coming, free, strict=False))
        on_host = (on_host | {host for _, host in out}) - {host for host, _ in back}
        free_host |= {host for host, _ in back}
        on_device |= {block for _, block in back}
        taken = dice.sample(sorted(set(range(6)) - on_device), dice.randint(0, 6 - len(on_device)))
        on_device |= set(taken)
        written = [*taken, *dice.sample(sorted(on_device), dice.randint(0, len(on_device)))]
        plan.append((out, back, [block * BLOCK_SIZE + dice.randrange(BLOCK_SIZE) for block in written]))
    return plan


def carried_out(plan: list[tuple[Pairs, Pairs, list[int]]], dice: random.Random, *, beside: bool) -> list[torch.Tensor]:
    """Return both caches after the plan, with copies on a side stream or before each step."""
    cache, host = a_cache(HostMemory(), 6), a_cache(HostMemory(), 6)
    for block in range(6):
        cache.keys[0][block] = float(block)
    queues = TwoQueues(dice)
    swap = SwapCache(cache, host, queues if beside else None)
    for number, (out, back, slots) in enumerate(plan):
        swap.copy(out, back, slots if beside else None)

        def write(slots: list[int] = slots, value: float = 100.0 + number) -> None:
            cache.keys[0].flatten(0, 1)[slots] = value

        if beside:
            queues.step(write)
            queues.work(dice.randint(0, 2))
        else:
            write()
    queues.finish()
    assert swap.take_swapped().num_blocks == sum(len(out) + len(back) for out, back, _ in plan)
    return [cache.keys[0].clone(), host.keys[0].clone()]


@pytest.mark.parametrize("seed", range(60))
def test_concurrent_copies_equal_sequential_copies(seed: int) -> None:
    plan = a_plan(random.Random(seed))
    expected = carried_out(plan, random.Random(seed), beside=False)
    found = carried_out(plan, random.Random(seed), beside=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_step_writing_other_blocks_does_not_wait() -> None:
    queues = TwoQueues(random.Random(0))
    swap = SwapCache(a_cache(HostMemory(), 6), a_cache(HostMemory(), 6), queues)
    swap.copy([(1, 0), (2, 1)], [], [2 * BLOCK_SIZE])  # block 2 is written at once
    queues.step(lambda: None)
    swap.copy([], [], [3 * BLOCK_SIZE])
    queues.step(lambda: None)
    swap.copy([], [], [BLOCK_SIZE])
    queues.step(lambda: None)
    assert [operation.waits_for for operation in queues.steps] == [1, 1, 2]


def test_step_with_unknown_writes_waits() -> None:
    queues = TwoQueues(random.Random(0))
    swap = SwapCache(a_cache(HostMemory(), 6), a_cache(HostMemory(), 6), queues)
    swap.copy([(1, 0)], [], [3 * BLOCK_SIZE])
    swap.copy([], [])
    queues.step(lambda: None)
    assert [operation.waits_for for operation in queues.steps] == [1]
