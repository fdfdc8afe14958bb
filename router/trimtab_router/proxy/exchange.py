"""One request from its last byte until the end of its response, over all attempts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from trimtab_router.proxy.binding import BindableRequest
from trimtab_router.proxy.errors import HttpError, replica_error_events
from trimtab_router.proxy.http1 import RequestHead, ResponseHead
from trimtab_router.proxy.routes import Route

if TYPE_CHECKING:
    from trimtab_router.proxy.client import ClientConnection
    from trimtab_router.proxy.dispatcher import Dispatcher
    from trimtab_router.proxy.upstream import ReplicaConnections, UpstreamConnection
    from trimtab_router.scoring.state import Choice

RETRIED_STATUSES = frozenset((429, 502, 503, 504))
"""Statuses of a replica that another replica may answer better. Other errors are the request's own."""
CLIENT_CLOSED_REQUEST = 499
"""nginx's status of a request whose client left, for metrics and the log."""
USAGE_BYTES = 8192
"""End of a response in which its usage is looked for."""
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens": ?(\d{1,9})')
_CACHED_TOKENS = re.compile(rb'"cached_tokens": ?(\d{1,9})')
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
WAITING_CHUNK = b"b\r\n: waiting\n\n\r\n"
MAX_ERROR_BYTES = 64 << 10
EVENT_END = b"\n\n\r\n"
"""End of a chunk with whole SSE events: another chunk can follow."""


