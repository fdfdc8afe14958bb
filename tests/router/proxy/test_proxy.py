"""The proxy on real sockets: pass-through, keep-alive, framing, backpressure, cancellation."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import uvloop
from stub_upstream import JSON_ANSWER, Received, raw_client

if TYPE_CHECKING:
    from tests.router.conftest import RouterFactory

BODY = json.dumps({"model": "tiny", "prompt": "hello"}).encode()


async def test_loop_is_uvloop(routers: RouterFactory) -> None:
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)


async def test_response_bytes_pass_through_untouched(routers: RouterFactory) -> None:
    async def stream(request: Received) -> None:
        await request.begin_stream()
        for number in range(3):
            await request.event(f'{{"n": {number}}}')
        await request.end_stream()

    router = await routers.start(await routers.upstream(stream))
    async with raw_client(router.port) as client:
        await client.request(BODY)
        response = await client.response()
    assert response.status == 200
    assert response.fields["content-type"] == "text/event-stream"
    assert response.fields["x-trimtab-replica"] == router.upstreams[0].endpoint.name
    expected = [b'data: {"n": %d}\n\n' % number for number in range(3)] + [b"data: [DONE]\n\n"]
    assert response.raw_body == b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in expected) + b"0\r\n\r\n"


async def test_request_body_and_headers_reach_the_replica(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream())
    async with raw_client(router.port) as client:
        await client.request(
            BODY, "/v1/completions?a=b", "POST", "X-Request-Id: abc", "X-Other: 1", "Connection: x-other"
        )
        await client.response()
    (received,) = router.upstreams[0].requests
    assert received.head.startswith(b"POST /v1/completions?a=b HTTP/1.1\r\n")
    assert received.body == BODY
    assert received.fields["x-request-id"] == "abc"
    assert received.fields["host"] == "router"
    assert received.fields["x-trimtab-dispatch"] == f"{router.registry.router_id}:1"
    assert "x-other" not in received.fields  # a header of this connection only
    assert "connection" not in received.fields


async def test_chunked_request_reaches_replica_with_length(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream())
    async with raw_client(router.port) as client:
        await client.send(b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhel")
        await asyncio.sleep(0.02)
        await client.send(b"lo\r\n1\r\n!\r\n0\r\nTrailer: x\r\n\r\n")
        assert (await client.response()).status == 200
        await client.request(BODY)  # the connection goes on
        assert (await client.response()).status == 200
    received = router.upstreams[0].requests[0]
    assert received.body == b"hello!"
    assert received.fields["content-length"] == "6"
    assert "transfer-encoding" not in received.fields
    assert "trailer" not in received.fields


async def test_connections_to_replicas_are_reused(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream())
    for _ in range(3):
        async with raw_client(router.port) as client:
            for _ in range(3):
                await client.request(BODY)
                assert (await client.response()).body == JSON_ANSWER
    assert router.upstreams[0].num_connections == 1
    assert len(router.upstreams[0].requests) == 9


async def test_pipelined_requests_are_answered_in_order(routers: RouterFactory) -> None:
    async def echo(request: Received) -> None:
        await request.answer(200, request.body)

    router = await routers.start(await routers.upstream(echo))
    async with raw_client(router.port) as client:
        parts = [
            b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 2\r\n\r\n%02d" % number
            for number in range(20)
        ]
        data = b"".join(parts)
        await client.send(data[:1000])
        await asyncio.sleep(0.02)
        await client.send(data[1000:])
        assert [(await client.response()).body for _ in range(20)] == [b"%02d" % number for number in range(20)]


async def test_head_and_empty_responses_keep_the_connection(routers: RouterFactory) -> None:
    async def handler(request: Received) -> None:
        if request.head.startswith(b"HEAD"):
            await request.send(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n")
        else:
            await request.send(b"HTTP/1.1 204 No Content\r\n\r\n")

    router = await routers.start(await routers.upstream(handler))
    async with raw_client(router.port) as client:
        await client.request(b"", "/version", "HEAD")
        assert (await client.response(has_body=False)).fields["content-length"] == "50"
        await client.request(b"", "/version", "GET")
        assert (await client.response(has_body=False)).status == 204
        await client.request(b"", "/version", "GET")
        assert (await client.response(has_body=False)).status == 204
    assert router.upstreams[0].num_connections == 1


async def test_body_until_close_ends_with_the_connection(routers: RouterFactory) -> None:
    async def handler(request: Received) -> None:
        await request.send(b"HTTP/1.0 200 OK\r\n\r\nall of it")
        request.writer.close()

    router = await routers.start(await routers.upstream(handler))
    async with raw_client(router.port) as client:
        await client.request(BODY)
        response = await client.response()
    assert response.raw_body == b"all of it"
    assert response.fields["connection"] == "close"


async def test_old_clients_get_bodies_without_chunks(routers: RouterFactory) -> None:
    async def stream(request: Received) -> None:
        await request.begin_stream()
        await request.event("one")
        await request.end_stream()

    router = await routers.start(await routers.upstream(stream))
    async with raw_client(router.port) as client:
        await client.send(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
        response = await client.response()
    assert response.raw_body == b"data: one\n\ndata: [DONE]\n\n"
    assert "transfer-encoding" not in response.fields


async def test_expect_continue_is_answered_before_the_body(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream())
    async with raw_client(router.port) as client:
        await client.send(
            b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
        )
        assert (await client.head())[0] == 100
        await client.send(b"{}")
        assert (await client.response()).status == 200
    assert "expect" not in router.upstreams[0].requests[0].fields


async def test_client_that_leaves_aborts_the_replica_at_once(routers: RouterFactory) -> None:
    gone = asyncio.Event()

    async def generate(request: Received) -> None:
        await request.wait_closed()
        gone.set()

    router = await routers.start(await routers.upstream(generate))
    async with raw_client(router.port) as client:
        await client.request(BODY)
        await router.upstreams[0].arrived()
        client.cut()
        async with asyncio.timeout(5):
            await gone.wait()
    await router.until(lambda: router.dispatcher.demand.in_flight == 0)
    assert router.dispatcher.body_bytes == 0
    assert router.metric("requests_total", route="generate", code="499") == 1


async def test_half_closed_client_counts_as_gone(routers: RouterFactory) -> None:
    async def generate(request: Received) -> None:
        await request.wait_closed()

    router = await routers.start(await routers.upstream(generate))
    async with raw_client(router.port) as client:
        await client.request(BODY)
        await router.upstreams[0].arrived()
        client.writer.write_eof()
        await router.until(lambda: router.dispatcher.demand.in_flight == 0)


async def test_slow_reader_pauses_the_replica(routers: RouterFactory) -> None:
    size, sent = 64 << 20, 0

    async def stream(request: Received) -> None:
        nonlocal sent
        await request.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size >> 16):
            await request.send(b"x" * (1 << 16))
            sent += 1 << 16

    router = await routers.start(await routers.upstream(stream))
    async with raw_client(router.port) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.request(BODY)
        await router.upstreams[0].arrived()
        before = -1
        while before != sent:  # until nothing more fits
            before = sent
            await asyncio.sleep(0.2)
        (connection,) = router.server._connections
        assert connection.transport.get_write_buffer_size() < 1 << 20
        assert sent < size // 2
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        response = await client.response()
    assert len(response.raw_body) == size


async def test_replica_connection_is_usable_after_a_slow_reader(routers: RouterFactory) -> None:
    async def large(request: Received) -> None:
        await request.answer(200, b"x" * (8 << 20))

    router = await routers.start(await routers.upstream(large))
    async with raw_client(router.port) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.request(BODY)
        await asyncio.sleep(0.2)
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len((await client.response()).raw_body) == 8 << 20
        await client.request(BODY)
        assert len((await client.response()).raw_body) == 8 << 20


async def test_large_request_body_arrives_whole(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream())
    body = json.dumps({"model": "tiny", "prompt": "x" * (20 << 20)}).encode()
    async with raw_client(router.port) as client:
        await client.request(body)
        assert (await client.response()).status == 200
    assert router.upstreams[0].requests[0].body == body
    assert router.dispatcher.body_bytes == 0


async def test_multipart_body_is_forwarded(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream())
    body = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n\x00\xff\r\n--b--\r\n'
    async with raw_client(router.port) as client:
        await client.request(body, "/v1/audio/transcriptions", "POST", "Content-Type: multipart/form-data; boundary=b")
        assert (await client.response()).status == 200
    assert router.upstreams[0].requests[0].body == body
    assert "x-trimtab-dispatch" not in router.upstreams[0].requests[0].fields


async def test_why_header_explains_the_choice(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream(), await routers.upstream())
    async with raw_client(router.port) as client:
        await client.request(BODY, "/v1/completions", "POST", "x-trimtab-why: 1")
        why = (await client.response()).fields["x-trimtab-why"]
        await client.request(BODY)
        assert "x-trimtab-why" not in (await client.response()).fields
    assert why.startswith("rule=least-request; best=replica-")
    assert "; next=replica-" in why


async def test_own_paths_are_answered_without_replicas(routers: RouterFactory) -> None:
    router = await routers.start(served_models=("tiny",))
    async with raw_client(router.port) as client:
        for path, status in (("/health", 200), ("/readyz", 200), ("/load", 200), ("/metrics", 404), ("/version", 503)):
            await client.request(b"", path, "GET")
            assert (await client.response()).status == status
        await client.request(b"", "/v1/models", "GET")
        assert json.loads((await client.response()).body)["data"][0]["id"] == "tiny"


async def test_client_cannot_set_router_headers(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream())
    spoofed = (
        "x-trimtab-tenant: vip",
        "x-trimtab-priority: high",
        "X-Trimtab-Dispatch: other:1",
        "x-trimtab-replica: r",
    )
    async with raw_client(router.port) as client:
        await client.request(BODY, "/v1/completions", "POST", *spoofed)
        await client.response()
    fields = router.upstreams[0].requests[0].fields
    assert {name for name in fields if name.startswith("x-trimtab-")} == {"x-trimtab-dispatch"}
    assert fields["x-trimtab-dispatch"].startswith(router.registry.router_id)


async def test_usage_of_answers_is_counted(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream())
    async with raw_client(router.port) as client:
        await client.request(BODY)
        await client.response()
    assert router.metric("prompt_tokens_actual_total") == 12
    assert router.metric("cached_tokens_actual_total") == 4
    assert router.metric("requests_total", route="generate", code="200") == 1


async def test_adapter_requests_reach_all_replicas(routers: RouterFactory) -> None:
    async def refuse(request: Received) -> None:
        await request.answer(400, b'{"error": {"message": "no such adapter"}}')

    router = await routers.start(await routers.upstream(), await routers.upstream(), await routers.upstream(refuse))
    async with raw_client(router.port) as client:
        await client.request(b'{"lora_name": "a"}', "/v1/load_lora_adapter")
        response = await client.response()
    assert response.status == 400
    assert b"no such adapter" in response.body
    assert all(len(upstream.requests) == 1 for upstream in router.upstreams)
