"""GET /admin/v1/state: the state stream for one router (docs/reference/contract.md section 8)."""

import re

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from trimtab_engine.api.http.errors import ApiError, shorten
from trimtab_engine.state_stream.hub import StateHub

ROUTER_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MEDIA_TYPE = "application/vnd.trimtab.state-stream"
RETRY_SECONDS = 2


def state_stream_routes(hub: StateHub) -> APIRouter:
    """Return the route."""
    router = APIRouter(prefix="/admin/v1")

    @router.get("/state")
    async def state(request: Request) -> Response:
        name = request.query_params.get("router", "")
        if ROUTER_ID.fullmatch(name) is None:
            raise ApiError(400, f"router: invalid ID ({shorten(name)}); send 1 to 64 letters, digits, '-', '_' or '.'")
        if hub.is_loading:
            raise ApiError(503, "the engine is loading", retry_after=RETRY_SECONDS)
        if not hub.has_room:
            raise ApiError(503, "too many routers listen to the state stream", retry_after=RETRY_SECONDS)
        return StreamingResponse(hub.stream(name), media_type=MEDIA_TYPE, headers={"Cache-Control": "no-store"})

    return router
