"""Malformed, oversized and slow input: a clear answer, a closed connection, and nothing reaches a replica."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from stub_upstream import Received, raw_client
from trimtab_router.proxy import client as client_module
from trimtab_router.proxy.http1 import MAX_HEAD_BYTES

if TYPE_CHECKING:
    from tests.router.conftest import RouterFactory

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\n"
SMUGGLED = b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: r\r\n\r\n"
CASES = {
    "length and chunks": (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + SMUGGLED, 400),
    "chunks and length": (HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + SMUGGLED, 400),
    "two lengths": (HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}", 400),
    "two different lengths": (HEAD + b"Content-Length: 2\r\nContent-Length: 40\r\n\r\n{}", 400),
    "list of lengths": (HEAD + b"Content-Length: 2, 2\r\n\r\n{}", 400),
    "signed length": (HEAD + b"Content-Length: +2\r\n\r\n{}", 400),
    "negative length": (HEAD + b"Content-Length: -2\r\n\r\n{}", 400),
    "huge length": (HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n", 400),
    "length with spaces in its name": (HEAD + b"Content-Length : 2\r\n\r\n{}", 400),
    "other encoding": (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", 400),
    "two encodings": (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + SMUGGLED, 501),
    "repeated encoding": (HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n" + SMUGGLED, 400),
    "chunks of HTTP/1.0": (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n" + SMUGGLED, 501),
    "folded header": (HEAD + b"X-A: b\r\n c\r\nContent-Length: 2\r\n\r\n{}", 400),
    "folded header with a tab": (HEAD + b"X-A: b\r\n\tc\r\nContent-Length: 2\r\n\r\n{}", 400),
    "bare line feeds": (b"POST / HTTP/1.1\nHost: r\nContent-Length: 2\n\n{}\r\n\r\n", 400),
    "bare carriage return": (HEAD + b"X-A: b\rContent-Length: 9\r\n\r\n", 400),
    "NUL in a header": (HEAD + b"X-A: b\x00c\r\n\r\n", 400),
    "colon missing": (HEAD + b"X-A\r\n\r\n", 400),
    "no host": (b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", 400),
    "two hosts": (HEAD + b"Host: s\r\nContent-Length: 2\r\n\r\n{}", 400),
    "no version": (b"GET /\r\n\r\n", 505),
    "other version": (b"GET / HTTP/2.0\r\nHost: r\r\n\r\n", 505),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 501),
    "unknown method": (b"BREW / HTTP/1.1\r\nHost: r\r\n\r\n", 501),
    "CONNECT": (b"CONNECT r:1 HTTP/1.1\r\nHost: r\r\n\r\n", 501),
    "target without slash": (b"GET version HTTP/1.1\r\nHost: r\r\n\r\n", 400),
    "asterisk": (b"OPTIONS * HTTP/1.1\r\nHost: r\r\n\r\n", 400),
    "upgrade with chunks": (
        HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n" + SMUGGLED,
        501,
    ),
    "size that is no number": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n", 400),
    "size too small": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n", 400),
    "size overflow": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}", 400),
    "negative size": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n{}\r\n", 400),
    "chunk without CRLF": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}0\r\n\r\n", 400),
    "head too large": (HEAD + b"X-A: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n", 431),
    "endless head": (HEAD + b"X-A: x\r\n" * (MAX_HEAD_BYTES // 8), 431),
    "too many headers": (HEAD + b"".join(b"X-%d: x\r\n" % number for number in range(300)) + b"\r\n", 431),
    "endless chunk extension": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2;" + b"x" * (1 << 17), 400),
    "tiny chunks of trailers": (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + b"T: x\r\n" * 20_000,
        400,
    ),
    "announced body too large": (HEAD + b"Content-Length: 100001\r\n\r\n", 413),
    "chunked body too large": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n30d40\r\n" + b"x" * 200_000, 413),
}


@pytest.mark.parametrize("name", CASES)
async def test_malformed_request_is_rejected_and_closed(routers: RouterFactory, name: str) -> None:
    data, status = CASES[name]
    router = await routers.start(await routers.upstream(), max_body_bytes=100_000)
    async with raw_client(router.port) as client:
        await client.send(data)
        response = await client.response()
        assert response.status == status, response.body
        assert json.loads(response.body)["error"]["message"]
        assert response.fields["connection"] == "close"
        assert await client.ended() == b""  # no second answer, so nothing was smuggled
    assert router.upstreams[0].requests == []
    assert router.dispatcher.body_bytes == 0


async def test_encoded_path_is_classified_as_the_engine_decodes_it(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream())
    async with raw_client(router.port) as client:
        await client.request(b"{}", "/v1/c%6fmpletions")
        await client.response()
    assert "x-trimtab-dispatch" in router.upstreams[0].requests[0].fields


async def test_absolute_target_is_sent_in_origin_form(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream())
    async with raw_client(router.port) as client:
        await client.request(b"", "http://evil.example/version?x", "GET")
        await client.response()
    assert router.upstreams[0].requests[0].head.startswith(b"GET /version?x HTTP/1.1\r\n")


async def test_upgrade_is_ignored_and_connection_closed(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream())
    async with raw_client(router.port) as client:
        await client.request(b"{}", "/v1/completions", "POST", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c")
        assert (await client.response()).status == 200
        assert await client.ended() == b""
    assert "upgrade" not in router.upstreams[0].requests[0].fields


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 300_000, b'{"messages": [{"role": 3}]}']
)
async def test_bodies_that_are_no_request_reach_the_engine(routers: RouterFactory, body: bytes) -> None:
    """The engine's errors are better than any that the router could write."""

    async def reject(request: Received) -> None:
        await request.answer(400, b'{"error": {"message": "bad"}}')

    router = await routers.start(await routers.upstream(reject))
    async with raw_client(router.port) as client:
        await client.request(body, "/v1/chat/completions")
        assert (await client.response()).status == 400
    assert router.upstreams[0].requests[0].body == body


