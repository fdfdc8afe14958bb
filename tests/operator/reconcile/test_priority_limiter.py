"""Admission order of the priority limiter."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest
from trimtab_operator.reconcile.priority_limiter import PriorityLimiter, Slot


class Crowd:
    """Callers of a limiter, and the ones that hold a slot."""

    def __init__(self, limiter: PriorityLimiter) -> None:
        self.limiter = limiter
        self.inside: list[str] = []
        self._doors: dict[str, asyncio.Event] = {}
        self._slots: dict[str, Slot] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def comes(self, *names: str, urgent: bool = False) -> None:
        for name in names:
            self._doors[name] = asyncio.Event()
            self._slots[name] = Slot(urgent)
            self._tasks[name] = asyncio.create_task(self._stay(name))
        await settle()

    async def _stay(self, name: str) -> None:
        async with self.limiter.acquire(self._slots[name]):
            self.inside.append(name)
            try:
                await self._doors[name].wait()
            finally:
                self.inside.remove(name)

    async def goes(self, name: str) -> None:
        self._doors[name].set()
        await settle()

    async def hurries(self, name: str) -> None:
        self.limiter.promote(self._slots[name])
        await settle()

    async def gives_up(self, *names: str) -> None:
        for name in names:
            self._tasks[name].cancel()
        for name in names:
            with suppress(asyncio.CancelledError):
                await self._tasks[name]
        await settle()


async def settle() -> None:
    """Let all tasks take the steps that need no event."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_limiter_admits_urgent_first() -> None:
    crowd = Crowd(PriorityLimiter(2, max_background_when_urgent=1))
    await crowd.comes("a", "b", "c", "d")
    await crowd.comes("u", urgent=True)
    assert crowd.inside == ["a", "b"]
    await crowd.goes("a")
    assert crowd.inside == ["b", "u"]


async def test_limiter_restricts_background_while_urgent() -> None:
    limiter = PriorityLimiter(8, max_background_when_urgent=2)
    crowd = Crowd(limiter)
    await crowd.comes("u", urgent=True)
    await crowd.comes("a", "b", "c", "d", "e")
    assert crowd.inside == ["u", "a", "b"]
    assert not limiter.is_crowded
    await crowd.comes("v", "w", urgent=True)
    assert (crowd.inside, limiter.is_crowded) == (["u", "a", "b", "v", "w"], True)
    await crowd.goes("a")
    await crowd.goes("b")
    assert crowd.inside == ["u", "v", "w", "c"]
    await crowd.goes("u")
    await crowd.goes("v")
    assert crowd.inside == ["w", "c", "d"]
    await crowd.goes("w")
    assert crowd.inside == ["c", "d", "e"]


async def test_limiter_reserved_slots_are_urgent_only() -> None:
    crowd = Crowd(PriorityLimiter(2, max_background_when_urgent=1, reserved=1))
    await crowd.comes("a", "b")
    assert crowd.inside == ["a"]
    await crowd.comes("u", urgent=True)
    assert crowd.inside == ["a", "u"]


async def test_promote_affects_waiting_slots_only() -> None:
    crowd = Crowd(PriorityLimiter(2, max_background_when_urgent=1))
    await crowd.comes("a", "b", "c", "d")
    await crowd.hurries("d")
    await crowd.hurries("a")
    await crowd.goes("b")
    assert crowd.inside == ["a", "d"]
    await crowd.goes("a")
    assert crowd.inside == ["d", "c"]
    await crowd.goes("d")
    await crowd.comes("e")
    assert crowd.inside == ["c", "e"]


@pytest.mark.parametrize("urgent", [True, False])
async def test_cancelled_waiter_frees_its_place(urgent: bool) -> None:
    crowd = Crowd(PriorityLimiter(1, max_background_when_urgent=1))
    await crowd.comes("a")
    await crowd.comes("b", "c", urgent=urgent)
    await crowd.gives_up("b")
    await crowd.goes("a")
    assert crowd.inside == ["c"]
    await crowd.gives_up("c")
    await crowd.comes("d")
    assert crowd.inside == ["d"]


