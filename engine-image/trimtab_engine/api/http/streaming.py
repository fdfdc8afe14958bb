"""Responses that stop when the client disconnects: server-sent events, and waiting for a complete response."""

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from json.encoder import encode_basestring
from typing import Any, TypeVar

import anyio
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl

from trimtab_engine.api.http.errors import ApiError, ClientDisconnected
from trimtab_engine.api.http.protocol import FLOW
from trimtab_engine.errors import EngineDead

Answer = TypeVar("Answer")
LINE_SEPARATORS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Escapes of the line separators that JSON does not escape by itself."""
DONE = "data: [DONE]\n\n"
MARK = uuid.uuid4().hex  # placeholder of an event's text in a rendered template; clients cannot guess it

logger = logging.getLogger("trimtab_engine.api")


def event(body: dict[str, Any], name: str | None = None) -> str:
    """Return one server-sent event, with a name if the API has named events."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {_escape_line_separators(json.dumps(body, ensure_ascii=False, separators=(',', ':')))}\n\n"


def _escape_line_separators(written: str) -> str:
    """Return the JSON with escapes for characters at which clients break lines (httpx's iter_lines), against the
    standard of server-sent events.
    """
    if not written.isascii():
        for character, escape in LINE_SEPARATORS.items():
            written = written.replace(character, escape)
    return written


@dataclass(frozen=True, slots=True)
class EventTemplate:
    """Events that differ only in one string, rendered once."""

    before: str
    after: str

    @classmethod
    def of(cls, body_with: Callable[[str], dict[str, Any]]) -> "EventTemplate":
        """Return the template. `body_with` returns the body for a string, which must not occur elsewhere in it."""
        before, _, after = event(body_with(MARK)).partition(f'"{MARK}"')
        return cls(before, after)

    def fill(self, texts: Iterable[str]) -> str:
        """Return one event per text, each equal to event()."""
        before, after = self.before, self.after
        return "".join([before + _escape_line_separators(encode_basestring(text)) + after for text in texts])


class EventStream(StreamingResponse):
    """Server-sent events that stop as soon as the client disconnects, even while there is nothing to send.

    `until` is closed at the end of the stream. `on_slow_client` is called whenever the connection does not accept more
    events. `error_event` writes an error in the API's format; `end` is sent last.
    """

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        until: ExitStack,
        on_slow_client: Callable[[], None] = lambda: None,
        *,
        error_event: Callable[[ApiError], str] = lambda error: event(error.body),
        end: str = DONE,
    ) -> None:
        self._events, self._until, self._on_slow_client = events, until, on_slow_client
        self._error_event, self._end = error_event, end
        self._flow: FlowControl | None = None
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def stream_response(self, send: Send) -> None:
        """Send the events. Errors are sent as an event, because the status has already been sent."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        failure = None
        try:
            async for events in self._events:
                if self._flow is not None and self._flow.write_paused:
                    self._on_slow_client()
                await send({"type": "http.response.body", "body": events.encode(), "more_body": True})
        except ApiError as error:
            failure = error
        except EngineDead as error:
            failure = ApiError(500, f"the engine has failed: {error}")
        except Exception:  # a bug: only this stream ends
            logger.exception("a stream ended with an error")
            failure = ApiError(500, "internal error; see the server's log")
        last = self._end if failure is None else self._error_event(failure) + self._end
        await send({"type": "http.response.body", "body": last.encode(), "more_body": False})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._flow = scope.get("extensions", {}).get(FLOW, {}).get("control")
        try:
            async with anyio.create_task_group() as group:

                async def run(task: Awaitable[None]) -> None:
                    await task
                    group.cancel_scope.cancel()

                group.start_soon(partial(run, self.listen_for_disconnect(receive)))
                await run(self.stream_response(send))
        finally:
            with anyio.CancelScope(shield=True):  # abort running work now, not at garbage collection
                await self._events.aclose()
            self._until.close()


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, Answer]) -> Answer:
    """Await the work; cancel it and raise ClientGone if the client disconnects first."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
