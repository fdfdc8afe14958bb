"""Errors in OpenAI's format, {"error": {"message", "type", "param", "code"}}, so that clients raise the matching
exceptions.
"""

import re
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from trimtab_engine.api.http.path_errors import OtherPort, unknown_path_message, unsupported_method_message
from trimtab_engine.errors import EngineDead

Model = TypeVar("Model")
TYPE_NAME = re.compile(r"^(str|int|float|bool|none|dict|list)$|[\[\]()-]")
NOT_AN_OBJECT = ("model_attributes_type", "model_type", "dict_type")
"""Pydantic's error types for a value that should be an object."""
JSON = "application/json"
CLIENT_CLOSED_REQUEST = 499  # nginx's status for it; the client never reads the response
MAX_ECHO_CHARACTERS = 200  # of a client's own input in an error message


class ApiError(Exception):
    """Ends one HTTP request with a status and OpenAI's error body. `retry_after` is in seconds."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 0
    ) -> None:
        message = message.encode("utf-8", "replace").decode()  # the message may quote invalid text of the client
        param = param and param.encode("utf-8", "replace").decode()
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 500: "internal_error", 503: "service_unavailable"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code or self.status}}

    def response(self) -> JSONResponse:
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after else None
        return JSONResponse(self.body, self.status, headers)


Respond = Callable[[ApiError], Response]


class ClientDisconnected(Exception):
    """The client closed the connection."""


def invalid(message: str, param: str | None = None) -> ApiError:
    """Return a 400 error."""
    return ApiError(400, message, param=param)


class WrongField(ValueError):
    """A check of several fields has failed. `field` is the one to change, because pydantic only knows the object."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def add_error_handlers(app: FastAPI, other: OtherPort, respond: Respond = ApiError.response) -> None:
    """Add the handlers. `other` is the server's other port, which may have the requested path; `respond` builds error
    responses, by default in OpenAI's format.
    """

    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return respond(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return respond(_http_error(request, error, other))

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(EngineDead, _on_engine_dead)
    app.add_exception_handler(ClientDisconnected, _on_client_disconnected)
    app.add_exception_handler(Exception, _on_internal_error)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    """Return pydantic's errors as one sentence that names the first field."""
    assert isinstance(error, RequestValidationError)
    sent_as = request.headers.get("content-type", JSON)
    return validation_error(error.errors(), error.body, sent_as).response()


def validated(build: Callable[[], Model]) -> Model:
    """Return what `build` returns, and raise pydantic's errors as a 400."""
    try:
        return build()
    except ValidationError as error:
        raise validation_error(error.errors()) from None


def validation_error(findings: Any, body: Any = None, sent_as: str = JSON) -> ApiError:
    """Return the first of pydantic's errors as a 400. `body` is the parsed body, or its text if it is not JSON;
    `sent_as` is its Content-Type.
    """
    first = findings[0]
    field, message = _first_error(findings)
    if first["type"] == "json_invalid":
        reason = str(first.get("ctx", {}).get("error", message))
        return invalid(f"the body is not valid JSON: {reason}{_where(first['loc'], body)}")
    if first["loc"] in (("body",), ()) and first["type"] in ("missing", *NOT_AN_OBJECT):
        received = "" if JSON in sent_as.lower() else f"; received {shorten(sent_as)}"
        return invalid(f"the body must be a JSON object, sent with Content-Type: {JSON}{received or _emptiness(body)}")
    if first["type"] == "extra_forbidden":
        return invalid(f"unrecognized request argument: {shorten(field or '')}", shorten(field or ""))
    wrong = first.get("ctx", {}).get("error")
    if isinstance(wrong, WrongField):
        return invalid(message, shorten(".".join(filter(None, (field, wrong.field)))))
    return invalid(f"{shorten(field)}: {message}" if field else message, shorten(field) if field else None)


def _emptiness(body: Any) -> str:
    return "; the body is empty" if body is None or body == b"" else ""


def _where(loc: tuple[str | int, ...], body: Any) -> str:
    """Return line and column of a position in the text, in the format of Python's JSON decoder."""
    if not isinstance(body, str) or not loc or not isinstance(loc[-1], int):
        return ""
    before = body[: loc[-1]]
    return f": line {before.count(chr(10)) + 1} column {len(before) - before.rfind(chr(10))} (char {len(before)})"


def _first_error(findings: Any) -> tuple[str | None, str]:
    """Return the first invalid field and its message. Each type of a union has its own error: the deepest ones belong
    to the intended type; if all have one depth, all are reported.
    """
    places = [_place(finding["loc"]) for finding in findings]
    root = places[0][:1]
    same = [(place, finding) for place, finding in zip(places, findings, strict=True) if place[:1] == root]
    depth = max(len(place) for place, _ in same)
    deepest = next(place for place, _ in same if len(place) == depth)
    here = [finding for place, finding in same if place == deepest]
    lengths = [finding for finding in here if finding["type"] in ("too_long", "too_short")]  # of the intended type
    return ".".join(deepest) or None, "; or: ".join(dict.fromkeys(map(_message, lengths or here)))


def _message(finding: Any) -> str:
    """Return pydantic's message, unless it mentions Python types or validation."""
    kind, context = finding["type"], finding.get("ctx", {})
    if kind in NOT_AN_OBJECT:
        return "Input should be a JSON object"
    if kind == "too_long" and context.get("field_type") == "List":
        return f"is a list of {context['actual_length']}; send at most {context['max_length']}"
    if kind == "too_short" and context.get("field_type") == "List":
        return f"is a list of {context['actual_length']}; send at least {context['min_length']}"
    return str(finding["msg"]).removeprefix("Value error, ")


def _place(loc: tuple[str | int, ...]) -> tuple[str, ...]:
    """Return pydantic's location without the type names of union branches."""
    return tuple(str(part) for part in loc if part != "body" and not TYPE_NAME.search(str(part)))


def _http_error(request: Request, error: HTTPException, other: OtherPort) -> ApiError:
    """Return readable errors for the router's 404 and 405, and for bodies that FastAPI could not read."""
    if isinstance(cause := error.__cause__, UnicodeDecodeError):  # FastAPI reports no details
        wrong = f"byte {cause.start} is {cause.object[cause.start]:#04x}"
        return invalid(f"the body is not UTF-8 text: {wrong}; send JSON in UTF-8")
    path = shorten(request.url.path)
    if error.status_code == 404:
        return ApiError(404, unknown_path_message(path, request.app.openapi()["paths"], other))
    if error.status_code == 405:
        methods = request.app.openapi()["paths"].get(path, ())
        return ApiError(405, unsupported_method_message(request.method, path, [name.upper() for name in methods]))
    return ApiError(error.status_code, str(error.detail))


async def _on_engine_dead(_: Request, error: Exception) -> Response:
    assert isinstance(error, EngineDead)
    return ApiError(500, f"the engine has failed: {error}").response()


async def _on_internal_error(_: Request, __: Exception) -> Response:
    """Return 500 for a bug. Only this request fails; the server logs the traceback."""
    return ApiError(500, "internal error; see the server's log").response()


async def _on_client_disconnected(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def shorten(text: str) -> str:
    return text if len(text) <= MAX_ECHO_CHARACTERS else text[:MAX_ECHO_CHARACTERS] + "..."
