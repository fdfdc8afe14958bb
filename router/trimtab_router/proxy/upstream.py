"""Connections to replicas: one request at a time on each, kept open between requests."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Protocol, cast

from trimtab_router.endpoints.endpoint import Endpoint
from trimtab_router.proxy.breaker import Breaker
from trimtab_router.proxy.http1 import (
    DELIMITER,
    MAX_HEAD_BYTES,
    PARSE_ERRORS,
    DecodingResponseParser,
    ResponseHead,
    ResponseParser,
)

if TYPE_CHECKING:
    from trimtab_router.proxy.exchange import Exchange
    from trimtab_router.proxy.http1 import RequestHead


class ResponseReceiver(Protocol):
    """Receives one response."""

    head: RequestHead

    def on_response_head(self, head: ResponseHead) -> bool:
        """Handle the head; return False if the connection was abandoned."""

    def on_response_data(self, data: bytes) -> None:
        """Handle a part of the body, with its framing."""

    def on_response_end(self, last: bytes) -> None:
        """Handle the end; `last` are the last bytes received."""

    def on_upstream_failed(self, cause: str, connection: UpstreamConnection) -> None:
        """Handle a transport error; the connection is closed."""


CONNECT_TIMEOUT_SECONDS = 3.0
MAX_IDLE_CONNECTIONS = 256
IDLE_SECONDS = 4.0
"""Below the 5 s after which engines close idle connections, so that requests rarely meet a closing one."""
KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""Detects a node that is gone within 25 s, although an answer may take minutes."""
USER_TIMEOUT_MILLISECONDS = 20_000


class UpstreamConnection(asyncio.Protocol):
    """One connection to a replica. Response bytes are passed on as received; only their end is looked for."""

    __slots__ = (
        "_buffer",
        "_decoder",
        "_head",
        "_is_paused",
        "_parser",
        "exchange",
        "idle_since",
        "is_reused",
        "last",
        "pool",
        "transport",
    )

    def __init__(self, pool: ReplicaConnections) -> None:
        self.pool = pool
        self.transport: asyncio.Transport = cast("asyncio.Transport", None)
        self.exchange: ResponseReceiver | None = None
        self.is_reused = False
        self.idle_since = 0.0
        self.last = b""
        """The last bytes of the response, which may contain its usage."""
        self._parser: ResponseParser = cast("ResponseParser", None)
        self._decoder: DecodingResponseParser | None = None
        self._buffer = b""
        self._head: ResponseHead | None = None
        self._is_paused = False

    # --- asyncio.Protocol -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        own = transport.get_extra_info("socket")
        if own is not None and own.family in (socket.AF_INET, socket.AF_INET6):
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE:
                own.setsockopt(socket.IPPROTO_TCP, option, value)
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MILLISECONDS)

    def data_received(self, data: bytes) -> None:
        exchange, parser = self.exchange, self._parser
        if exchange is None:  # no request was sent
            self.transport.abort()
            return
        if self._head is None:
            data = self._read_head(exchange, data)
            if not data:
                return
            parser = self._parser
        try:
            parser.feed(data)
        except PARSE_ERRORS as error:
            self._fail(f"invalid response: {error}")
            return
        if parser.has_surplus:
            self._fail("invalid response: data after its end")
            return
        self.last = data
        exchange.on_response_data(data if self._decoder is None else self._decoder.take_body())
        if parser.is_complete:
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        self.pool.discard(self)
        exchange = self.exchange
        if exchange is None:
            return
        if error is None and self._head is not None and self._head.ends_with_connection:
            self._finish()
        else:
            self._fail(str(error) if error else "connection closed")

    # --- requests -------------------------------------------------------------------------------------------------

    def send(self, exchange: ResponseReceiver, head: bytes, body: bytes | bytearray) -> None:
        """Send one request; the exchange receives the response."""
        self.exchange = exchange
        self._head, self._buffer, self.last = None, b"", b""
        if exchange.head.is_http11 and self._decoder is None and self._parser is not None and self._parser.is_complete:
            self._parser.begin()
        else:
            self._decoder = None if exchange.head.is_http11 else DecodingResponseParser()
            self._parser = self._decoder or ResponseParser()
        if body:
            self.transport.writelines((head, body))
        else:
            self.transport.write(head)

    def abandon(self) -> None:
        """Close the connection because its response is no longer wanted: the engine then aborts the request."""
        self.exchange = None
        self.transport.abort()

    def pause_reading(self) -> None:
        """Stop reading: the client is slower than the replica."""
        if not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()

    @property
    def has_answered(self) -> bool:
        """True if a part of the present response has been received."""
        return self._head is not None or bool(self._buffer)

    @property
    def is_usable(self) -> bool:
        """True if a request can be sent."""
        return not self.transport.is_closing()

    def _read_head(self, exchange: ResponseReceiver, data: bytes) -> bytes:
        """Add bytes to the response's head. Return the beginning of the body once the head is complete."""
        self._buffer += data
        while True:
            end = self._buffer.find(DELIMITER)
            if end < 0:
                if len(self._buffer) > MAX_HEAD_BYTES:
                    self._fail("the response's head is too large")
                return b""
            end += len(DELIMITER)
            rest, raw = self._buffer[end:], self._buffer[:end]
            self._buffer = b""
            try:
                self._parser.feed(raw)
            except PARSE_ERRORS as error:
                self._fail(f"invalid response: {error}")
                return b""
            if not self._parser.head_is_complete or self._parser.has_surplus:
                self._fail("invalid response head")
                return b""
            head = self._parser.head()
            if 100 <= head.status < 200 and head.status != 101:  # an interim response, which no client expects
                self._parser = type(self._parser)()
                self._decoder = self._parser if isinstance(self._parser, DecodingResponseParser) else None
                self._buffer = rest
                continue
            break
        if head.status == 101:
            self._fail("unexpected protocol upgrade")
            return b""
        self._head = head
        self.pool.breaker.succeeded()
        if not exchange.on_response_head(head):
            return b""  # the exchange goes to another replica, and this connection is closed
        if not head.has_body(exchange.head.method):
            self._finish()
            return b""
        return rest

    def _finish(self) -> None:
        exchange, self.exchange = self.exchange, None
        assert exchange is not None
        head = self._head
        self.resume_reading()
        if head is not None and head.keep_alive and self.transport.get_write_buffer_size() == 0:
            self.pool.put(self)
        else:
            self.transport.close()
        exchange.on_response_end(self.last)

    def _fail(self, cause: str) -> None:
        exchange, self.exchange = self.exchange, None
        self.transport.abort()
        if exchange is not None:
            exchange.on_upstream_failed(cause, self)


