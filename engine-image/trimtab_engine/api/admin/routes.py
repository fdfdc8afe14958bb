"""Admin API on --admin-port (docs/reference/contract.md section 2): authentication, parsing, forwarding to the core."""

import hmac
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from trimtab_engine.api.admin.body import read_json
from trimtab_engine.api.admin.lifecycle import lifecycle_routes
from trimtab_engine.api.admin.profile import profile_routes
from trimtab_engine.api.admin.state_stream import state_stream_routes
from trimtab_engine.api.http.errors import ApiError, add_error_handlers, shorten
from trimtab_engine.api.http.local_guard import LocalGuard
from trimtab_engine.api.http.middleware import BodyLimit
from trimtab_engine.api.http.path_errors import PUBLIC_PORT
from trimtab_engine.api.http.request_identity import bearer_digest
from trimtab_engine.api.metrics.request_log import RequestLog
from trimtab_engine.api.openai.state import ServerState
from trimtab_engine.errors import EngineDead
from trimtab_engine.messages.admin import (
    AdminReply,
    Call,
    DrainCore,
    GetConfig,
    GetLayout,
    GetMemory,
    GetRequests,
    PatchConfig,
    PlanMemory,
)
from trimtab_engine.state_stream.hub import StateHub

MAX_ADMIN_BODY_BYTES = 64 << 10
MAX_DRAIN_SECONDS = 86_400.0
LOCAL_ADVICE = "call it from this machine as 127.0.0.1 or localhost, or set --admin-token-sha256"


Engine = Callable[[Call], Awaitable[AdminReply]]
"""Sends one admin call to the engine as a whole."""


def build_admin_app(state: ServerState, engine: Engine, log: RequestLog, hub: StateHub) -> FastAPI:
    """Return the admin application. With a token hash every call requires the token; without one the caller must bind
    to loopback. The state token opens the state stream only.
    """
    app = FastAPI(title="Trimtab engine admin", docs_url=None, redoc_url=None)
    add_error_handlers(app, PUBLIC_PORT, _flat)
    app.add_exception_handler(EngineDead, _on_engine_dead)
    authorized = [Depends(_authorized(state.options.admin_token_sha256))]
    app.include_router(_routes(state, engine, log), dependencies=authorized)
    app.include_router(profile_routes(state), dependencies=authorized)
    app.include_router(lifecycle_routes(state), dependencies=authorized)
    readers = [Depends(_authorized(state.options.admin_token_sha256, state.options.state_token_sha256))]
    app.include_router(state_stream_routes(hub), dependencies=readers)
    app.add_middleware(BodyLimit, max_bytes=lambda _: MAX_ADMIN_BODY_BYTES, remedy="send fewer fields", respond=_flat)
    if state.options.admin_token_sha256 is None:
        app.add_middleware(LocalGuard, remedy=LOCAL_ADVICE, respond=_flat)
    return app


def _routes(state: ServerState, engine: Engine, log: RequestLog) -> APIRouter:
    router = APIRouter(prefix="/admin/v1")

    async def forward(call: Call) -> Response:
        if state.core.ready is None:
            raise ApiError(503, state.not_ready_reason or "the engine is loading")
        reply = await engine(call)
        return JSONResponse(reply.body, reply.status)

    @router.get("/config")
    async def config() -> Response:
        return await forward(GetConfig())

    @router.patch("/config")
    async def patch_config(request: Request, dry_run: str = "0") -> Response:
        _check_query(request, {"dry_run"})
        values = await read_json(request)
        return await forward(PatchConfig(values, _if_match(request), _flag("dry_run", dry_run)))

    @router.get("/memory")
    async def memory() -> Response:
        return await forward(GetMemory())

    @router.post("/memory/plan")
    async def memory_plan(request: Request) -> Response:
        return await forward(PlanMemory(await read_json(request)))

    @router.get("/layout")
    async def layout() -> Response:
        return await forward(GetLayout())

    @router.get("/requests")
    async def requests(request: Request, after: str = "0") -> Response:
        """Return lengths and times of requests finished after a number, and of waiting and running requests."""
        _check_query(request, {"after"})
        number = _number("after", after)
        if state.core.ready is None:
            raise ApiError(503, state.not_ready_reason or "the engine is loading")
        reply = await engine(GetRequests())
        return JSONResponse(log.since(number, time.monotonic()) | reply.body, reply.status)

    @router.post("/drain")
    async def drain(request: Request) -> Response:
        seconds = _deadline(await read_json(request))
        state.begin_drain()
        return await forward(DrainCore(seconds))

    return router


def _authorized(*token_sha256: str | None) -> Any:
    """Return a check that the bearer token has one of these hashes; without any hash every caller passes."""
    expected = [bytes.fromhex(each) for each in token_sha256 if each]

    async def check(request: Request) -> None:
        if not expected:
            return
        digest = bearer_digest(request.headers.get("authorization", "").encode("latin-1"))
        if digest is None or not sum(hmac.compare_digest(digest, known) for known in expected):
            raise ApiError(401, "the admin token is missing or wrong; send 'Authorization: Bearer TOKEN'")

    return check


def _if_match(request: Request) -> int | None:
    header = request.headers.get("if-match")
    if header is None or header.strip() == "*":
        return None
    text = header.strip().removeprefix("W/").strip('"')
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise ApiError(400, f"If-Match is {header[:50]!r}; must be a generation such as 3")
    return int(text)


def _check_query(request: Request, known: set[str]) -> None:
    """Reject unknown query parameters; a misspelt dry_run must not change anything."""
    unknown = sorted(request.query_params.keys() - known)
    if unknown:
        shown = shorten(unknown[0])
        raise ApiError(400, f"unknown query parameter {shown!r}; allowed: {', '.join(sorted(known))}")


def _flag(name: str, text: str) -> bool:
    if text.lower() in ("1", "true"):
        return True
    if text.lower() in ("", "0", "false"):
        return False
    raise ApiError(400, f"{name} is {text[:50]!r}; must be 1 or 0")


def _number(name: str, text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 19:
        return int(text)
    raise ApiError(400, f"{name} is {text[:50]!r}; must be a number such as `next` of the last response")


def _deadline(body: Any) -> float:
    seconds = body.get("deadline_seconds") if isinstance(body, dict) else None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_DRAIN_SECONDS:
        raise ApiError(400, f'send {{"deadline_seconds": S}}, S between 0 and {MAX_DRAIN_SECONDS:.0f}')
    return float(seconds)


def _flat(error: ApiError) -> Response:
    """Return a flat error body, {"message"}, like the admin API's 412 and 422."""
    return JSONResponse({"message": error.message}, error.status)


async def _on_engine_dead(_: Request, error: Exception) -> Response:
    return JSONResponse({"message": f"the engine has failed: {error}"}, 503)
