"""HTTP/1.1 message heads and body framing, without I/O.

httptools (llhttp in strict mode) parses heads. The router finds the end of a head itself and gives the parser exactly
the head, so both agree on where a message ends; everything that parsers are known to disagree on is rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import httptools

from trimtab_router.proxy.errors import HttpError

MAX_HEAD_BYTES = 64 << 10
"""The engine's limit, so that the router rejects no request that an engine accepts."""
MAX_HEADERS = 256
CHUNK_OVERHEAD_BYTES = 64 << 10
"""Framing, extensions and trailers that a chunked body may have in addition to 8 bytes per body byte."""
PARSE_ERRORS = (httptools.HttpParserError, httptools.HttpParserUpgrade)
DELIMITER = b"\r\n\r\n"
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"expect",
        b"http2-settings",
    )
)
"""Headers of one connection, which a proxy does not pass on (RFC 9110, 7.6.1)."""
ROUTER_HEADER = b"x-trimtab-"
"""Prefix of the router's own headers, which no client and no engine can set."""


@dataclass(slots=True)
class RequestHead:
    """The head of one request."""

    method: bytes
    target: bytes
    """Request target in origin form, as received."""
    path: str
    """Decoded path without the query, as the engine will route it."""
    is_http11: bool
    headers: list[tuple[bytes, bytes]]
    fields: dict[bytes, bytes]
    """Header values by lower-case name; the first value if a name is repeated."""
    content_length: int
    is_chunked: bool
    keep_alive: bool
    expects_continue: bool


class RequestParser:
    """Parses one request's head, and its body if it is chunked."""

    __slots__ = ("_head_is_complete", "_messages", "_parser", "_raw_bytes", "_url", "body", "headers", "is_complete")

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = bytearray()
        self.is_complete = False
        self._url = b""
        self._messages = 0
        self._raw_bytes = 0
        self._head_is_complete = False
        self._parser: Any = httptools.HttpRequestParser(self)

    def on_message_begin(self) -> None:
        self._messages += 1

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_is_complete:  # trailers are dropped
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._head_is_complete = True

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = True

    def parse_head(self, data: bytes) -> RequestHead:
        """Return the head in `data`, which ends with an empty line.

        Raises:
            HttpError: The head is malformed, ambiguous or not supported.
        """
        upgrade = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            upgrade = True  # answered as a request without Upgrade
        except httptools.HttpParserInvalidMethodError:
            raise HttpError(501, "the method is not supported; use GET, HEAD or POST") from None
        except httptools.HttpParserError as error:
            raise HttpError(400, f"malformed request head: {error}") from None
        if not self._head_is_complete or self._messages != 1:
            raise HttpError(400, "malformed request head")
        head = self._checked()
        if not head.is_chunked:
            self._parser = None  # it refers to this object: without the cycle both are freed at once
        if upgrade:
            if head.is_chunked or head.method == b"CONNECT":
                raise HttpError(501, "protocol upgrades are not supported; send the request without Upgrade")
            head.keep_alive = False
        return head

    def feed_chunked(self, data: bytes) -> None:
        """Add received bytes to a chunked body; `is_complete` is then True if it has ended.

        Raises:
            HttpError: The framing is malformed, or is most of the body.
        """
        self._raw_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError as error:
            raise HttpError(400, f"malformed chunked body: {error}") from None
        if self._raw_bytes > CHUNK_OVERHEAD_BYTES + 8 * len(self.body):
            raise HttpError(400, "chunked body: too much framing; send larger chunks")

    @property
    def has_surplus(self) -> bool:
        """True if bytes of another request followed the chunked body."""
        return self._messages > 1

    def _checked(self) -> RequestHead:
        if len(self.headers) > MAX_HEADERS:
            raise HttpError(431, f"more than {MAX_HEADERS} header fields; send fewer")
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise HttpError(505, "HTTP version not supported; use HTTP/1.1")
        fields: dict[bytes, bytes] = {}
        for name, value in reversed(self.headers):
            fields[name.lower()] = value
        is_http11 = version == "1.1"
        hosts = sum(1 for name, _ in self.headers if len(name) == 4 and name.lower() == b"host")
        if hosts > 1 or (is_http11 and hosts == 0):
            raise HttpError(400, "exactly one Host header is required")
        method = self._parser.get_method()
        if method == b"CONNECT":
            raise HttpError(501, "CONNECT is not supported; use GET, HEAD or POST")
        encoding = fields.get(b"transfer-encoding")
        if encoding is not None and (encoding.lower() != b"chunked" or not is_http11):
            raise HttpError(501, "only Transfer-Encoding: chunked of HTTP/1.1 is supported")
        target = _origin_form(self._url)
        path = target.partition(b"?")[0].decode("latin-1")
        return RequestHead(
            method=method,
            target=target,
            path=unquote(path) if "%" in path else path,
            is_http11=is_http11,
            headers=self.headers,
            fields=fields,
            content_length=int(fields.get(b"content-length", b"0")),
            is_chunked=encoding is not None,
            keep_alive=is_http11 and self._parser.should_keep_alive(),
            expects_continue=is_http11 and fields.get(b"expect", b"").lower() == b"100-continue",
        )


