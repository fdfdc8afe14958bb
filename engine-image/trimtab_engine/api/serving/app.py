"""HTTP application on --port: OpenAI API, probes and metrics, with a body limit and optional API keys."""

from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Scope

from trimtab_engine.api.anthropic.routes import anthropic_router
from trimtab_engine.api.batches.routes import batch_router
from trimtab_engine.api.batches.runner import BatchRunner
from trimtab_engine.api.http.connections import ConnectionLimits
from trimtab_engine.api.http.dispatches import AcknowledgeDispatches
from trimtab_engine.api.http.errors import add_error_handlers
from trimtab_engine.api.http.get_and_head import get_and_head
from trimtab_engine.api.http.json_cost import MAX_COST, JsonCostLimit
from trimtab_engine.api.http.middleware import BodyLimit, CloseWhileEnding, CountArrivals, LoadingGate
from trimtab_engine.api.http.path_errors import ADMIN_PORT
from trimtab_engine.api.http.request_identity import ApiKeyGuard, RequestIds
from trimtab_engine.api.http.uploads import MAX_FILE_BYTES, is_upload
from trimtab_engine.api.openai.adapter_routes import adapter_router
from trimtab_engine.api.openai.embedding_routes import embedding_router
from trimtab_engine.api.openai.protocol import MAX_BODY_BYTES, MAX_MEDIA_BODY_BYTES
from trimtab_engine.api.openai.render_routes import render_router
from trimtab_engine.api.openai.routes import openai_router
from trimtab_engine.api.openai.score_routes import score_router
from trimtab_engine.api.openai.state import RETRY_SECONDS, ServerOptions, ServerState
from trimtab_engine.api.openai.tokenize_routes import tokenize_router
from trimtab_engine.api.openai.unsupported_routes import unsupported_router
from trimtab_engine.api.responses.routes import responses_router
from trimtab_engine.ipc.open_files import raise_open_file_limit

PROBES = frozenset({"/livez", "/readyz", "/startupz", "/health", "/ping"})
RESERVED_FILES = 256
MAX_UNFINISHED_BODIES = 4  # of the largest size, held in memory while they are received
METRICS = frozenset({"/metrics", "/load"})


