"""HTTP server of the board: a page and its JSON, read-only, on the loopback address.

Access is controlled by the API server: `trimtab board` forwards a port to the pod, which needs the permission
`pods/portforward`. Web pages cannot read the board from a browser that has a forwarded port: requests need a loopback
host name (DNS rebinding), responses permit no other origin, and the page may load nothing from elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from trimtab_operator.board.recorder import Record, Recorder
from trimtab_operator.board.timeline import FINE_STEP_SECONDS, Series
from trimtab_operator.tuner.explanation import GUIDE, describe_expectation
from trimtab_operator.tuner.moves import Decision
from trimtab_operator.tuner.stored import decision_to_json

logger = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
PAGE_FILES = {"/": ("index.html", "text/html"), "/board.css": ("board.css", "text/css")}
PAGE_FILES |= {"/board.js": ("board.js", "text/javascript")}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
NUM_TREND_SLOTS = 900 // FINE_STEP_SECONDS  # of the list: the last 15 minutes
TREND_SERIES = (Series.REQUESTS_PER_SECOND, Series.TTFT, Series.TTFT_OBJECTIVE, Series.ITL, Series.ITL_OBJECTIVE)


async def serve_board(port: int, recorder: Recorder, clock: Callable[[], float]) -> web.AppRunner | None:
    """Serve the board on the loopback address. Return None if the port is in use: the operator works without it.

    `clock` returns Unix seconds.
    """
    runner = web.AppRunner(build_application(recorder, clock), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, ADDRESS, port).start()
    except OSError as error:
        logger.warning("--board-port: the board is not served", extra={"port": port, "error": str(error)})
        await runner.cleanup()
        return None
    return runner


def build_application(recorder: Recorder, clock: Callable[[], float]) -> web.Application:
    """Return the application with the page and `/api`."""

    async def deployments(_: web.Request) -> web.Response:
        return web.json_response(list_deployments(recorder, clock()))

    async def deployment(request: web.Request) -> web.Response:
        key = request.match_info["namespace"], request.match_info["name"]
        record = recorder.read(key)
        if record is None:
            raise web.HTTPNotFound(text="no such deployment")
        is_day = request.query.get("range") == "day"
        return web.json_response({**_names(key), **describe(record, clock(), is_day=is_day)})

    application = web.Application(middlewares=[_protect])
    for path, (name, content_type) in PAGE_FILES.items():
        application.router.add_get(path, _file_handler(name, content_type))
    application.router.add_get("/api/deployments", deployments)
    application.router.add_get("/api/deployments/{namespace}/{name}", deployment)
    return application


def list_deployments(recorder: Recorder, now: float) -> dict[str, Any]:
    """Return the body of `/api/deployments`: present state and the latest minutes of each deployment."""
    return {
        "now": now,
        "reconciles_without_room": recorder.num_without_room,
        "deployments": [
            {**_names(key), **_summary(record), **_trend(record, now)} for key, record in recorder.records()
        ],
    }


def describe(record: Record, now: float, *, is_day: bool) -> dict[str, Any]:
    """Return the body of `/api/deployments/NAMESPACE/NAME`: timeline and decisions, newest first."""
    buffer = record.timeline.coarse if is_day else record.timeline.fine
    times, series = buffer.read(now)
    recommendation = record.recommendation
    return {
        **_summary(record),
        "now": now,
        "since": record.timeline.since,
        "step_seconds": buffer.step,
        "times": times,
        "series": series,
        "objectives": ((record.status.get("tuning") or {}).get("objectives")),
        "decisions": [_decision(decision) for decision in reversed(list(record.decisions.values()))],
        "recommendation": None if recommendation is None else _decision(recommendation),
    }


def _names(key: tuple[str, str]) -> dict[str, str]:
    return {"namespace": key[0], "name": key[1]}


def _summary(record: Record) -> dict[str, Any]:
    status = record.status
    return {
        "at": record.timeline.at,
        "phase": status.get("phase"),
        "ready": status.get("ready"),
        "model": status.get("model"),
        "mode": record.mode,
        "problem": _problem(status),
        "attained": record.attained,
    }


def _trend(record: Record, now: float) -> dict[str, Any]:
    _, series = record.timeline.fine.read(now)
    return {"trend": {name: series[name][-NUM_TREND_SLOTS:] for name in TREND_SERIES if name in series}}


def _problem(status: Mapping[str, Any]) -> str | None:
    """Return the message of the condition Degraded, or of a Ready condition that is not True."""
    conditions = {condition["type"]: condition for condition in status.get("conditions") or []}
    for kind, good in (("Degraded", "False"), ("Ready", "True")):
        condition = conditions.get(kind)
        if condition is not None and condition["status"] != good:
            return str(condition.get("message") or condition.get("reason"))
    return None


def _decision(decision: Decision) -> dict[str, Any]:
    shown = {name: value for name, value in decision_to_json(decision).items() if name not in ("evidence", "expected")}
    return {
        **shown,
        "predictions": [describe_expectation(entry) for entry in decision.move.expected],
        "guideline": GUIDE.get(decision.move.reason),
    }


def _file_handler(name: str, content_type: str) -> Handler:
    body = (resources.files("trimtab_operator.board") / "page" / name).read_bytes()

    async def handle(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type=content_type, charset="utf-8")

    return handle


@web.middleware
async def _protect(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Reject other host names than the loopback ones, and add the security headers to each response."""
    response: web.StreamResponse
    if request.host.rpartition(":")[0] not in LOCAL_NAMES and request.host not in LOCAL_NAMES:
        response = web.Response(status=403, text="host: only localhost is served; use `trimtab board`")
    else:
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = web.Response(status=error.status, text=error.text)
    response.headers.update(HEADERS)
    return response
