"""What the end of an engine means to those who ask it.

Every answer ends its connection then: a client that keeps connections comes back elsewhere, as endpoints that forget a
pod keep new connections away from it, not those that are open. And who still comes is counted, so that the engine ends
when nobody does.
"""

from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class CloseWhileEnding:
    """`is_ending` is asked when an answer begins, so that one that was under way before counts, too."""

    def __init__(self, app: ASGIApp, is_ending: Callable[[], bool]) -> None:
        self._app, self._is_ending = app, is_ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._is_ending():
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, receive, closing if scope["type"] == "http" else send)


class CountArrivals:
    """`on_arrival` is called for each request as it begins, but for those at `uncounted` paths: who watches an engine
    comes for as long as it lives."""

    def __init__(self, app: ASGIApp, on_arrival: Callable[[], None], uncounted: frozenset[str]) -> None:
        self._app, self._on_arrival, self._uncounted = app, on_arrival, uncounted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._uncounted:
            self._on_arrival()
        await self._app(scope, receive, send)
