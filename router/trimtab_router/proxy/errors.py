"""Errors of the router itself, in the engine's formats, so that official clients raise the matching exceptions."""

from __future__ import annotations

from http import HTTPStatus

import orjson

ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "internal_error",
    502: "service_unavailable",
    503: "service_unavailable",
    504: "service_unavailable",
}
"""Value of `error.type` by status; the others are invalid_request_error."""
ANTHROPIC_ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"


class HttpError(Exception):
    """Ends one request with a status. `reason` becomes the header x-trimtab-dropped, `retry_after` is in seconds."""

    def __init__(self, status: int, message: str, *, retry_after: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after, self.reason = status, message, retry_after, reason

    def body(self, path: str = "") -> bytes:
        """Return the JSON body, in the format of the path's API."""
        if path.startswith(MESSAGES_PATH):
            kind = ANTHROPIC_ERROR_TYPES.get(self.status, "invalid_request_error")
            return orjson.dumps({"type": "error", "error": {"type": kind, "message": self.message}})
        kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        return orjson.dumps(
            {"error": {"message": self.message, "type": kind, "param": None, "code": self.reason or self.status}}
        )

    def response(self, *, close: bool, path: str = "", request_id: bytes = b"", head_only: bool = False) -> bytes:
        """Return the whole response."""
        headers = []
        if self.retry_after:
            headers.append(b"retry-after: %d" % self.retry_after)
        if self.reason:
            headers.append(b"x-trimtab-dropped: " + self.reason.encode())
        if request_id:
            headers.append(b"x-request-id: " + request_id)
        return json_response(self.status, self.body(path), close=close, headers=headers, head_only=head_only)

    def events(self, path: str) -> bytes:
        """Return the error as the last SSE events of a stream, in the format of the path's API."""
        if path.startswith(MESSAGES_PATH):
            return b"event: error\ndata: " + self.body(path) + b"\n\n"
        if path.startswith(RESPONSES_PATH):
            fields = {"type": "error", "code": "server_error", "message": self.message, "param": None}
            return b"event: error\ndata: " + orjson.dumps(fields) + b"\n\n"
        return b"data: " + self.body(path) + b"\n\ndata: [DONE]\n\n"


def replica_error_events(body: bytes, path: str, status: int) -> bytes:
    """Return a replica's error, a JSON object, as the last SSE events of a stream that has already begun."""
    try:
        data = orjson.dumps(orjson.loads(body))
    except orjson.JSONDecodeError:
        return HttpError(502, f"the replica answered with status {status}").events(path)
    if path.startswith((MESSAGES_PATH, RESPONSES_PATH)):
        return b"event: error\ndata: " + data + b"\n\n"
    return b"data: " + data + b"\n\ndata: [DONE]\n\n"


def json_response(
    status: int, body: bytes, *, close: bool, headers: list[bytes] | None = None, head_only: bool = False
) -> bytes:
    """Return a whole response with a JSON body; `headers` are complete lines without CRLF."""
    lines = [
        b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode()),
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        *(headers or []),
    ]
    if close:
        lines.append(b"connection: close")
    return b"\r\n".join(lines) + b"\r\n\r\n" + (b"" if head_only else body)
