"""Queue of one request's outputs for the task that answers it.

Plain tokens are merged into runs of limited length, so that a waking task takes many of them at once, regardless of the
number of steps.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from trimtab_engine.messages.requests import SequenceOutput

MAX_RUN_TOKENS = 64  # that the reader handles at once, before other tasks of the event loop run


@dataclass(slots=True)
class PlainRun:
    """One more token from each of several steps, without any other change. `times`: ends of those steps by the core's
    clock.
    """

    engine_index: int
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


class OutputQueue:
    """A queue with one reader, in order of arrival."""

    __slots__ = ("_items", "_loop", "_waiter")

    def __init__(self) -> None:
        self._items: deque[SequenceOutput | PlainRun | None] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The reader's event loop, cached because getting the running loop costs a system call."""

    def put(self, item: SequenceOutput | None) -> None:
        """Append an output. None marks the end."""
        self._items.append(item)
        self._wake()

    def put_plain(self, token_id: int, time: float, engine_index: int) -> None:
        run = self._items[-1] if self._items else None
        if not isinstance(run, PlainRun) or len(run.token_ids) >= MAX_RUN_TOKENS:
            run = PlainRun(engine_index)
            self._items.append(run)
            self._wake()
        run.token_ids.append(token_id)
        run.times.append(time)

    async def get(self) -> SequenceOutput | PlainRun | None:
        """Return the next output. With a backlog, let other tasks run first."""
        if self._items:
            await asyncio.sleep(0)
        while not self._items:
            self._loop = self._loop or asyncio.get_running_loop()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._items.popleft()

    def clear(self) -> None:
        self._items.clear()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
