"""Concurrency limiter with two priorities: user-initiated reconciles run before follow-ups.

Callers decide what is urgent, also for a slot that is already waiting.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Slot:
    """A caller's slot: waiting, held or released."""

    urgent: bool = False
    is_held: bool = False
    _admitted: asyncio.Future[None] | None = None


class PriorityLimiter:
    """Limiter for at most `max_concurrent` callers that prefers urgent ones.

    Background callers may use `max_concurrent - reserved` slots while no urgent caller is present. Otherwise they may
    use `max_background_when_urgent - (urgent - 1)` slots, but at least one: this avoids starvation, and a stuck urgent
    caller does not block the others.
    """

    def __init__(self, max_concurrent: int, *, max_background_when_urgent: int, reserved: int = 0) -> None:
        self._max_concurrent, self._max_background_when_urgent, self._reserved = (
            max_concurrent,
            max_background_when_urgent,
            reserved,
        )
        self._held = {True: 0, False: 0}
        """Number of held slots, by urgency."""
        self._waiting: dict[bool, deque[Slot]] = {True: deque(), False: deque()}

    @asynccontextmanager
    async def acquire(self, slot: Slot) -> AsyncIterator[None]:
        """Wait for a slot and hold it within the context."""
        await self._acquire(slot)
        try:
            yield
        finally:
            self._release(slot)

    @property
    def num_urgent(self) -> int:
        """Return the number of urgent callers that hold a slot or wait for one."""
        return self._held[True] + len(self._waiting[True])

    @property
    def is_crowded(self) -> bool:
        """Return True if so many callers are urgent that only one slot is left to background callers."""
        return self.num_urgent >= self._max_background_when_urgent > 0

    def should_yield(self, slot: Slot) -> bool:
        """Return True if the slot is urgent and held, and another urgent caller holds a slot or waits."""
        return slot.urgent and slot.is_held and (self._held[True] > 1 or bool(self._waiting[True]))

    async def demote_and_requeue(self, slot: Slot, seconds: float) -> None:
        """Release the slot to urgent callers and acquire it again as a background caller.

        It becomes urgent again after `seconds`. If cancelled meanwhile, it is not queued and holds no slot.
        """
        self._release(slot)
        slot.urgent = False
        timer = asyncio.get_running_loop().call_later(seconds, self.promote, slot)
        try:
            await self._acquire(slot)
        finally:
            timer.cancel()

    def promote(self, slot: Slot) -> None:
        """Make a waiting slot urgent. A slot that is held stays as it is."""
        if not slot.urgent and slot in self._waiting[False]:
            self._waiting[False].remove(slot)
            slot.urgent = True
            self._waiting[True].append(slot)
            self._admit()

    async def _acquire(self, slot: Slot) -> None:
        if not self._waiting[slot.urgent] and self._has_room(slot.urgent):
            self._hold(slot)
            return
        slot._admitted = asyncio.get_running_loop().create_future()
        self._waiting[slot.urgent].append(slot)
        try:
            await slot._admitted
        except asyncio.CancelledError:
            if slot in self._waiting[slot.urgent]:
                self._waiting[slot.urgent].remove(slot)
                self._admit()
            else:  # admitted while it was being cancelled
                self._release(slot)
            raise

    def _hold(self, slot: Slot) -> None:
        self._held[slot.urgent] += 1
        slot.is_held = True

    def _release(self, slot: Slot) -> None:
        """Release the slot if it is held."""
        if slot.is_held:
            slot.is_held = False
            self._held[slot.urgent] -= 1
            self._admit()

    def _admit(self) -> None:
        """Admit waiting callers while there are free slots, urgent ones first."""
        for urgent in (True, False):
            while self._waiting[urgent] and self._has_room(urgent):
                slot = self._waiting[urgent].popleft()
                self._hold(slot)
                assert slot._admitted is not None
                if not slot._admitted.done():  # a cancelled waiter releases the slot itself
                    slot._admitted.set_result(None)

    def _has_room(self, urgent: bool) -> bool:
        if sum(self._held.values()) >= self._max_concurrent:
            return False
        if urgent:
            return True
        if self.num_urgent == 0:
            return self._held[False] < self._max_concurrent - self._reserved
        return self._held[False] < max(
            min(1, self._max_background_when_urgent), self._max_background_when_urgent + 1 - self.num_urgent
        )