async def test_waiter_cancelled_at_admission_holds_no_slot() -> None:
    crowd = Crowd(PriorityLimiter(1, max_background_when_urgent=1))
    await crowd.comes("a", "b", "c")
    crowd._doors["a"].set()
    await asyncio.sleep(0)  # "a" is on its way out, and "b" is let in
    await crowd.gives_up("b")
    assert crowd.inside == ["c"]


@pytest.mark.parametrize("seed", range(5))
async def test_limiter_random_arrivals_stay_within_limits(seed: int) -> None:
    chance = random.Random(seed)
    limiter = PriorityLimiter(3, max_background_when_urgent=1, reserved=1)
    inside, served = [0, 0], 0

    async def visit(urgent: bool) -> None:
        nonlocal served
        async with limiter.acquire(Slot(urgent)):
            inside[urgent] += 1
            try:
                assert sum(inside) <= 3
                assert inside[False] <= 2
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                inside[urgent] -= 1
        served += 1

    tasks = []
    for _ in range(200):
        tasks.append(asyncio.create_task(visit(chance.random() < 0.5)))
        if chance.random() < 0.2:
            chance.choice(tasks).cancel()
        await asyncio.sleep(0)
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(result is None or isinstance(result, asyncio.CancelledError) for result in found)
    assert served == found.count(None)
    assert inside == [0, 0]
    async with limiter.acquire(Slot()), limiter.acquire(Slot(urgent=True)), limiter.acquire(Slot(urgent=True)):
        pass  # cancelled callers are not counted


async def steps_back(crowd: Crowd, name: str, seconds: float) -> asyncio.Task[None]:
    task = asyncio.create_task(crowd.limiter.demote_and_requeue(crowd._slots[name], seconds))
    await settle()
    return task


async def test_demote_and_requeue_yields_to_urgent() -> None:
    crowd = Crowd(PriorityLimiter(2, max_background_when_urgent=1))
    await crowd.comes("u", "v", "w", urgent=True)
    assert crowd.limiter.should_yield(crowd._slots["u"])
    back = await steps_back(crowd, "u", 60.0)
    await crowd.comes("a")
    assert "w" in crowd.inside  # where "u" was
    assert not back.done()
    await crowd.goes("v")
    await back
    assert not crowd.limiter.should_yield(crowd._slots["u"])
    assert "a" not in crowd.inside  # "u" has the background slot, and was queued before
    await crowd.goes("u")
    assert crowd.inside == ["w", "a"]
    assert not crowd.limiter.should_yield(crowd._slots["w"])  # no other caller is urgent


async def test_demoted_slot_becomes_urgent_after_timeout() -> None:
    crowd = Crowd(PriorityLimiter(1, max_background_when_urgent=0))
    await crowd.comes("u", "v", "w", urgent=True)
    back = await steps_back(crowd, "u", 0.0)
    for _ in range(3):
        await asyncio.sleep(0.001)
    assert crowd._slots["u"].urgent
    await crowd.goes("v")
    await crowd.goes("w")
    await back
    assert crowd.limiter._held == {True: 1, False: 0}


async def test_cancelled_demoted_slot_holds_nothing() -> None:
    crowd = Crowd(PriorityLimiter(1, max_background_when_urgent=1))

    async def visit() -> None:
        async with crowd.limiter.acquire(place):
            await crowd.limiter.demote_and_requeue(place, 60.0)

    place = Slot(urgent=True)
    crowd._tasks["u"] = asyncio.create_task(visit())
    await crowd.comes("v", urgent=True)
    await crowd.gives_up("u")
    await crowd.goes("v")
    assert crowd.limiter._held == {True: 0, False: 0}
    await crowd.comes("a")
    assert crowd.inside == ["a"]
