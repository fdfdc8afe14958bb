"""Who may go first: so many at once, and whoever is waited for before whoever only follows up.

What an owner has just asked for is brought about at once, whatever still follows from what others asked for before.
What is urgent is not decided here: callers say so, also of somebody who stands in line already.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Place:
    """Somebody's place: in line, inside, or left."""

    urgent: bool = False
    is_inside: bool = False
    _turn: asyncio.Future[None] | None = None


class Lanes:
    """Room for `at_once`. Those that can wait have all of it but `kept`, and while anybody urgent is there or in line,
    `beside` of it and one place less for each of the urgent but the first; never none, so that nobody waits for ever,
    and so that somebody urgent who is held up holds up nobody."""

    def __init__(self, at_once: int, *, beside: int, kept: int = 0) -> None:
        self._at_once, self._beside, self._kept = at_once, beside, kept
        self._inside = {True: 0, False: 0}
        """How many are in, by whether they are urgent."""
        self._in_line: dict[bool, deque[Place]] = {True: deque(), False: deque()}

    @asynccontextmanager
    async def entered(self, place: Place) -> AsyncIterator[None]:
        """Wait for room, and hold it."""
        await self._enter(place)
        try:
            yield
        finally:
            self._leave(place)

    @property
    def num_urgent(self) -> int:
        """How many who are urgent are there or in line."""
        return self._inside[True] + len(self._in_line[True])

    @property
    def is_crowded(self) -> bool:
        """Whether so many are urgent that one place is left to those that can wait."""
        return self.num_urgent >= self._beside > 0

    def is_waited_for(self, place: Place) -> bool:
        """Whether somebody else who is urgent is there or in line, while this one is inside and urgent."""
        return place.urgent and place.is_inside and (self._inside[True] > 1 or bool(self._in_line[True]))

    async def step_back(self, place: Place, seconds: float) -> None:
        """Hold the room as one who can wait, from now on: who is inside leaves it to those who are urgent, and is back
        in turn; as urgent again where that takes longer. Cancelled meanwhile, it is in no line and holds nothing."""
        self._leave(place)
        place.urgent = False
        timer = asyncio.get_running_loop().call_later(seconds, self.hurry, place)
        try:
            await self._enter(place)
        finally:
            timer.cancel()

    def hurry(self, place: Place) -> None:
        """Let somebody who stands in line be urgent from now on; who is inside stays what it was."""
        if not place.urgent and place in self._in_line[False]:
            self._in_line[False].remove(place)
            place.urgent = True
            self._in_line[True].append(place)
            self._admit()

    async def _enter(self, place: Place) -> None:
        if not self._in_line[place.urgent] and self._has_room(place.urgent):
            self._let_in(place)
            return
        place._turn = asyncio.get_running_loop().create_future()
        self._in_line[place.urgent].append(place)
        try:
            await place._turn
        except asyncio.CancelledError:
            if place in self._in_line[place.urgent]:
                self._in_line[place.urgent].remove(place)
                self._admit()
            else:  # it was let in while it was being cancelled
                self._leave(place)
            raise

    def _let_in(self, place: Place) -> None:
        self._inside[place.urgent] += 1
        place.is_inside = True

    def _leave(self, place: Place) -> None:
        """Leave the room, where it is held."""
        if place.is_inside:
            place.is_inside = False
            self._inside[place.urgent] -= 1
            self._admit()

    def _admit(self) -> None:
        """Let in whoever has room now, the urgent first."""
        for urgent in (True, False):
            while self._in_line[urgent] and self._has_room(urgent):
                place = self._in_line[urgent].popleft()
                self._let_in(place)
                assert place._turn is not None
                if not place._turn.done():  # one that was cancelled leaves by itself
                    place._turn.set_result(None)

    def _has_room(self, urgent: bool) -> bool:
        if sum(self._inside.values()) >= self._at_once:
            return False
        if urgent:
            return True
        if self.num_urgent == 0:
            return self._inside[False] < self._at_once - self._kept
        return self._inside[False] < max(min(1, self._beside), self._beside + 1 - self.num_urgent)
