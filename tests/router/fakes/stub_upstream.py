"""A scriptable replica on a real socket, and a raw client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from trimtab_router.endpoints.endpoint import Endpoint

DEADLINE_SECONDS = 20.0
JSON_ANSWER = b'{"choices":[],"usage":{"prompt_tokens":12,"prompt_tokens_details":{"cached_tokens":4}}}'


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@dataclass
class Received:
    """One request that a replica has received."""

    head: bytes
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def fields(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status: int = 200, body: bytes = JSON_ANSWER, *headers: str) -> None:
        lines = [
            f"HTTP/1.1 {status} Status",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *headers,
        ]
        await self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    async def begin_stream(self) -> None:
        await self.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    async def event(self, text: str) -> None:
        data = f"data: {text}\n\n".encode()
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self.event("[DONE]")
        await self.send(b"0\r\n\r\n")

    def cut(self) -> None:
        """Reset the connection."""
        self.writer.transport.abort()

    async def wait_closed(self) -> None:
        """Wait until the router closes the connection."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            try:
                assert await self.reader.read(1) == b""
            except ConnectionError:
                return


Handler = Callable[[Received], Awaitable[None]]


async def answer(request: Received) -> None:
    """Answer with 200 and a usage."""
    await request.answer()


@dataclass
class StubUpstream:
    """A replica whose responses a test decides."""

    handler: Handler = answer
    requests: list[Received] = field(default_factory=list)
    num_connections: int = 0
    port: int = 0
    server: asyncio.Server | None = None

    async def start(self) -> StubUpstream:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        assert self.server is not None
        self.server.close()
        for request in self.requests:
            request.cut()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(f"replica-{self.port}", "127.0.0.1", self.port)

    async def arrived(self, number: int = 1) -> Received:
        """Wait for the request of a number."""
        await until(lambda: len(self.requests) >= number)
        return self.requests[number - 1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                request = Received(head, b"", reader, writer)
                request.body = await reader.readexactly(int(request.fields.get("content-length", "0")))
                self.requests.append(request)
                await self.handler(request)
        except (OSError, asyncio.IncompleteReadError):
            writer.close()


@dataclass
class Response:
    """One response as a client received it."""

    status: int
    fields: dict[str, str]
    raw_body: bytes
    """Bytes after the head, with their framing."""

    @property
    def body(self) -> bytes:
        """The decoded body."""
        if self.fields.get("transfer-encoding") != "chunked":
            return self.raw_body
        rest, pieces = self.raw_body, []
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            pieces.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        return b"".join(pieces)


class RawClient:
    """A client that sends any bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def request(
        self, body: bytes = b"{}", path: str = "/v1/completions", method: str = "POST", *headers: str
    ) -> None:
        lines = [f"{method} {path} HTTP/1.1", "Host: router", f"Content-Length: {len(body)}", *headers]
        await self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(DEADLINE_SECONDS):
            head = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return int(first.split(" ")[1]), fields

    async def response(self, *, has_body: bool = True) -> Response:
        status, fields = await self.head()
        async with asyncio.timeout(DEADLINE_SECONDS):
            if not has_body:
                raw = b""
            elif fields.get("transfer-encoding") == "chunked":
                raw = b""
                while not raw.endswith(b"0\r\n\r\n"):
                    piece = await self.reader.read(65536)
                    assert piece, f"cut after {raw!r}"
                    raw += piece
            elif "content-length" in fields:
                raw = await self.reader.readexactly(int(fields["content-length"]))
            else:
                raw = await self.reader.read()
        return Response(status, fields, raw)

    async def ended(self) -> bytes:
        """Return the bytes until the router closes the connection."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    def cut(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def raw_client(port: int) -> AsyncIterator[RawClient]:
    """Connect to the router."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    client = RawClient(reader, writer)
    try:
        yield client
    finally:
        client.cut()
