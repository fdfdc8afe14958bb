"""Who asks, and under which id: X-Request-Id taken from the client or made, API keys checked in constant time.

Both are written into the ASGI scope's state, where the routes find them.
"""

import hashlib
import hmac
import re
import uuid

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trimtab_engine.api.http.errors import ApiError

REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")  # what a client's id may be; another is replaced, as it goes into logs
SALT_CHARACTERS = 16  # 64 bits of the key's digest keep keys apart and say nothing about them


class RequestIds:
    """Gives each request on /v1/* an id, the client's where it sent one, and answers with it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        state = scope.setdefault("state", {})
        state["has_own_id"] = REQUEST_ID.fullmatch(given) is not None
        state["request_id"] = given.decode() if state["has_own_id"] else uuid.uuid4().hex

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = state["request_id"]
            await send(message)

        await self._app(scope, receive, with_id)


class ApiKeyGuard:
    """Asks for one of the keys on every path but the open ones, compared in constant time. Without keys everything
    passes."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], open_paths: frozenset[str]) -> None:
        self._app, self._open_paths = app, open_paths
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and scope["path"] not in self._open_paths:
            digest = bearer_digest(dict(scope["headers"]).get(b"authorization", b""))
            if digest is None or not sum(hmac.compare_digest(digest, known) for known in self._digests):
                error = ApiError(401, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'")
                await error.response()(scope, receive, send)
                return
            if len(self._digests) > 1:
                scope.setdefault("state", {})["key_salt"] = digest.hex()[:SALT_CHARACTERS] + ":"
        await self._app(scope, receive, send)


def bearer_digest(header: bytes) -> bytes | None:
    """SHA-256 of the token of an Authorization header; None when there is none."""
    scheme, _, token = header.partition(b" ")
    return hashlib.sha256(token.strip()).digest() if scheme.lower() == b"bearer" and token.strip() else None


def request_id_of(request: Request, in_body: str | None = None) -> str:
    """The request's id. One in its body counts where the head has none."""
    if in_body is not None and not request.state.has_own_id:
        request.state.request_id = in_body
    request_id: str = request.state.request_id
    return request_id


def key_salt(request: Request) -> str:
    """What keeps the cached prefixes of several API keys apart: nobody can tell by time what another has asked."""
    salt: str = getattr(request.state, "key_salt", "")
    return salt
