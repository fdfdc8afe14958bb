"""An event loop in a thread of its own, for what others wait for by a deadline: ADR-0004."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class LoopThread:
    """Runs coroutines beside the caller's event loop, however busy that is. Use it as an async context manager."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._entered = AsyncExitStack()

    async def __aenter__(self) -> LoopThread:
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.run(self._entered.aclose)
            await self.run(_cancel_all)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.to_thread(self._thread.join)
            self._loop.close()

    async def run(self, function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a coroutine there and wait for it here; when the wait is cancelled, so is the coroutine."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(function(*args, **kwargs), self._loop))

    async def enter(self, context: AbstractAsyncContextManager[T]) -> T:
        """Enter a context there; it is left there when the thread ends, the last one first."""
        return await self.run(self._entered.enter_async_context, context)


async def _cancel_all() -> None:
    """Let no task outlive its loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