class Exchange(BindableRequest):
    """One request and its response.

    The request's body is kept until the response begins, so that another replica can be tried.
    """

    __slots__ = (
        "attempts",
        "body",
        "choice",
        "client",
        "dispatched_at",
        "dispatcher",
        "error_body",
        "first_byte_at",
        "head",
        "is_committed",
        "is_done",
        "is_event_stream",
        "number",
        "replica",
        "replica_name",
        "request_id",
        "response_started",
        "route",
        "status",
        "upstream",
    )

    def __init__(
        self,
        client: ClientConnection,
        dispatcher: Dispatcher,
        head: RequestHead,
        body: bytes | bytearray,
        route: Route,
        arrived_at: float,
    ) -> None:
        super().__init__(len(body) + len(head.target), arrived_at)
        self.client, self.dispatcher = client, dispatcher
        self.head, self.body, self.route = head, body, route
        self.request_id = head.fields.get(b"x-request-id", b"")
        self.choice: Choice | None = None
        self.attempts = 0
        self.replica: ReplicaConnections | None = None
        """Replica of the present attempt; None while the request is held, and at the end."""
        self.replica_name = ""
        self.number: int | None = None
        """Number of the dispatch in the registry; None if it was not counted or has ended."""
        self.upstream: UpstreamConnection | None = None
        self.dispatched_at: float | None = None
        self.first_byte_at: float | None = None
        self.is_event_stream = False
        self.response_started = False
        self.is_committed = False
        """True once status 200 has been sent, because the client wants to see that its request is held."""
        self.error_body: bytes | None = None
        """Body of a replica's error after that; None if the replica has not answered with an error."""
        self.is_done = False
        self.status = 0

    @property
    def is_repeatable(self) -> bool:
        """True if the request can be sent to another replica although one may have received it."""
        return self.route is Route.GENERATE or self.head.method in (b"GET", b"HEAD")

    # --- called by the upstream connection ------------------------------------------------------------------------

    def on_response_head(self, head: ResponseHead) -> bool:
        """Send the response's head to the client, or return False if another replica will be tried instead."""
        if head.status in RETRIED_STATUSES and self.dispatcher.retry_after_status(self, head.status):
            return False
        client = self.client
        self.response_started = True
        self._release_body()
        self.status, self.is_event_stream = head.status, head.is_event_stream and head.is_chunked
        if self.is_committed:
            if head.status != 200 or not self.is_event_stream:
                self.error_body = b""
            return True
        has_body = head.has_body(self.head.method)
        decode = not self.head.is_http11
        if decode or (has_body and head.ends_with_connection):
            client.close_after_response()
        own = self.dispatcher.response_headers(self)
        client.write(head.client_head(own, close=client.closes_after_response, chunked=head.is_chunked and not decode))
        return True

    def on_response_data(self, data: bytes) -> None:
        """Pass on a part of the response's body."""
        if self.first_byte_at is None:
            self.dispatcher.on_first_byte(self)
        if self.error_body is None:
            self.client.write(data)
        elif len(self.error_body) < MAX_ERROR_BYTES:
            self.error_body += data

    def on_response_end(self, last: bytes) -> None:
        """End the exchange: the response is complete. `last` are its last bytes."""
        self.upstream = None
        self.dispatcher.on_end(self)
        if self.description is not None and self.status == 200:
            self._read_usage(last[-USAGE_BYTES:])
        if self.error_body is not None:
            self._end_with_events(replica_error_events(self.error_body, self.head.path, self.status))
            return
        self._end()
        self.client.on_response_end()

    def on_upstream_failed(self, cause: str, connection: UpstreamConnection) -> None:
        """Try another replica, or end the response with an error. `connection` has been closed."""
        self.upstream = None
        if self.response_started:
            self.dispatcher.on_interrupted(self)
            is_between_events = self.first_byte_at is None or connection.last.endswith(EVENT_END)
            if self.is_event_stream and is_between_events and self.head.is_http11:
                error = HttpError(502, f"the replica failed while it answered: {cause}; send the request again")
                self._end_with_events(error.events(self.head.path))
            else:
                self._end()
                self.client.abort()
            return
        self.dispatcher.retry_after_failure(self, cause, is_stale=connection.is_reused and not connection.has_answered)

    # --- called by the binder -------------------------------------------------------------------------------------

    def excluded(self, now: float) -> frozenset[str]:
        return self.dispatcher.excluded(self, now)

    def on_hold(self) -> None:
        self.dispatcher.follow_hold(self)

    def bind(self, choice: Choice, now: float) -> None:
        self.dispatcher.dispatch(self, choice, now)

    # --- called by the client connection and the dispatcher -------------------------------------------------------

    def cancel(self) -> None:
        """End the exchange because its client left: the replica aborts the request."""
        if self.is_done:
            return
        upstream, self.upstream = self.upstream, None
        self.status = CLIENT_CLOSED_REQUEST
        self.dispatcher.on_cancelled(self)
        self._end()
        if upstream is not None:
            upstream.abandon()

    def fail(self, error: HttpError) -> None:
        """Answer with an error of the router; no response has begun."""
        if self.is_done:
            return
        self.status = error.status
        self.dispatcher.metrics.finished(self.route.value, error.status)
        if self.is_committed:
            self._end_with_events(error.events(self.head.path))
            return
        self._end()
        self.client.respond_error(error, self)

    def send_progress(self) -> None:
        """Send a comment that the request waits, after a head with status 200 if it is the first one."""
        if not self.is_committed:
            self.is_committed = True
            self.client.write(STREAM_HEAD)
        self.client.write(WAITING_CHUNK)

    def respond(self, response: bytes, status: int) -> None:
        """Answer with a whole response of the router."""
        self.status = status
        self.dispatcher.metrics.finished(self.route.value, status)
        self._end()
        self.client.write(response)
        self.client.on_response_end()

    def _end_with_events(self, events: bytes) -> None:
        """End a stream with events of an error."""
        self._end()
        self.client.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(events), events))
        self.client.close_after_response()
        self.client.on_response_end()

    def _end(self) -> None:
        self.is_done = True
        self._release_body()

    def _release_body(self) -> None:
        self.dispatcher.body_bytes -= len(self.body)
        self.body = b""

    def _read_usage(self, tail: bytes) -> None:
        found = _PROMPT_TOKENS.search(tail)
        if found is None:
            return
        cached = _CACHED_TOKENS.search(tail)
        self.dispatcher.on_usage(int(found[1]), int(cached[1]) if cached is not None else 0)