class ReplicaConnections:
    """The connections to one replica, and the record of their failures."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.breaker = Breaker()
        self.is_removed = False
        self.waiting: deque[Exchange] = deque()
        """Requests that wait for a new connection."""
        self._idle: deque[UpstreamConnection] = deque()
        """Most recently used last."""

    def take(self, now: float) -> UpstreamConnection | None:
        """Return an idle connection; None if a new one must be opened."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable and now - connection.idle_since < IDLE_SECONDS:
                connection.is_reused = True
                return connection
            connection.transport.close()
        return None

    def put(self, connection: UpstreamConnection) -> None:
        """Keep a connection for the next request."""
        if self.is_removed or len(self._idle) >= MAX_IDLE_CONNECTIONS:
            connection.transport.close()
            return
        connection.idle_since = monotonic()
        self._idle.append(connection)

    def discard(self, connection: UpstreamConnection) -> None:
        """Forget a closed connection."""
        if connection.exchange is None:
            try:
                self._idle.remove(connection)
            except ValueError:
                return

    def close_idle(self, now: float) -> None:
        """Close connections that have been idle for too long."""
        while self._idle and now - self._idle[0].idle_since >= IDLE_SECONDS:
            self._idle.popleft().transport.close()

    def remove(self) -> None:
        """Close idle connections; those with a request end with it."""
        self.is_removed = True
        while self._idle:
            self._idle.popleft().transport.close()

    async def connect(self) -> UpstreamConnection:
        """Open a connection.

        Raises:
            OSError: The replica cannot be reached, or not within CONNECT_TIMEOUT_SECONDS.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
            _, connection = await loop.create_connection(
                lambda: UpstreamConnection(self), self.endpoint.host, self.endpoint.port
            )
        return connection
