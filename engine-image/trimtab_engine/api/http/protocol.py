"""uvicorn's fast HTTP/1.1 parser with a limit on the request head, which httptools lacks."""

import logging

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10  # request line and headers; the limit of uvicorn's other parser
TLS_HANDSHAKE = b"\x16\x03"  # first bytes of TLS; no HTTP method starts so
FLOW = "trimtab.flow"
"""Extension of a request's ASGI scope with its connection's flow control, by which senders can check whether a write
would wait."""
NO_TLS = "This port serves plain HTTP; use http:// instead of https://."

logger = logging.getLogger("trimtab_engine.api")


class BoundedHeadProtocol(HttpToolsProtocol):
    """Closes connections whose request head exceeds the limit with 400, and TLS connections, which are logged because
    the client cannot read a response.
    """

    _num_head_bytes = 0
    """Bytes received since the last complete head or message."""
    _reads_body = False
    _completed = False
    """True if the current bytes completed a head or a message."""

    def data_received(self, data: bytes) -> None:
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
    def _port(self) -> int | None:
        return self.server[1] if self.server else None

    def on_headers_complete(self) -> None:
        self._reads_body = self._completed = True
        self.scope["extensions"] = {FLOW: {"control": self.flow}}
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._reads_body, self._completed = False, True
