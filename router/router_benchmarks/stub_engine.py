"""An engine without a model, for measurements of routers: it reads a request and answers with a fixed stream.

    python -m router_benchmarks.stub_engine --port 9001

Completions answer with `max_tokens` SSE chunks of about 170 bytes, or with one JSON object without `"stream": true`.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import cast

import httptools
import orjson
import uvloop

EVENT = (
    b'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":0,"model":"stub","choices":'
    b'[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
)
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
ANSWER = (
    b'{"id":"chatcmpl-0","object":"chat.completion","created":0,"model":"stub","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":" word"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,'
    b'"total_tokens":2}}'
)
MODELS = b'{"object":"list","data":[{"id":"stub","object":"model","created":0,"owned_by":"stub"}]}'


class StubEngine(asyncio.Protocol):
    """One connection."""

    def __init__(self, chunk_seconds: float) -> None:
        self._chunk_seconds = chunk_seconds
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._url = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        body, self._body = b"".join(self._body), []
        if self._parser.get_method() == b"GET":
            self._answer(MODELS)
            return
        fields = orjson.loads(body)  # some routers write the body again, in another order
        if fields.get("stream"):
            self._transport.write(STREAM_HEAD)
            self._send_chunks(fields.get("max_tokens") or fields.get("max_completion_tokens") or 1)
        else:
            self._answer(ANSWER)

    def _answer(self, body: bytes) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )

    def _send_chunks(self, left: int) -> None:
        if left <= 0:
            self._transport.write(STREAM_END)
            return
        self._transport.write(CHUNK)
        asyncio.get_running_loop().call_later(self._chunk_seconds, self._send_chunks, left - 1)


async def serve(host: str, port: int, chunk_seconds: float) -> None:
    """Serve until cancelled."""
    server = await asyncio.get_running_loop().create_server(lambda: StubEngine(chunk_seconds), host, port)
    await server.serve_forever()


def main() -> None:
    """Serve on a port until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--chunk-seconds", type=float, default=0.002, help="interval of chunks (default: 0.002)")
    given = parser.parse_args()
    uvloop.run(serve(given.host, given.port, given.chunk_seconds))


if __name__ == "__main__":
    main()
