"""Middleware that returns 503 with Retry-After while the engine loads, before any other validation."""

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from trimtab_engine.api.http.errors import ApiError

GATED_PATHS = ("/v1/", "/tokenize", "/detokenize")


class LoadingGate:
    """`not_loaded` returns the reason, or None once requests can be served."""

    def __init__(self, app: ASGIApp, not_loaded: Callable[[], str | None], retry_seconds: int) -> None:
        self._app, self._not_loaded, self._retry_seconds = app, not_loaded, retry_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(GATED_PATHS):
            reason = self._not_loaded()
            if reason is not None:
                await ApiError(503, reason, retry_after=self._retry_seconds).response()(scope, receive, send)
                return
        await self._app(scope, receive, send)
