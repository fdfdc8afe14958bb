"""Errors in OpenAI's form, {"error": {"message", "type", "param", "code"}}, so that clients raise the right ones."""

from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from trimtab_engine.errors import EngineDead

MAX_ECHO_CHARACTERS = 200  # of a client's own input in an error message


class ApiError(Exception):
    """Ends one HTTP request with a status and OpenAI's error body. `retry_after` is in seconds."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 0
    ) -> None:
        message = message.encode("utf-8", "replace").decode()  # it may quote broken text of the client's
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


def invalid(message: str, param: str | None = None) -> ApiError:
    """400: this request alone is wrong."""
    return ApiError(400, message, param=param)


async def on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def on_validation_error(_: Request, error: Exception) -> Response:
    """Pydantic's findings as one sentence that names the first field."""
    assert isinstance(error, RequestValidationError)
    return validation_error(error.errors()).response()


def validation_error(findings: Any) -> ApiError:
    """The first of pydantic's findings as a 400."""
    first = findings[0]
    parts = [str(part) for part in first["loc"] if part != "body"]
    field = ".".join(parts) or None
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return invalid(f"the body is not valid JSON: {first.get('ctx', {}).get('error', message)}")
    if first["loc"] in (("body",), ()) and first["type"] in ("missing", "model_attributes_type", "model_type"):
        return invalid("the body must be a JSON object, sent with Content-Type: application/json")
    if first["type"] == "extra_forbidden":
        return invalid(f"unrecognized request argument: {shorten(field or '')}", shorten(field or ""))
    return invalid(f"{shorten(field)}: {message}" if field else message, shorten(field) if field else None)


async def on_http_error(_: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, str(error.detail)).response()


async def on_engine_dead(_: Request, error: Exception) -> Response:
    assert isinstance(error, EngineDead)
    return ApiError(500, f"the engine has failed: {error}").response()


async def on_internal_error(_: Request, __: Exception) -> Response:
    """A bug of ours: this request alone ends. The server logs the traceback."""
    return ApiError(500, "internal error; the server's log has the details").response()


def shorten(text: str) -> str:
    return text if len(text) <= MAX_ECHO_CHARACTERS else text[:MAX_ECHO_CHARACTERS] + "..."
