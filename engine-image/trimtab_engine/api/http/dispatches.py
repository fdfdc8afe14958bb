"""Acknowledgement of requests that a router sends: header `x-trimtab-dispatch: ROUTER:NUMBER`.

A core acknowledges a dispatch when it queues the request. Requests that end before that, with an error of the API
server, are acknowledged here, so that no router waits for them (docs/reference/contract.md section 8).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from trimtab_engine.messages.state_stream import Dispatch

HEADER = b"x-trimtab-dispatch"
DISPATCH = re.compile(rb"([A-Za-z0-9_.-]{1,64}):([0-9]{1,18})")


@dataclass(slots=True)
class PendingDispatch:
    """A dispatch, and whether a core got it."""

    dispatch: Dispatch
    is_sent: bool = False

    def take(self) -> Dispatch:
        """Return the dispatch, to be sent to a core now."""
        self.is_sent = True
        return self.dispatch


class AcknowledgeDispatches:
    """Middleware that calls `note` for each dispatch that ended without reaching a core."""

    def __init__(self, app: ASGIApp, note: Callable[[Dispatch], None]) -> None:
        self._app, self._note = app, note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        header = dict(scope["headers"]).get(HEADER) if scope["type"] == "http" else None
        match = None if header is None else DISPATCH.fullmatch(header)
        if match is None:
            await self._app(scope, receive, send)
            return
        pending = PendingDispatch(Dispatch(match[1].decode(), int(match[2])))
        scope.setdefault("state", {})["dispatch"] = pending
        try:
            await self._app(scope, receive, send)
        finally:
            if not pending.is_sent:
                self._note(pending.dispatch)


def dispatch_of(request: Request) -> PendingDispatch | None:
    """Return the request's dispatch. None if it did not come from a router."""
    pending: PendingDispatch | None = getattr(request.state, "dispatch", None)
    return pending