def _origin_form(target: bytes) -> bytes:
    if target.startswith(b"/"):
        return target
    scheme, found, rest = target.partition(b"://")
    if found and scheme.lower() in (b"http", b"https"):
        slash = rest.find(b"/")
        return rest[slash:] if slash >= 0 else b"/"
    raise HttpError(400, "the request target must start with /")


def check_head_bytes(head: bytes) -> None:
    """Reject line endings and folded lines that parsers interpret differently.

    Raises:
        HttpError: A bare CR or LF, or a header that continues on the next line.
    """
    if head.count(b"\n") != head.count(b"\r\n") or head.count(b"\r") != head.count(b"\r\n"):
        raise HttpError(400, "malformed request head: lines must end with CRLF")
    if b"\r\n " in head or b"\r\n\t" in head:
        raise HttpError(400, "malformed request head: folded header lines are not supported")


def upstream_head(head: RequestHead, num_body_bytes: int, own: list[bytes], dropped: frozenset[bytes]) -> bytes:
    """Return the head to send to a replica: framing and connection headers are the router's own.

    `own` are complete header lines to add, and `dropped` lower-case names to leave out.
    """
    connection = head.fields.get(b"connection")
    named = frozenset(part.strip().lower() for part in connection.split(b",")) if connection else frozenset()
    lines = [head.method + b" " + head.target + b" HTTP/1.1"]
    for name, value in head.headers:
        lower = name.lower()
        if (
            lower in HOP_BY_HOP
            or lower == b"content-length"
            or lower in dropped
            or lower in named
            or lower.startswith(ROUTER_HEADER)
        ):
            continue
        lines.append(name + b": " + value)
    if not head.is_http11 and b"host" not in head.fields:
        lines.append(b"host: trimtab")
    if num_body_bytes or head.method not in (b"GET", b"HEAD"):
        lines.append(b"content-length: %d" % num_body_bytes)
    lines += own
    return b"\r\n".join(lines) + DELIMITER


@dataclass(slots=True)
class ResponseHead:
    """The head of a replica's response."""

    status: int
    reason: bytes
    headers: list[tuple[bytes, bytes]]
    is_chunked: bool
    content_length: int | None
    keep_alive: bool
    is_event_stream: bool

    def has_body(self, method: bytes) -> bool:
        """Return True if a body follows, given the request's method."""
        return method != b"HEAD" and self.status >= 200 and self.status not in (204, 304) and self.content_length != 0

    @property
    def ends_with_connection(self) -> bool:
        """True if only the end of the connection ends the body."""
        return not self.is_chunked and self.content_length is None

    def client_head(self, own: list[bytes], *, close: bool, chunked: bool) -> bytes:
        """Return the head for the client. `own` are complete header lines to add."""
        lines = [b"HTTP/1.1 %d %s" % (self.status, self.reason)]
        for name, value in self.headers:
            lower = name.lower()
            if lower in HOP_BY_HOP or lower.startswith(ROUTER_HEADER):
                continue
            lines.append(name + b": " + value)
        if chunked:
            lines.append(b"transfer-encoding: chunked")
        lines += own
        if close:
            lines.append(b"connection: close")
        return b"\r\n".join(lines) + DELIMITER


class ResponseParser:
    """Parses a replica's response: its head, then only the end of its body.

    `feed` parses received bytes and raises one of PARSE_ERRORS if they are not HTTP.
    """

    __slots__ = ("_headers", "_parser", "_reason", "feed", "has_surplus", "head_is_complete", "is_complete")

    def __init__(self) -> None:
        self.begin()
        self._parser = httptools.HttpResponseParser(self)
        self.feed: Callable[[bytes], object] = self._parser.feed_data

    def begin(self) -> None:
        """Prepare for the next response on the same connection, after the former one is complete."""
        self._headers: list[tuple[bytes, bytes]] = []
        self._reason = b""
        self.head_is_complete = False
        self.is_complete = False
        self.has_surplus = False
        """True if data followed the end of the response."""

    def on_message_begin(self) -> None:
        self.has_surplus = self.is_complete

    def on_status(self, reason: bytes) -> None:
        self._reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.head_is_complete:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.head_is_complete = True

    def on_message_complete(self) -> None:
        self.is_complete = True

    def head(self) -> ResponseHead:
        """Return the parsed head."""
        content_length: int | None = None
        is_chunked = is_event_stream = False
        for name, value in self._headers:
            lower = name.lower()
            if lower == b"content-length":
                content_length = int(value)
            elif lower == b"transfer-encoding":
                is_chunked = value.lower().endswith(b"chunked")
            elif lower == b"content-type":
                is_event_stream = value.startswith(b"text/event-stream")
        return ResponseHead(
            status=self._parser.get_status_code(),
            reason=self._reason,
            headers=self._headers,
            is_chunked=is_chunked,
            content_length=content_length,
            keep_alive=self._parser.should_keep_alive(),
            is_event_stream=is_event_stream,
        )


class DecodingResponseParser(ResponseParser):
    """A parser that also decodes the body, for clients of HTTP/1.0, which do not know chunks."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        super().__init__()

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def take_body(self) -> bytes:
        """Return the decoded bytes since the last call."""
        data = b"".join(self._pieces)
        self._pieces.clear()
        return data
