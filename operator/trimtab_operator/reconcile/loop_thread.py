"""Event loop in a separate thread, for work with a deadline: ADR-0004."""

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
    """Async context manager that runs coroutines in a separate thread, independent of the caller's event loop."""

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
        """Run a coroutine in the thread and wait for its result. Cancelling the wait cancels the coroutine."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(function(*args, **kwargs), self._loop))

    async def enter(self, context: AbstractAsyncContextManager[T]) -> T:
        """Enter a context in the thread. The contexts are exited in reverse order when the thread ends."""
        return await self.run(self._entered.enter_async_context, context)


async def _cancel_all() -> None:
    """Cancel all tasks of the loop and wait for them."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
