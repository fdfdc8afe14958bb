"""Answers that end when the client goes away: server-sent events, and waiting for a whole answer."""

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

from trimtab_engine.api.http.errors import ApiError, ClientGone
from trimtab_engine.api.http.protocol import FLOW
from trimtab_engine.errors import EngineDead

Answer = TypeVar("Answer")
DONE = "data: [DONE]\n\n"
MARK = uuid.uuid4().hex  # stands for an event's text in what is rendered once; no client can have written it

logger = logging.getLogger("trimtab_engine.api")


def event(body: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


@dataclass(frozen=True, slots=True)
class EventTemplate:
    """Events that differ in one string alone, rendered once but for it."""

    before: str
    after: str

    @classmethod
    def of(cls, body_with: Callable[[str], dict[str, Any]]) -> "EventTemplate":
        """`body_with` gives the body for a string, which is nowhere else in it."""
        before, _, after = event(body_with(MARK)).partition(f'"{MARK}"')
        return cls(before, after)

    def fill(self, texts: Iterable[str]) -> str:
        """One event after another, each as event() writes it."""
        before, after = self.before, self.after
        return "".join([before + encode_basestring(text) + after for text in texts])


class EventStream(StreamingResponse):
    """Server-sent events that stop as soon as the client goes away, also while there is nothing to send.

    `until` is closed when the stream has ended, however it ends. `on_slow_client` is called each time when there are
    events that the connection does not take yet.
    """

    def __init__(
        self, events: AsyncGenerator[str, None], until: ExitStack, on_slow_client: Callable[[], None] = lambda: None
    ) -> None:
        self._events, self._until, self._on_slow_client = events, until, on_slow_client
        self._flow: FlowControl | None = None
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def stream_response(self, send: Send) -> None:
        """The events; an error on the way is sent as one, since the status has long gone out."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = DONE
        try:
            async for events in self._events:
                if self._flow is not None and self._flow.write_paused:
                    self._on_slow_client()
                await send({"type": "http.response.body", "body": events.encode(), "more_body": True})
        except ApiError as error:
            last = event(error.body) + DONE
        except EngineDead as error:
            last = event(ApiError(500, f"the engine has failed: {error}").body) + DONE
        except Exception:  # a bug of ours: this stream alone ends
            logger.exception("a stream ended with an error")
            last = event(ApiError(500, "internal error; the server's log has the details").body) + DONE
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
            with anyio.CancelScope(shield=True):  # what still runs is aborted now, not when it is collected
                await self._events.aclose()
            self._until.close()


async def unless_gone(request: Request, work: Coroutine[Any, Any, Answer]) -> Answer:
    """Await the work; cancel it and raise ClientGone when the client disconnects first."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
