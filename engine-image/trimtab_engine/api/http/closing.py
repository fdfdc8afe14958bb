"""Connection handling of a terminating engine.

Responses close their connection: removing a pod from the endpoints only redirects new connections, so clients with open
ones must reconnect. Arrivals are counted, so that the engine exits when traffic has stopped.
"""

from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class CloseWhileEnding:
    """Middleware that adds `Connection: close`. `is_ending` is called at the start of a response, so that requests in
    progress are included."""

    def __init__(self, app: ASGIApp, is_ending: Callable[[], bool]) -> None:
        self._app, self._is_ending = app, is_ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._is_ending():
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, receive, closing if scope["type"] == "http" else send)


class CountArrivals:
    """Middleware that calls `on_arrival` for each request, except at `uncounted` paths, whose clients (monitoring)
    never stop."""

    def __init__(self, app: ASGIApp, on_arrival: Callable[[], None], uncounted: frozenset[str]) -> None:
        self._app, self._on_arrival, self._uncounted = app, on_arrival, uncounted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._uncounted:
            self._on_arrival()
        await self._app(scope, receive, send)
