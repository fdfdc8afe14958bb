"""uvicorn's fast HTTP/1.1 parser, with a bound on the size of a request's head, which httptools itself lacks."""

import logging

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10  # request line and headers; uvicorn's other parser has the same bound
TLS_HANDSHAKE = b"\x16\x03"  # how TLS begins; no HTTP method does
FLOW = "trimtab.flow"
"""The extension of a request's ASGI scope that is its connection's flow control: whoever sends may look beforehand
whether it would wait."""
NO_TLS = "This port speaks plain HTTP: write http:// for https://."

logger = logging.getLogger("trimtab_engine.api")


class BoundedHeadProtocol(HttpToolsProtocol):
    """Closes a connection whose request line and headers never end, with 400; and one that speaks TLS, which is told in
    the log, for such a client can read no answer."""

    _num_head_bytes = 0
    """Bytes that came without completing a head or belonging to a body."""
    _reads_body = False
    _completed = False
    """Whether the bytes at hand completed a head or a message."""

    def data_received(self, data: bytes) -> None:
        self._completed = False
        if not self._reads_body and self._num_head_bytes == 0 and data.startswith(TLS_HANDSHAKE):
            host = self.client[0] if self.client else "a client"
            logger.warning(
                "%s speaks TLS to port %s, which has plain HTTP: write http:// for https://", host, self._port
            )
            self.send_400_response(NO_TLS)
            return
        super().data_received(data)
        if self._reads_body or self._completed:
            self._num_head_bytes = 0
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request's headers are larger than {MAX_HEAD_BYTES} bytes.")

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
