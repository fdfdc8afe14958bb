"""The admin port: probes, metrics, demand for the operator, the state token, and drain."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import orjson
from aiohttp import web

MAX_WAIT_SECONDS = 300.0
MAX_BODY_BYTES = 64 << 10
MAX_TOKEN_CHARACTERS = 1024
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Fleet(Protocol):
    """All worker processes of this router together."""

    @property
    def is_ready(self) -> bool:
        """True if new requests should be sent here."""

    def demand(self) -> dict[str, Any]:
        """Return the demand, summed over the workers."""

    async def demand_changed(self) -> None:
        """Wait until holding begins or ends at a worker."""

    def set_token(self, token: str, former_token: str | None) -> None:
        """Give all workers the state token."""

    def begin_drain(self) -> None:
        """Begin to drain all workers."""

    async def metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format, summed over the workers."""


def build_admin_app(fleet: Fleet, token_sha256: str | None) -> web.Application:
    """Return the application of the admin port. Without a token hash `/admin/v1` requires no token: the caller must
    then bind to loopback.
    """
    expected = bytes.fromhex(token_sha256) if token_sha256 else None

    @web.middleware
    async def check_token(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith("/admin/") and expected is not None:
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
            if scheme.lower() != "bearer" or not hmac.compare_digest(digest, expected):
                return _error(401, "the admin token is missing or wrong; send 'Authorization: Bearer TOKEN'")
        return await handler(request)

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="ok") if fleet.is_ready else _error(503, "not ready: draining, or no replica is known")

    async def metrics(_: web.Request) -> web.Response:
        body = await fleet.metrics()
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def put_token(request: web.Request) -> web.Response:
        try:
            fields = orjson.loads(await request.read())
            token, former = fields["token"], fields.get("former_token")
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            return _error(400, 'the body must be {"token": "...", "former_token": "..." or null}')
        for value in (token, former or "-"):
            if not (isinstance(value, str) and value.isascii() and value.isprintable()):
                return _error(400, "token: must be visible ASCII characters")
            if not 0 < len(value) <= MAX_TOKEN_CHARACTERS:
                return _error(400, f"token: must have 1 to {MAX_TOKEN_CHARACTERS} characters")
        fleet.set_token(token, former)
        return web.Response(status=204)

    async def demand(request: web.Request) -> web.Response:
        try:
            since = int(request.query.get("since", "-1"))
            wait = min(float(request.query.get("wait", "0")), MAX_WAIT_SECONDS)
        except ValueError:
            return _error(400, "since must be a number, and wait a number of seconds")
        try:
            async with asyncio.timeout(max(wait, 0.0)):
                while fleet.demand()["sequence"] <= since:
                    await fleet.demand_changed()
        except TimeoutError:
            pass
        return _json(fleet.demand())

    async def drain(_: web.Request) -> web.Response:
        fleet.begin_drain()
        return _json({"draining": True}, 202)

    app = web.Application(middlewares=[check_token], client_max_size=MAX_BODY_BYTES)
    app.add_routes(
        [
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
            web.get("/metrics", metrics),
            web.put("/admin/v1/state-token", put_token),
            web.get("/admin/v1/demand", demand),
            web.post("/admin/v1/drain", drain),
        ]
    )
    return app


def _json(fields: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(fields), status=status, content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return _json({"error": message}, status)
