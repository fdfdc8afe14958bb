"""POST /start_profile and /stop_profile (vLLM's names) on the admin port. Profiles write files and slow the engine
down.
"""

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from trimtab_engine.api.http.errors import ApiError
from trimtab_engine.api.openai.state import ServerState
from trimtab_engine.messages.admin import ProfileCall, StartProfile, StopProfile


def profile_routes(state: ServerState) -> APIRouter:
    """Return the routes. The core responds between two steps; 400 if --profiler-dir is not set."""
    router = APIRouter()

    @router.post("/start_profile")
    async def start_profile() -> Response:
        return await _call(state, StartProfile())

    @router.post("/stop_profile")
    async def stop_profile() -> Response:
        return await _call(state, StopProfile())

    return router


async def _call(state: ServerState, call: ProfileCall) -> Response:
    if state.core.ready is None:
        raise ApiError(503, state.not_ready_reason or "the engine is loading")
    reply = await state.core.call(call)
    return JSONResponse(reply.body, reply.status)
