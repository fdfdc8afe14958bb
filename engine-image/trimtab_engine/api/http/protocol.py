"""uvicorn's fast HTTP/1.1 parser with limits that httptools lacks: on the request head, and on silent clients."""

import asyncio
import logging
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from trimtab_engine.api.http.connections import ConnectionLimits
from trimtab_engine.api.http.uploads import is_upload

MAX_HEAD_BYTES = 64 << 10  # request line and headers; the limit of uvicorn's other parser
TLS_HANDSHAKE = b"\x16\x03"  # first bytes of TLS; no HTTP method starts so
FLOW = "trimtab.flow"
"""Extension of a request's ASGI scope with its connection's flow control, by which senders can check whether a write
would wait."""
NO_TLS = "This port serves plain HTTP; use http:// instead of https://."

logger = logging.getLogger("trimtab_engine.api.connections")


class BoundedHeadProtocol(HttpToolsProtocol):
    """Closes connections whose request head exceeds the limit with 400, and TLS connections, which are logged because
    the client cannot read a response. Reports to its server's ConnectionLimits which data it waits for.
    """

    _num_head_bytes = 0
    """Bytes received since the last complete head or message."""
    _reads_body = False
    _completed = False
    """True if the current bytes completed a head or a message."""

    _is_counted = False
    """True if the connection counts against the server's limit."""

    def __init__(self, *arguments: Any, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits

    @property
    def is_reading_paused(self) -> bool:
        return self.flow.read_paused

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast("asyncio.Transport", transport))
        self._is_counted = self._limits.open(self, self.loop.time())
        if not self._is_counted:
            self._end(503, "too many connections; retry later")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._is_counted:
            self._limits.close(self)

    def time_out(self, message: str) -> None:
        """Close the connection: with status 408 if a request has begun, otherwise without a response."""
        has_begun = self._num_head_bytes > 0 or (self._reads_body and not self.cycle.response_started)
        if has_begun:
            self._end(408, message)
        else:
            self.transport.close()

    def _end(self, status: int, message: str) -> None:
        body = f"{message}\n".encode()
        head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        if not self._is_counted:
            return
        if self._num_head_bytes == 0 and self._awaits_head:
            self._limits.await_head(self, self.loop.time())
        self._completed = False
        if not self._reads_body and self._num_head_bytes == 0 and data.startswith(TLS_HANDSHAKE):
            host = self.client[0] if self.client else "a client"
            logger.warning(
                "%s uses TLS on port %s, which serves plain HTTP; use http:// instead of https://", host, self._port
            )
            self.send_400_response(NO_TLS)
            return
        super().data_received(data)
        if self._reads_body or self._completed:
            self._num_head_bytes = 0
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request's headers exceed {MAX_HEAD_BYTES} bytes.")

    @property
    def _awaits_head(self) -> bool:
        return not self._reads_body and (self.cycle is None or self.cycle.response_complete)

    @property
    def _port(self) -> int | None:
        return self.server[1] if self.server else None

    def on_headers_complete(self) -> None:
        self._reads_body = self._completed = True
        self.scope["extensions"] = {FLOW: {"control": self.flow}}
        super().on_headers_complete()
        self._limits.await_body(self, self.loop.time())

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self._reads_body:
            is_held = not self.cycle.response_complete and not is_upload(self.scope)
            self._limits.receive_body(self, len(body) if is_held else 0, self.loop.time())

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._reads_body, self._completed = False, True
        self._limits.finish_body(self)
        if self.cycle.response_complete:  # sent before the body had arrived
            self._limits.await_head(self, self.loop.time())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_counted and not (self.transport.is_closing() or self._reads_body or not self._awaits_head):
            self._limits.await_head(self, self.loop.time())
