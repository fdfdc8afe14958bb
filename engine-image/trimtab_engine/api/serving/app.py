"""The HTTP application on --port: OpenAI's surface, probes and metrics, behind a body limit and an optional key."""

import contextlib
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trimtab_engine.api.openai.protocol import MAX_BODY_BYTES
from trimtab_engine.api.openai.routes import openai_router
from trimtab_engine.api.openai.streaming import ClientGone
from trimtab_engine.api.openai.tokenize_routes import tokenize_router
from trimtab_engine.api.serving.errors import (
    ApiError,
    on_api_error,
    on_engine_dead,
    on_http_error,
    on_internal_error,
    on_validation_error,
)
from trimtab_engine.api.serving.request_identity import ApiKeyGuard, RequestIds
from trimtab_engine.api.serving.state import ServerState
from trimtab_engine.errors import EngineDead

LOOK = ["GET", "HEAD"]  # load balancers, and aiperf before it measures, look with HEAD
CLIENT_CLOSED = 499  # nginx's number for it; nobody reads the answer


def build_app(state: ServerState) -> FastAPI:
    """The application. It answers probes from the first moment; generation waits for `state.serving`."""
    app = FastAPI(title="Trimtab engine", version=version("trimtab"), docs_url=None, redoc_url=None)
    add_error_handlers(app)
    app.include_router(_probes(state))
    app.include_router(openai_router(state))
    app.include_router(tokenize_router(state))
    app.add_middleware(ApiKeyGuard, keys=state.options.api_keys)
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES, remedy="send a shorter prompt")
    app.add_middleware(RequestIds)
    return app


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(EngineDead, on_engine_dead)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(Exception, on_internal_error)


async def _on_client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)


def _probes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.api_route("/livez", methods=LOOK)
    async def livez() -> Response:
        if state.core.is_alive:
            return PlainTextResponse("ok")
        return JSONResponse({"reason": state.not_ready_reason}, 503)

    @router.api_route("/readyz", methods=LOOK)
    async def readyz() -> Response:
        reason = state.not_ready_reason
        return PlainTextResponse("ok") if reason is None else JSONResponse({"reason": reason}, 503)

    @router.api_route("/startupz", methods=LOOK)
    async def startupz() -> Response:
        progress = state.core.progress
        ready = state.serving is not None and state.core.is_alive
        body = {"stage": progress.stage, "percent": round(progress.percent, 1)}
        return JSONResponse(body, 200 if ready else 503)

    @router.api_route("/health", methods=LOOK)
    async def health() -> Response:
        return Response(status_code=200 if state.not_ready_reason is None else 503)

    @router.api_route("/version", methods=LOOK)
    async def show_version() -> dict[str, Any]:
        return {"version": version("trimtab")}

    @router.api_route("/metrics", methods=LOOK)
    async def metrics() -> Response:
        return Response(await state.exporter.exposition(), media_type=CONTENT_TYPE_LATEST)

    @router.api_route("/load", methods=LOOK)
    async def load() -> dict[str, int]:
        return {"server_load": await state.exporter.server_load(state.num_http_requests)}

    @router.api_route("/ping", methods=[*LOOK, "POST"])
    async def ping() -> Response:
        return Response(status_code=200 if state.not_ready_reason is None else 503)

    return router


class BodyLimit:
    """Refuses bodies above a size before anything reads them: by Content-Length, and by counting what comes.

    `respond` makes the answer of an ApiError.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, remedy: str, respond: Callable[[ApiError], Response] = ApiError.response
    ) -> None:
        self._app, self._max, self._remedy, self._respond = app, max_bytes, remedy, respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if not announced.isdigit() or int(announced[:20]) > self._max:
            await self._respond(self._refusal())(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max:
                    raise self._refusal()
            return message

        async def unless_refused(message: Message) -> None:
            if num_bytes <= self._max:  # what the framework makes of our error is no answer
                await send(message)

        with contextlib.suppress(ApiError):
            await self._app(scope, counted, unless_refused)
        if num_bytes > self._max:
            await self._respond(self._refusal())(scope, receive, send)

    def _refusal(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max} bytes; {self._remedy}")