def build_app(state: ServerState, batches: BatchRunner | None = None) -> FastAPI:
    """Return the application. Probes work immediately; generation requires `state.serving`."""
    app = _app_without_routes()
    app.include_router(
        openai_router(state)
    )  # first, because routes are matched in order and these are the most frequent
    app.include_router(embedding_router(state))
    app.include_router(anthropic_router(state))
    app.include_router(responses_router(state))
    app.include_router(score_router(state))
    if batches is not None:
        app.include_router(batch_router(batches))
    app.include_router(_probes(state))
    app.include_router(render_router(state))
    app.include_router(tokenize_router(state))
    app.include_router(adapter_router(state))
    app.include_router(unsupported_router())
    app.add_middleware(JsonCostLimit, max_cost=lambda: _max_json_cost(state))
    app.add_middleware(LoadingGate, not_loaded=state.loading_reason, retry_seconds=RETRY_SECONDS)
    app.add_middleware(ApiKeyGuard, keys=state.options.api_keys, open_paths=_open_paths(state.options))
    app.add_middleware(BodyLimit, max_bytes=partial(_max_request_bytes, state), remedy="send a shorter prompt or file")
    app.add_middleware(RequestIds)
    if state.options.allowed_origins:  # outside of the key check: browsers send preflights without credentials
        app.add_middleware(
            CORSMiddleware,
            allow_origins=state.options.allowed_origins,
            allow_methods=state.options.allowed_methods,
            allow_headers=state.options.allowed_headers,
            allow_credentials=state.options.allow_credentials,
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(CloseWhileEnding, is_ending=lambda: state.is_ending)
    app.add_middleware(CountArrivals, on_arrival=state.count_request, uncounted=PROBES | METRICS)
    app.add_middleware(AcknowledgeDispatches, note=state.core.note_dispatch)
    return app


def open_batches(state: ServerState) -> BatchRunner | None:
    """Return the batches of --batch-dir, or None without it. Their requests have an application of their own, without
    the middleware of connections.

    Raises:
        ConfigError: The directory cannot be used.
    """
    if state.options.batch_dir is None:
        return None
    app = _app_without_routes()
    app.include_router(openai_router(state))
    app.include_router(embedding_router(state))
    app.add_middleware(JsonCostLimit, max_cost=lambda: _max_json_cost(state))
    return BatchRunner(state, Path(state.options.batch_dir), app)


def _app_without_routes() -> FastAPI:
    app = FastAPI(title="Trimtab engine", version=version("trimtab"), docs_url=None, redoc_url=None)
    add_error_handlers(app, ADMIN_PORT)
    return app


def connection_limits(state: ServerState) -> ConnectionLimits:
    """Return the limits of the public port. Files, other sockets and the admin port need descriptors, too."""
    max_connections = max(raise_open_file_limit() - RESERVED_FILES, 1)
    return ConnectionLimits(max_connections, lambda: MAX_UNFINISHED_BODIES * _max_body_bytes(state))


def _max_request_bytes(state: ServerState, scope: Scope) -> int:
    return MAX_FILE_BYTES if state.options.batch_dir is not None and is_upload(scope) else _max_body_bytes(state)


def _max_body_bytes(state: ServerState) -> int:
    """Return the body limit, which is larger for vision models."""
    takes_images = state.serving is not None and state.serving.media is not None
    return MAX_MEDIA_BODY_BYTES if takes_images else MAX_BODY_BYTES


def _max_json_cost(state: ServerState) -> int:
    """Return the cost limit of a body, in which at least one prompt of token IDs of the maximum length fits."""
    longest = 0 if state.serving is None else state.serving.facts.max_model_len
    return max(MAX_COST, longest + longest // 4)


def _open_paths(options: ServerOptions) -> frozenset[str]:
    """Return the paths without API key: probes and, unless configured otherwise, metrics."""
    return PROBES if options.api_key_for_metrics else PROBES | METRICS


def _probes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @get_and_head(router, "/livez")
    async def livez() -> Response:
        silence = state.core.silence
        if state.core.is_alive and not (silence is not None and silence.is_long):
            return PlainTextResponse("ok")
        return JSONResponse({"reason": state.not_ready_reason}, 503)

    @get_and_head(router, "/readyz")
    async def readyz() -> Response:
        reason = state.not_ready_reason
        return PlainTextResponse("ok") if reason is None else JSONResponse({"reason": reason}, 503)

    @get_and_head(router, "/startupz")
    async def startupz() -> Response:
        progress = state.core.progress
        ready = state.serving is not None and state.core.is_alive
        body: dict[str, Any] = {"stage": progress.stage, "percent": round(progress.percent, 1)}
        downloaded = state.options.downloaded
        if downloaded is not None:
            body |= {"message": downloaded.sentence, "downloaded_bytes": downloaded.num_bytes}
        return JSONResponse(body, 200 if ready else 503)

    @get_and_head(router, "/health")
    async def health() -> Response:
        return Response(status_code=200 if state.not_ready_reason is None else 503)

    @get_and_head(router, "/version")
    async def show_version() -> dict[str, Any]:
        return {"version": version("trimtab")}

    @get_and_head(router, "/metrics")
    async def metrics() -> Response:
        return Response(await state.exporter.exposition(), media_type=CONTENT_TYPE_LATEST)

    @get_and_head(router, "/load")
    async def load() -> dict[str, int]:
        return {"server_load": await state.exporter.server_load(state.num_http_requests)}

    @get_and_head(router, "/ping")
    @router.post("/ping")
    async def ping() -> Response:
        return Response(status_code=200 if state.not_ready_reason is None else 503)

    return router
