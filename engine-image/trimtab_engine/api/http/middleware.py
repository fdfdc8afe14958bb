"""ASGI middleware: body size limit, connection close during termination, arrival count, and 503 while loading."""

import contextlib
from collections.abc import Callable

from fastapi import Response
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trimtab_engine.api.http.errors import ApiError


class BodyLimit:
    """Middleware that rejects bodies above a size before they are read: by Content-Length, and by counting received
    bytes.

    `max_bytes` is called with the scope of each request; `respond` builds the response of an ApiError.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: Callable[[Scope], int],
        remedy: str,
        respond: Callable[[ApiError], Response] = ApiError.response,
    ) -> None:
        self._app, self._max_bytes, self._remedy, self._respond = app, max_bytes, remedy, respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = self._max_bytes(scope)
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if not announced.isdigit() or int(announced[:20]) > most:
            await self._respond(self._too_large_error(most))(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > most:
                    raise self._too_large_error(most)
            return message

        async def unless_refused(message: Message) -> None:
            if num_bytes <= most:  # otherwise the framework's response to our error is dropped
                await send(message)

        with contextlib.suppress(ApiError):
            await self._app(scope, counted, unless_refused)
        if num_bytes > most:
            await self._respond(self._too_large_error(most))(scope, receive, send)

    def _too_large_error(self, most: int) -> ApiError:
        return ApiError(413, f"the body exceeds {most} bytes; {self._remedy}")


class CloseWhileEnding:
    """Adds `Connection: close` to responses of a terminating engine: removing a pod from the endpoints only redirects
    new connections, so clients with open ones must reconnect. `is_ending` is called at the start of a response, so that
    requests in progress are included.
    """

    def __init__(self, app: ASGIApp, is_ending: Callable[[], bool]) -> None:
        self._app, self._is_ending = app, is_ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start" and self._is_ending():
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, receive, closing if scope["type"] == "http" else send)


class CountArrivals:
    """Calls `on_arrival` for each request, so that the engine exits when traffic has stopped; except at `uncounted`
    paths, whose clients (monitoring) never stop.
    """

    def __init__(self, app: ASGIApp, on_arrival: Callable[[], None], uncounted: frozenset[str]) -> None:
        self._app, self._on_arrival, self._uncounted = app, on_arrival, uncounted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._uncounted:
            self._on_arrival()
        await self._app(scope, receive, send)


GATED_PATHS = ("/v1/", "/v2/", "/score", "/rerank", "/tokenize", "/detokenize")


class LoadingGate:
    """Returns 503 with Retry-After while the engine loads, before any other validation.

    `not_loaded` returns the reason, or None once requests can be served.
    """

    def __init__(self, app: ASGIApp, not_loaded: Callable[[], str | None], retry_seconds: int) -> None:
        self._app, self._not_loaded, self._retry_seconds = app, not_loaded, retry_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(GATED_PATHS):
            reason = self._not_loaded()
            if reason is not None:
                await ApiError(503, reason, retry_after=self._retry_seconds).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
