"""Pause, sleep and cache resets on the admin port: under /admin/v1, and under vLLM's paths and query parameters.

They are never on the public port: API clients must not be able to stop the engine.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, get_args

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from trimtab_engine.api.admin.body import read_json
from trimtab_engine.api.http.errors import ApiError, shorten
from trimtab_engine.api.openai.state import ServerState
from trimtab_engine.messages.admin import (
    SLEEP_LEVELS,
    WAKE_TAGS,
    AdminReply,
    Call,
    GetLifecycle,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Resume,
    Sleep,
    WakeUp,
)

SETTLE_POLL_SECONDS = 0.05  # poll interval while waiting for running requests to finish
FLAGS = {"true": True, "1": True, "false": False, "0": False}

Route = Callable[[Request], Coroutine[Any, Any, Response]]


def lifecycle_routes(state: ServerState) -> APIRouter:
    """Return the routes. They respond once the engine has changed state; with mode wait, after running requests have
    finished.
    """
    router = APIRouter()

    async def pause(request: Request) -> Response:
        parameters = await _read_parameters(request, {"mode"})
        return await _respond_when_settled(state, Pause(_mode(parameters)), "is_paused")

    async def resume(request: Request) -> Response:
        await _read_parameters(request, set())
        return _response(await _call(state, Resume()))

    async def sleep(request: Request) -> Response:
        parameters = await _read_parameters(request, {"level", "mode"})
        return await _respond_when_settled(state, Sleep(_level(parameters), _mode(parameters)), "is_sleeping")

    async def wake_up(request: Request) -> Response:
        parameters = await _read_parameters(request, {"tags"})
        return _response(await _call(state, WakeUp(_tags(parameters))))

    async def reset_prefix_cache(request: Request) -> Response:
        parameters = await _read_parameters(request, {"reset_running_requests"})
        return _response(await _call(state, _reset(parameters)))

    async def reset_mm_cache(request: Request) -> Response:
        await _read_parameters(request, set())
        if state.core.ready is None:
            raise ApiError(503, state.not_ready_reason or "the engine is loading")
        state.on_drop_media_cache()
        return JSONResponse({"reset": True})

    async def show(request: Request) -> Response:
        return _response(await _call(state, GetLifecycle()))

    posts: dict[str, Route] = {
        "pause": pause,
        "resume": resume,
        "sleep": sleep,
        "wake_up": wake_up,
        "reset_prefix_cache": reset_prefix_cache,
        "reset_mm_cache": reset_mm_cache,
    }
    for prefix in ("/admin/v1", ""):
        for name, route in posts.items():
            router.add_api_route(f"{prefix}/{name}", route, methods=["POST"])
        for name in ("is_paused", "is_sleeping"):
            router.add_api_route(f"{prefix}/{name}", show, methods=["GET"])
    return router


# --- request parsing ------------------------------------------------------------------------------------------------


async def _read_parameters(request: Request, known: set[str]) -> dict[str, Any]:
    """Return the JSON body, or the query parameters if there is no body. Unknown names are 400."""
    body = await read_json(request) if await request.body() else {}
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    query = {name: request.query_params.getlist(name) for name in request.query_params}
    parameters = {**{name: values if name == "tags" else values[-1] for name, values in query.items()}, **body}
    unknown = sorted(set(parameters) - known)
    if unknown:
        what = f"; allowed: {', '.join(sorted(known))}" if known else "; this call has no parameters"
        raise ApiError(400, f"unknown parameter {shorten(unknown[0])}{what}")
    return parameters


def _mode(parameters: dict[str, Any]) -> PauseMode:
    modes: tuple[PauseMode, ...] = get_args(PauseMode)
    mode = parameters.get("mode", "abort")
    for known in modes:
        if mode == known:
            return known
    raise ApiError(400, f"mode is {shorten(str(mode))}; must be {', '.join(modes[:-1])} or {modes[-1]}")


def _level(parameters: dict[str, Any]) -> int:
    level = parameters.get("level", 1)
    for known in SLEEP_LEVELS:
        if level == str(known) or (level == known and not isinstance(level, bool)):
            return known
    raise ApiError(400, f"level is {shorten(str(level))}; must be 0, 1 or 2")


def _tags(parameters: dict[str, Any]) -> list[str]:
    """Return the tags to wake; default all."""
    tags = parameters.get("tags") or list(WAKE_TAGS)
    unknown = [tag for tag in tags if tag not in WAKE_TAGS] if isinstance(tags, list) else [tags]
    if unknown:
        raise ApiError(400, f"tags: unknown tag {shorten(str(unknown[0]))}; must be a list of {', '.join(WAKE_TAGS)}")
    return [str(tag) for tag in tags]


def _reset(parameters: dict[str, Any]) -> ResetPrefixCache:
    value = parameters.get("reset_running_requests", False)
    flag = value if isinstance(value, bool) else FLAGS.get(str(value).lower())
    if flag is None:
        raise ApiError(400, f"reset_running_requests is {shorten(str(value))}; must be true or false")
    return ResetPrefixCache(flag)


# --- responses -----------------------------------------------------------------------------------------------------


async def _respond_when_settled(state: ServerState, call: Call, until: str) -> Response:
    """Respond once the state `until` is reached, or another call has resumed or woken the engine."""
    reply = await _call(state, call)
    while reply.status == 200 and not reply.body[until] and reply.body["pause_mode"] is not None:
        await asyncio.sleep(SETTLE_POLL_SECONDS)
        reply = await _call(state, GetLifecycle())
    return _response(reply)


async def _call(state: ServerState, call: Call) -> AdminReply:
    if state.core.ready is None:
        raise ApiError(503, state.not_ready_reason or "the engine is loading")
    return await state.core.call(call)


def _response(reply: AdminReply) -> Response:
    return JSONResponse(reply.body, reply.status)
