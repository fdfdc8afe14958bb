"""Size limit of request bodies."""

import contextlib
from collections.abc import Callable

from fastapi import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trimtab_engine.api.http.errors import ApiError


class BodyLimit:
    """Middleware that rejects bodies above a size before they are read: by Content-Length, and by counting received
    bytes.

    `max_bytes` is called for each request; `respond` builds the response of an ApiError.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: Callable[[], int],
        remedy: str,
        respond: Callable[[ApiError], Response] = ApiError.response,
    ) -> None:
        self._app, self._max_bytes, self._remedy, self._respond = app, max_bytes, remedy, respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._max_bytes()
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if not announced.isdigit() or int(announced[:20]) > most:
            await self._respond(self._refusal(most))(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > most:
                    raise self._refusal(most)
            return message

        async def unless_refused(message: Message) -> None:
            if num_bytes <= most:  # otherwise the framework's response to our error is dropped
                await send(message)

        with contextlib.suppress(ApiError):
            await self._app(scope, counted, unless_refused)
        if num_bytes > most:
            await self._respond(self._refusal(most))(scope, receive, send)

    def _refusal(self, most: int) -> ApiError:
        return ApiError(413, f"the body exceeds {most} bytes; {self._remedy}")
