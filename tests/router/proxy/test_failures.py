"""Failures of replicas: retries before the first byte, breakers, error events afterwards."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest
from stub_upstream import Received, answer, raw_client
from trimtab_router.proxy.breaker import OPEN_SECONDS, Breaker, RetryBudget

if TYPE_CHECKING:
    from tests.router.conftest import RouterFactory

BODY = b'{"prompt": "hello", "stream": true}'


def status(code: int) -> object:
    async def handler(request: Received) -> None:
        await request.answer(code, b'{"error": {"message": "no"}}', "retry-after: 7")

    return handler


async def cut(request: Received) -> None:
    request.cut()


async def close(request: Received) -> None:
    request.writer.close()


@pytest.mark.parametrize("failure", [status(429), status(502), status(503), status(504), cut, close])
async def test_failure_before_first_byte_is_retried_elsewhere(routers: RouterFactory, failure) -> None:  # type: ignore[no-untyped-def]
    bad, good = await routers.upstream(failure), await routers.upstream()
    router = await routers.start(bad, good)
    async with raw_client(router.port) as client:
        for _ in range(12):  # whichever replica is chosen first
            await client.request(BODY)
            response = await client.response()
            assert response.status == 200
            assert response.fields["x-trimtab-replica"] == good.endpoint.name
    assert len(good.requests) == 12
    assert good.requests[0].body == BODY
    assert bad.requests


@pytest.mark.parametrize("code", [400, 401, 404, 413, 500])
async def test_other_errors_are_not_retried(routers: RouterFactory, code: int) -> None:
    router = await routers.start(*[await routers.upstream(status(code)) for _ in range(2)])  # type: ignore[arg-type]
    async with raw_client(router.port) as client:
        await client.request(BODY)
        response = await client.response()
    assert response.status == code
    assert response.body == b'{"error": {"message": "no"}}'
    assert sum(len(upstream.requests) for upstream in router.upstreams) == 1


async def test_refused_connection_is_retried_elsewhere(routers: RouterFactory) -> None:
    gone, good = await routers.upstream(), await routers.upstream()
    await gone.stop()
    router = await routers.start(gone, good)
    async with raw_client(router.port) as client:
        for _ in range(12):
            await client.request(BODY)
            assert (await client.response()).status == 200
    assert router.metric("retries_total", cause="connect") >= 1


async def test_three_failures_end_with_502(routers: RouterFactory) -> None:
    router = await routers.start(*[await routers.upstream(cut) for _ in range(4)])
    async with raw_client(router.port) as client:
        await client.request(BODY, "/v1/completions", "POST", "X-Request-Id: abc")
        response = await client.response()
    assert response.status == 502
    assert response.fields["x-request-id"] == "abc"
    assert "send the request again" in json.loads(response.body)["error"]["message"]
    tried = [len(upstream.requests) for upstream in router.upstreams]
    assert sorted(tried) == [0, 1, 1, 1]


async def test_status_of_the_last_attempt_is_passed_on(routers: RouterFactory) -> None:
    router = await routers.start(*[await routers.upstream(status(429)) for _ in range(2)])  # type: ignore[arg-type]
    async with raw_client(router.port) as client:
        await client.request(BODY)
        response = await client.response()
    assert response.status == 429
    assert response.fields["retry-after"] == "7"
    assert [len(upstream.requests) for upstream in router.upstreams] == [1, 1]


async def test_only_replica_that_drains_is_waited_for(routers: RouterFactory) -> None:
    """A replica that answers 503 while its successor starts: the request waits instead of failing."""
    old, new = await routers.upstream(status(503)), await routers.upstream()  # type: ignore[arg-type]
    router = await routers.start(old)
    async with raw_client(router.port) as client:
        await client.request(BODY)
        await old.arrived()
        await asyncio.sleep(0.1)
        router.set_endpoints(new)
        response = await client.response()
    assert response.status == 200
    assert response.fields["x-trimtab-replica"] == new.endpoint.name


async def test_draining_router_accepts_until_no_request_arrives(
    routers: RouterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proxies of nodes may send connections here for seconds after the endpoint is gone, of any route."""
    monkeypatch.setattr("trimtab_router.proxy.server.QUIET_SECONDS", 0.3)
    router = await routers.start(await routers.upstream())
    draining = asyncio.create_task(router.server.drain())
    for _ in range(8):
        async with raw_client(router.port) as client:
            await client.request(b"", "/v1/models", "GET")
            assert (await client.response()).status == 200
        await asyncio.sleep(0.1)
    assert not draining.done()
    async with asyncio.timeout(2.0):
        await draining


