"""Identity of requests: X-Request-Id from the client or generated, API keys compared in constant time.

Both are stored in the ASGI scope's state for the routes.
"""

import hashlib
import hmac
import re
import uuid
from collections.abc import Mapping

from fastapi import Request
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trimtab_engine.api.http.errors import ApiError

REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")  # valid client IDs; others are replaced, because they are logged
MODEL_PATHS = ("/v1/", "/v2/", "/score", "/rerank")
SALT_CHARACTERS = 16  # 64 bits of the key's digest separate keys and reveal nothing about them


class RequestIds:
    """Middleware that gives each model request an ID, the client's if valid, and returns it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(MODEL_PATHS):
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
    """Middleware that requires one of the keys on every path except the open ones. Without keys all requests pass."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], open_paths: frozenset[str]) -> None:
        self._app, self._open_paths = app, open_paths
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and scope["path"] not in self._open_paths:
            digest = key_digest(dict(scope["headers"]))
            if digest is None or not sum(hmac.compare_digest(digest, known) for known in self._digests):
                error = ApiError(
                    401, "the API key is missing or wrong; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
                )
                await error.response()(scope, receive, send)
                return
            if len(self._digests) > 1:
                scope.setdefault("state", {})["key_salt"] = digest.hex()[:SALT_CHARACTERS] + ":"
        await self._app(scope, receive, send)


def key_digest(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the SHA-256 of the API key in the headers, or None. Clients of Anthropic's API send x-api-key."""
    digest = bearer_digest(headers.get(b"authorization", b""))
    key = headers.get(b"x-api-key", b"").strip()
    return hashlib.sha256(key).digest() if digest is None and key else digest


def bearer_digest(header: bytes) -> bytes | None:
    """Return the SHA-256 of the bearer token in an Authorization header, or None."""
    scheme, _, token = header.partition(b" ")
    return hashlib.sha256(token.strip()).digest() if scheme.lower() == b"bearer" and token.strip() else None


def request_id_of(request: Request, in_body: str | None = None) -> str:
    """Return the request's ID. The header takes precedence over the body's."""
    if in_body is not None and not request.state.has_own_id:
        request.state.request_id = in_body
    request_id: str = request.state.request_id
    return request_id


def key_salt(request: Request) -> str:
    """Return a cache salt that separates the cached prefixes of API keys, so that clients cannot infer other prompts
    from timing.
    """
    salt: str = getattr(request.state, "key_salt", "")
    return salt
