"""While the engine drains, every answer ends its connection: a client that keeps connections comes back elsewhere.

Endpoints that forget a pod keep new connections away from it, not those that are open.
"""

from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class CloseWhileDraining:
    """`is_draining` is asked when an answer begins, so that one that was under way before counts, too."""

    def __init__(self, app: ASGIApp, is_draining: Callable[[], bool]) -> None:
        self._app, self._is_draining = app, is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._is_draining():
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, receive, closing if scope["type"] == "http" else send)