async def test_probes_do_not_prolong_a_drain(routers: RouterFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab_router.proxy.server.QUIET_SECONDS", 1.0)
    router = await routers.start(await routers.upstream())
    draining = asyncio.create_task(router.server.drain())
    async with raw_client(router.port) as client:
        await asyncio.sleep(0.8)
        await client.request(b"", "/health", "GET")
        assert (await client.response()).status == 503
    async with asyncio.timeout(0.8):
        await draining


async def test_stale_idle_connection_is_no_failure(routers: RouterFactory) -> None:
    async def answer_then_close(request: Received) -> None:
        await answer(request)
        await asyncio.sleep(0.05)
        request.cut()

    router = await routers.start(await routers.upstream(answer_then_close))
    async with raw_client(router.port) as client:
        for _ in range(5):
            await client.request(BODY)
            assert (await client.response()).status == 200
            await asyncio.sleep(0.045)
    assert router.metric("breaker_opened_total") == 0
    assert router.metric("requests_total", route="generate", code="502") == 0


async def test_post_that_is_not_repeatable_is_sent_once(routers: RouterFactory) -> None:
    router = await routers.start(*[await routers.upstream(cut) for _ in range(2)])
    async with raw_client(router.port) as client:
        await client.request(b"x", "/v1/files")
        assert (await client.response()).status == 502
    assert sum(len(upstream.requests) for upstream in router.upstreams) == 1


async def test_stream_cut_after_first_byte_ends_with_an_error_event(routers: RouterFactory) -> None:
    async def stream(request: Received) -> None:
        await request.begin_stream()
        await request.event("one")
        await asyncio.sleep(0.05)
        request.cut()

    router = await routers.start(await routers.upstream(stream), await routers.upstream(stream))
    async with raw_client(router.port) as client:
        await client.request(BODY)
        response = await client.response()
        assert await client.ended() == b""
    one, error, done = response.body.removesuffix(b"\n\n").split(b"\n\n")
    assert (one, done) == (b"data: one", b"data: [DONE]")
    assert json.loads(error.removeprefix(b"data: "))["error"]["type"] == "service_unavailable"
    assert sum(len(upstream.requests) for upstream in router.upstreams) == 1
    assert router.metric("interrupted_total") == 1


async def test_stream_cut_before_its_first_event_ends_with_an_error_event(routers: RouterFactory) -> None:
    async def stream(request: Received) -> None:
        await request.begin_stream()
        await asyncio.sleep(0.05)
        request.cut()

    router = await routers.start(await routers.upstream(stream))
    async with raw_client(router.port) as client:
        await client.request(BODY)
        response = await client.response()
    assert response.body.startswith(b'data: {"error":')


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/messages", {"type": "error", "error": {"type": "api_error"}}),
        ("/v1/responses", {"type": "error", "code": "server_error"}),
    ],
)
async def test_error_event_has_the_format_of_the_api(routers: RouterFactory, path: str, expected: object) -> None:
    async def stream(request: Received) -> None:
        await request.begin_stream()
        await request.event("one")
        await asyncio.sleep(0.05)
        request.cut()

    router = await routers.start(await routers.upstream(stream))
    async with raw_client(router.port) as client:
        await client.request(b"{}", path)
        _, event, _ = (await client.response()).body.split(b"\n\n")
    name, _, data = event.partition(b"\ndata: ")
    fields = json.loads(data)
    assert name == b"event: error"
    fields.get("error", fields).pop("message")
    assert {key: fields[key] for key in expected} == expected  # type: ignore[attr-defined]


