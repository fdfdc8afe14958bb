"""Connections of clients: HTTP/1.1 requests in, responses out, one at a time on each connection."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, cast

from trimtab_router.proxy.errors import HttpError
from trimtab_router.proxy.exchange import Exchange
from trimtab_router.proxy.http1 import DELIMITER, MAX_HEAD_BYTES, RequestHead, RequestParser, check_head_bytes
from trimtab_router.proxy.routes import route_of

if TYPE_CHECKING:
    from trimtab_router.proxy.server import ProxyServer

MAX_BUFFERED_BYTES = 64 << 10
"""Response bytes that may wait for a slow client, and bytes of a next request that may wait for the present one."""
LINGER_SECONDS = 1.0
"""Time to read and discard after an early error response: closing at once would reset it before the client reads it."""
HEAD_SECONDS = 10.0
BODY_STALL_SECONDS = 30.0
BODY_SECONDS = 600.0
IDLE_SECONDS = 75.0
WRITE_STALL_SECONDS = 120.0
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

access_logger = logging.getLogger("trimtab_router.access")


class ClientConnection(asyncio.Protocol):
    """One connection of a client."""

    __slots__ = (
        "_body",
        "_body_left",
        "_buffer",
        "_exchange",
        "_head",
        "_is_lingering",
        "_is_paused",
        "_last_buffer_size",
        "_parser",
        "_received_at",
        "_server",
        "_since",
        "_written_at",
        "closes_after_response",
        "transport",
    )

    def __init__(self, server: ProxyServer) -> None:
        self._server = server
        self.transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._buffer = b""
        """Bytes of a head that is not complete, or of the requests after the present one."""
        self._head: RequestHead | None = None
        """Head of a request whose body is being received."""
        self._parser: RequestParser | None = None
        """Parser of a chunked body."""
        self._body: bytearray | None = None
        self._body_left = 0
        self._exchange: Exchange | None = None
        self._is_paused = False
        self._is_lingering = False
        self.closes_after_response = False
        self._since = 0.0
        """Since when the connection has been idle, or receiving the present head or body."""
        self._received_at = 0.0
        self._written_at = 0.0
        self._last_buffer_size = 0
        """Bytes that wait for a slow client; 0 unless there are more than MAX_BUFFERED_BYTES."""

    # --- asyncio.Protocol -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=MAX_BUFFERED_BYTES)
        self._since = self._server.time()
        self._server.connected(self)

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            return
        if self._exchange is not None or self._last_buffer_size:
            self._buffer += data
            if len(self._buffer) > MAX_BUFFERED_BYTES and not self._is_paused:
                self._is_paused = True
                self.transport.pause_reading()
            return
        try:
            self._receive(data)
        except HttpError as error:
            self._reject(error)

    def eof_received(self) -> None:
        """Treat a half-closed connection as closed: the client reads no response, or an aborted one."""

    def connection_lost(self, error: Exception | None) -> None:
        self._server.disconnected(self)
        self._forget_body()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.cancel()
            self._log(exchange)

    def pause_writing(self) -> None:
        self._written_at = self._server.time()
        self._last_buffer_size = self.transport.get_write_buffer_size()
        if self._exchange is not None and self._exchange.upstream is not None:
            self._exchange.upstream.pause_reading()

    def resume_writing(self) -> None:
        self._last_buffer_size = 0
        if self._exchange is None:
            self._continue()
        elif self._exchange.upstream is not None:
            self._exchange.upstream.resume_reading()

    # --- receiving a request --------------------------------------------------------------------------------------

    def _receive(self, data: bytes) -> None:
        """Add received bytes to the present request, and start it once it is complete."""
        if self._head is not None:
            self._receive_body(data)
            return
        if not self._buffer:
            self._since = self._server.time()
        self._buffer = self._buffer + data if self._buffer else data
        if self._buffer.startswith((b"\r", b"\n")):
            self._buffer = self._buffer.lstrip(b"\r\n")  # empty lines before a request are allowed (RFC 9112, 2.2)
        end = self._buffer.find(DELIMITER)
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise HttpError(
                    431, f"the request's head exceeds {MAX_HEAD_BYTES} bytes; send fewer or shorter headers"
                )
            return
        end += len(DELIMITER)
        if end > MAX_HEAD_BYTES:
            raise HttpError(431, f"the request's head exceeds {MAX_HEAD_BYTES} bytes; send fewer or shorter headers")
        raw, rest = self._buffer[:end], self._buffer[end:]
        self._buffer = b""
        check_head_bytes(raw)
        parser = RequestParser()
        head = parser.parse_head(raw)
        self._start_body(head, parser, rest)

    def _start_body(self, head: RequestHead, parser: RequestParser, rest: bytes) -> None:
        most = self._server.config.max_body_bytes
        if head.content_length > most:
            raise HttpError(413, f"the body exceeds {most} bytes; send a shorter prompt")
        self._received_at = self._since = self._server.time()
        if not head.is_chunked:
            if len(rest) >= head.content_length:
                self._buffer = rest[head.content_length :]
                self._server.dispatcher.body_bytes += head.content_length
                self._start(head, rest[: head.content_length] if self._buffer else rest)
                return
            self._body, self._body_left = bytearray(), head.content_length
        else:
            self._parser = parser
        self._head = head
        if head.expects_continue and not rest:
            self.transport.write(CONTINUE)
        if rest or not head.is_chunked:
            self._receive_body(rest)

    def _receive_body(self, data: bytes) -> None:
        head, dispatcher = self._head, self._server.dispatcher
        assert head is not None
        self._received_at = self._server.time()
        if self._parser is not None:
            before = len(self._parser.body)
            try:
                self._parser.feed_chunked(data)
            finally:
                dispatcher.body_bytes += len(self._parser.body) - before
            if len(self._parser.body) > self._server.config.max_body_bytes:
                most = self._server.config.max_body_bytes
                raise HttpError(413, f"the body exceeds {most} bytes; send a shorter prompt")
            is_complete, body = self._parser.is_complete, self._parser.body
            if self._parser.has_surplus:
                head.keep_alive = False  # where the next request began is unknown
        else:
            assert self._body is not None
            if len(data) > self._body_left:
                data, self._buffer = data[: self._body_left], data[self._body_left :]
            self._body += data
            self._body_left -= len(data)
            dispatcher.body_bytes += len(data)
            is_complete, body = not self._body_left, self._body
        if is_complete:
            self._head = self._parser = self._body = None
            self._start(head, body)
        elif dispatcher.body_bytes > self._server.config.max_held_bytes:
            raise dispatcher.overloaded()

    def _start(self, head: RequestHead, body: bytes | bytearray) -> None:
        server = self._server
        if not head.keep_alive:
            self.closes_after_response = True
        route = route_of(head.method, head.path)
        exchange = Exchange(self, server.dispatcher, head, body, route, server.time())
        self._exchange = exchange
        server.handle(exchange)

    def _forget_body(self) -> None:
        received = self._parser.body if self._parser is not None else self._body
        if received:
            self._server.dispatcher.body_bytes -= len(received)
        self._head = self._parser = self._body = None

    def _reject(self, error: HttpError) -> None:
        """Answer a request that was not received completely, then close."""
        self._forget_body()
        self._buffer = b""
        self._server.dispatcher.metrics.finished("rejected", error.status)
        self.write(error.response(close=True))
        self._linger()

    # --- sending the response -------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send bytes of the response."""
        self.transport.write(data)

    def close_after_response(self) -> None:
        """Close the connection once the present response has been sent."""
        self.closes_after_response = True

    def respond_error(self, error: HttpError, exchange: Exchange) -> None:
        """Send an error of the router as the response."""
        self.write(
            error.response(
                close=self.closes_after_response,
                path=exchange.head.path,
                request_id=exchange.request_id,
                head_only=exchange.head.method == b"HEAD",
            )
        )
        self.on_response_end()

    def on_response_end(self) -> None:
        """Prepare for the next request, or close."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._log(exchange)
        if self.closes_after_response or self._server.is_closing:
            self.transport.close()
            return
        self._since = self._server.time()
        if not self._last_buffer_size:  # otherwise once the client has read this response
            self._continue()

    def abort(self) -> None:
        """Cut the connection: the response cannot be completed."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._log(exchange)
        self.transport.abort()

    # --- limits in time, called about once a second ---------------------------------------------------------------

    def check_time(self, now: float) -> None:
        """Close the connection if the client is too slow."""
        if self._last_buffer_size:
            size = self.transport.get_write_buffer_size()
            if size < self._last_buffer_size:
                self._written_at, self._last_buffer_size = now, size
            elif now - self._written_at > WRITE_STALL_SECONDS:
                self.transport.abort()
                return
        if self._exchange is not None or self._is_lingering:
            return
        if self._head is not None:
            if now - self._received_at > BODY_STALL_SECONDS or now - self._since > BODY_SECONDS:
                self._reject(HttpError(408, "the request's body was not received in time; send it faster"))
        elif self._buffer:
            if now - self._since > HEAD_SECONDS:
                self._reject(HttpError(408, "the request's head was not received in time; send it faster"))
        elif now - self._since > IDLE_SECONDS:
            self.transport.close()

    @property
    def is_idle(self) -> bool:
        """True if no request is being received or answered."""
        return self._exchange is None and self._head is None and not self._buffer

    # --- parts ----------------------------------------------------------------------------------------------------

    def _continue(self) -> None:
        """Read on, and start with the next request if it has been received."""
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()
        if self._buffer:
            self._server.loop.call_soon(self._receive_pipelined)

    def _receive_pipelined(self) -> None:
        if self._exchange is None and self._buffer and not self.transport.is_closing():
            self.data_received(b"")

    def _linger(self) -> None:
        self._is_lingering = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._server.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _log(self, exchange: Exchange) -> None:
        if not self._server.config.access_log:
            return
        now = self._server.time()
        peer = self.transport.get_extra_info("peername")
        record = {
            "method": exchange.head.method.decode("latin-1"),
            "path": exchange.head.path,
            "status": exchange.status,
            "request_id": exchange.request_id.decode("latin-1"),
            "replica": exchange.replica_name,
            "tenant": exchange.tenant,
            "attempts": exchange.attempts,
            "held": exchange.was_held,
            "seconds": round(now - exchange.arrived_at, 6),
            "first_byte_seconds": exchange.first_byte_at and round(exchange.first_byte_at - exchange.arrived_at, 6),
            "client": peer[0] if peer else None,
        }
        access_logger.info(json.dumps(record))
