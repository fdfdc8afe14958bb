"""Guard of a port that has no token and listens on loopback only: it answers programs of this machine, and no web page
that a browser on it shows. A page can send requests to loopback, and by DNS rebinding even under a name of its own.
"""

import ipaddress
from collections.abc import Callable

from fastapi import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from trimtab_engine.api.http.errors import ApiError, shorten

BROWSER_HEADERS = (b"origin", b"sec-fetch-site")
"""Headers that browsers add to the requests of pages, and that pages cannot remove."""
LOCAL_NAME = "localhost"


class LocalGuard:
    """Middleware that rejects requests of web pages, and requests for other hosts than loopback, with 403."""

    def __init__(self, app: ASGIApp, remedy: str, respond: Callable[[ApiError], Response]) -> None:
        self._app, self._remedy, self._respond = app, remedy, respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (problem := _problem(dict(scope["headers"]))) is not None:
            await self._respond(ApiError(403, f"{problem}; {self._remedy}"))(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _problem(headers: dict[bytes, bytes]) -> str | None:
    """Return why a request with these headers may not come from a program of this machine, or None."""
    for name in BROWSER_HEADERS:
        if name in headers:
            return f"{name.decode().title()}: this port does not answer web pages"
    host = headers.get(b"host", b"").decode("latin-1")
    if host and not _is_loopback(host):
        return f"Host: {shorten(host)} is not this machine's loopback address"
    return None


def _is_loopback(host: str) -> bool:
    """Return True for localhost and loopback addresses, with or without a port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.rstrip(".").lower() == LOCAL_NAME:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
