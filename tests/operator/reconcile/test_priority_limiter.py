"""Who is let in when."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest
from trimtab_operator.reconcile.priority_limiter import Lanes, Place


class Crowd:
    """Those who ask for room, and who of them is inside."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.inside: list[str] = []
        self._doors: dict[str, asyncio.Event] = {}
        self._places: dict[str, Place] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def comes(self, *names: str, urgent: bool = False) -> None:
        for name in names:
            self._doors[name] = asyncio.Event()
            self._places[name] = Place(urgent)
            self._tasks[name] = asyncio.create_task(self._stay(name))
        await settle()

    async def _stay(self, name: str) -> None:
        async with self.lanes.entered(self._places[name]):
            self.inside.append(name)
            try:
                await self._doors[name].wait()
            finally:
                self.inside.remove(name)

    async def goes(self, name: str) -> None:
        self._doors[name].set()
        await settle()

    async def hurries(self, name: str) -> None:
        self.lanes.hurry(self._places[name])
        await settle()

    async def gives_up(self, *names: str) -> None:
        for name in names:
            self._tasks[name].cancel()
        for name in names:
            with suppress(asyncio.CancelledError):
                await self._tasks[name]
        await settle()


async def settle() -> None:
    """Let everybody take the steps that need no event."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_who_is_urgent_goes_before_all_who_came_earlier() -> None:
    crowd = Crowd(Lanes(2, beside=1))
    await crowd.comes("a", "b", "c", "d")
    await crowd.comes("u", urgent=True)
    assert crowd.inside == ["a", "b"]
    await crowd.goes("a")
    assert crowd.inside == ["b", "u"]


async def test_while_somebody_urgent_is_there_few_others_come_in_but_never_none() -> None:
    lanes = Lanes(8, beside=2)
    crowd = Crowd(lanes)
    await crowd.comes("u", urgent=True)
    await crowd.comes("a", "b", "c", "d", "e")
    assert crowd.inside == ["u", "a", "b"]
    assert not lanes.is_crowded
    await crowd.comes("v", "w", urgent=True)
    assert (crowd.inside, lanes.is_crowded) == (["u", "a", "b", "v", "w"], True)
    await crowd.goes("a")
    await crowd.goes("b")
    assert crowd.inside == ["u", "v", "w", "c"]
    await crowd.goes("u")
    await crowd.goes("v")
    assert crowd.inside == ["w", "c", "d"]
    await crowd.goes("w")
    assert crowd.inside == ["c", "d", "e"]


async def test_what_is_kept_for_the_urgent_nobody_else_takes() -> None:
    crowd = Crowd(Lanes(2, beside=1, kept=1))
    await crowd.comes("a", "b")
    assert crowd.inside == ["a"]
    await crowd.comes("u", urgent=True)
    assert crowd.inside == ["a", "u"]


async def test_who_stands_in_line_may_become_urgent_and_who_is_inside_stays_what_it_was() -> None:
    crowd = Crowd(Lanes(2, beside=1))
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
async def test_who_gives_up_waiting_leaves_the_room_to_the_next(urgent: bool) -> None:
    crowd = Crowd(Lanes(1, beside=1))
    await crowd.comes("a")
    await crowd.comes("b", "c", urgent=urgent)
    await crowd.gives_up("b")
    await crowd.goes("a")
    assert crowd.inside == ["c"]
    await crowd.gives_up("c")
    await crowd.comes("d")
    assert crowd.inside == ["d"]


async def test_who_is_let_in_and_cancelled_in_the_same_moment_takes_no_room() -> None:
    crowd = Crowd(Lanes(1, beside=1))
    await crowd.comes("a", "b", "c")
    crowd._doors["a"].set()
    await asyncio.sleep(0)  # "a" is on its way out, and "b" is let in
    await crowd.gives_up("b")
    assert crowd.inside == ["c"]


@pytest.mark.parametrize("seed", range(5))
async def test_however_they_come_and_go_all_are_served_and_never_more_than_there_is_room_for(seed: int) -> None:
    chance = random.Random(seed)
    lanes = Lanes(3, beside=1, kept=1)
    inside, served = [0, 0], 0

    async def visit(urgent: bool) -> None:
        nonlocal served
        async with lanes.entered(Place(urgent)):
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
    async with lanes.entered(Place()), lanes.entered(Place(urgent=True)), lanes.entered(Place(urgent=True)):
        pass  # nobody who gave up is still counted


async def steps_back(crowd: Crowd, name: str, seconds: float) -> asyncio.Task[None]:
    task = asyncio.create_task(crowd.lanes.step_back(crowd._places[name], seconds))
    await settle()
    return task


async def test_who_steps_back_leaves_the_room_to_the_urgent_and_is_back_in_turn() -> None:
    crowd = Crowd(Lanes(2, beside=1))
    await crowd.comes("u", "v", "w", urgent=True)
    assert crowd.lanes.is_waited_for(crowd._places["u"])
    back = await steps_back(crowd, "u", 60.0)
    await crowd.comes("a")
    assert "w" in crowd.inside  # where "u" was
    assert not back.done()
    await crowd.goes("v")
    await back
    assert not crowd.lanes.is_waited_for(crowd._places["u"])
    assert "a" not in crowd.inside  # "u" stands beside the urgent one, and came before
    await crowd.goes("u")
    assert crowd.inside == ["w", "a"]
    assert not crowd.lanes.is_waited_for(crowd._places["w"])  # nobody else is urgent


async def test_who_steps_back_for_too_long_is_urgent_again() -> None:
    crowd = Crowd(Lanes(1, beside=0))
    await crowd.comes("u", "v", "w", urgent=True)
    back = await steps_back(crowd, "u", 0.0)
    for _ in range(3):
        await asyncio.sleep(0.001)
    assert crowd._places["u"].urgent
    await crowd.goes("v")
    await crowd.goes("w")
    await back
    assert crowd.lanes._inside == {True: 1, False: 0}


async def test_who_gives_up_having_stepped_back_holds_nothing() -> None:
    crowd = Crowd(Lanes(1, beside=1))

    async def visit() -> None:
        async with crowd.lanes.entered(place):
            await crowd.lanes.step_back(place, 60.0)

    place = Place(urgent=True)
    crowd._tasks["u"] = asyncio.create_task(visit())
    await crowd.comes("v", urgent=True)
    await crowd.gives_up("u")
    await crowd.goes("v")
    assert crowd.lanes._inside == {True: 0, False: 0}
    await crowd.comes("a")
    assert crowd.inside == ["a"]