async def test_slow_head_is_answered_with_408(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream())
    with patch.object(client_module, "HEAD_SECONDS", 0.1):
        async with raw_client(router.port) as client:
            await client.send(b"POST /v1/completions HTTP/1.1\r\nHost")
            assert (await client.response()).status == 408
            assert await client.ended() == b""


async def test_stalled_body_is_answered_with_408(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream())
    with patch.object(client_module, "BODY_STALL_SECONDS", 0.1):
        async with raw_client(router.port) as client:
            await client.send(HEAD + b"Content-Length: 100\r\n\r\nabc")
            assert (await client.response()).status == 408
    assert router.dispatcher.body_bytes == 0


async def test_trickled_body_is_limited_in_total(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream())
    with patch.object(client_module, "BODY_SECONDS", 0.3):
        async with raw_client(router.port) as client:
            await client.send(HEAD + b"Content-Length: 100000\r\n\r\n")
            response = asyncio.create_task(client.response())
            while not response.done():
                await client.send(b"x")
                await asyncio.sleep(0.02)
            assert (await response).status == 408


async def test_idle_connection_is_closed(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream())
    with patch.object(client_module, "IDLE_SECONDS", 0.1):
        async with raw_client(router.port) as client:
            assert await client.ended() == b""


async def test_client_that_never_reads_is_cut(routers: RouterFactory) -> None:
    async def endless(request: Received) -> None:
        await request.send(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n")
        while True:
            await request.send(b"x" * (1 << 16))

    router = await routers.start(await routers.upstream(endless))
    with patch.object(client_module, "WRITE_STALL_SECONDS", 0.2):
        async with raw_client(router.port) as client:
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await client.request(b"{}")
            await router.until(lambda: router.server.num_connections == 1)
            await router.until(lambda: router.server.num_connections == 0)
    assert router.dispatcher.demand.in_flight == 0


async def test_requests_without_reading_responses_stay_bounded(routers: RouterFactory) -> None:
    async def large(request: Received) -> None:
        await request.answer(200, b"x" * 100_000)

    router = await routers.start(await routers.upstream(large))
    async with raw_client(router.port) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(200):
            client.writer.write(HEAD + b"Content-Length: 2\r\n\r\n{}")
        before = -1
        while before != len(router.upstreams[0].requests):
            before = len(router.upstreams[0].requests)
            await asyncio.sleep(0.2)
        (connection,) = router.server._connections
        assert connection.transport.get_write_buffer_size() < 300_000
        assert before < 200
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(200):
            assert (await client.response()).status == 200


async def test_bodies_beyond_the_memory_bound_are_rejected(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream(), max_held_bytes=1 << 20)
    async with raw_client(router.port) as first, raw_client(router.port) as second:
        await first.send(HEAD + b"Content-Length: 2000000\r\n\r\n" + b"x" * 900_000)
        await router.until(lambda: router.dispatcher.body_bytes == 900_000)
        await second.send(HEAD + b"Content-Length: 2000000\r\n\r\n" + b"x" * 900_000)
        response = await second.response()
        assert response.status == 429
        assert response.fields["x-trimtab-dropped"] == "body-memory"
        assert int(response.fields["retry-after"]) > 0
    await router.until(lambda: router.dispatcher.body_bytes == 0)


@pytest.mark.parametrize(
    "response",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-A: " + b"x" * (MAX_HEAD_BYTES + 10),
        b"HTTP/1.1 200 OK\r\nX-A: b\nX-C: d\r\n\r\n",
    ],
)
async def test_malformed_response_head_becomes_502(routers: RouterFactory, response: bytes) -> None:
    async def lie(request: Received) -> None:
        await request.send(response)

    router = await routers.start(*[await routers.upstream(lie) for _ in range(3)])
    async with raw_client(router.port) as client:
        await client.request(b"{}")
        answer = await client.response()
    assert answer.status == 502
    assert b"invalid response" in answer.body or b"too large" in answer.body


async def test_surplus_response_bytes_cut_the_connection(routers: RouterFactory) -> None:
    """A second response in the same data must not reach the next request."""

    async def lie(request: Received) -> None:
        await request.send(
            b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
        )

    router = await routers.start(await routers.upstream(lie))
    async with raw_client(router.port) as client:
        await client.request(b"{}")
        assert b"evil" not in await client.ended()


async def test_unrequested_response_closes_the_replica_connection(routers: RouterFactory) -> None:
    async def lie(request: Received) -> None:
        await request.answer()
        await asyncio.sleep(0.05)
        await request.send(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil")

    router = await routers.start(await routers.upstream(lie))
    async with raw_client(router.port) as client:
        for _ in range(2):
            await client.request(b"{}")
            assert b"evil" not in (await client.response()).body
            await asyncio.sleep(0.1)
    assert router.upstreams[0].num_connections == 2


async def test_interim_responses_are_not_passed_on(routers: RouterFactory) -> None:
    async def handler(request: Received) -> None:
        await request.send(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
        await request.answer()

    router = await routers.start(await routers.upstream(handler))
    async with raw_client(router.port) as client:
        await client.request(b"{}")
        assert (await client.response()).status == 200
