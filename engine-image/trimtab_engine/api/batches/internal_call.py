"""A request to an application of this process, without a connection."""

import asyncio
import contextlib
from typing import Any

from starlette.types import ASGIApp, Message


async def call(app: ASGIApp, path: str, body: bytes, *, request_id: str, owner: str) -> tuple[int, bytes]:
    """Return the status and body of POST `path`. Cancelling it aborts the request.

    `owner` is the salt of the API key for which the request runs.
    """
    status = 500
    parts: list[bytes] = []
    pending = [body]

    async def receive() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        await asyncio.Event().wait()  # the client never leaves
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    state = {"request_id": request_id, "has_own_id": True, "key_salt": owner}
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
        "state": state,
    }
    with contextlib.suppress(Exception):  # a bug: the application has sent 500 and logged it, and raises it again
        await app(scope, receive, send)
    return status, b"".join(parts)