async def test_errors_of_messages_have_the_format_of_anthropic(routers: RouterFactory) -> None:
    router = await routers.start(max_hold_seconds=0.0)
    async with raw_client(router.port) as client:
        await client.request(b"{}", "/v1/messages")
        response = await client.response()
    assert response.status == 503
    assert json.loads(response.body)["error"]["type"] == "overloaded_error"


async def test_stream_cut_within_a_chunk_is_cut(routers: RouterFactory) -> None:
    """The client must not take an error event for a part of the chunk."""

    async def stream(request: Received) -> None:
        await request.begin_stream()
        await request.send(b"40\r\ndata: half")
        await asyncio.sleep(0.05)
        request.cut()

    router = await routers.start(await routers.upstream(stream))
    async with raw_client(router.port) as client:
        await client.request(BODY)
        await client.head()
        assert await client.ended() == b"40\r\ndata: half"


async def test_answer_cut_after_first_byte_is_cut(routers: RouterFactory) -> None:
    async def half(request: Received) -> None:
        await request.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
        await asyncio.sleep(0.05)
        request.writer.close()

    router = await routers.start(await routers.upstream(half))
    async with raw_client(router.port) as client:
        await client.request(BODY)
        await client.head()
        assert await client.ended() == b"{"
    assert router.metric("interrupted_total") == 1


async def test_breaker_opens_on_transport_errors_only(routers: RouterFactory) -> None:
    busy = await routers.upstream(status(503))  # type: ignore[arg-type]
    broken, good = await routers.upstream(cut), await routers.upstream()
    router = await routers.start(busy, broken, good)
    async with raw_client(router.port) as client:
        for _ in range(60):
            await client.request(BODY)
            assert (await client.response()).status == 200
            if len(broken.requests) == 3:
                break
        before = len(broken.requests), len(busy.requests)
        for _ in range(12):
            await client.request(BODY)
            assert (await client.response()).status == 200
    assert len(broken.requests) == before[0] == 3
    assert len(busy.requests) > before[1]
    assert router.metric("breaker_opened_total") == 1


def test_breaker_lets_one_probe_through_after_a_pause() -> None:
    breaker = Breaker()
    for now in (0.0, 1.0, 2.0):
        assert breaker.allows(now)
        breaker.failed(now)
    assert not breaker.allows(2.0 + OPEN_SECONDS / 2)
    assert breaker.allows(2.0 + OPEN_SECONDS)
    breaker.sent()
    assert not breaker.allows(2.0 + OPEN_SECONDS)
    breaker.failed(4.5)
    assert not breaker.allows(5.0)
    assert breaker.allows(6.5)
    breaker.sent()
    breaker.succeeded()
    assert breaker.allows(6.5)
    assert not breaker.is_open


def test_breaker_forgets_old_failures() -> None:
    breaker = Breaker()
    for now in (0.0, 5.0, 11.0, 17.0):
        assert not breaker.failed(now)
    assert not breaker.is_open


def test_retry_budget_is_a_fifth_of_requests() -> None:
    budget = RetryBudget()
    while budget.spend():
        pass
    for _ in range(100):
        budget.earn()
    assert sum(budget.spend() for _ in range(100)) == 20


async def test_exhausted_budget_ends_retries(routers: RouterFactory) -> None:
    router = await routers.start(*[await routers.upstream(status(429)) for _ in range(2)])  # type: ignore[arg-type]
    while router.dispatcher._budget.spend():
        pass
    async with raw_client(router.port) as client:
        await client.request(BODY)
        assert (await client.response()).status == 429
    assert sum(len(upstream.requests) for upstream in router.upstreams) == 1
