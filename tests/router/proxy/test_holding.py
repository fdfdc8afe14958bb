"""Late binding: requests are held while no replica has room, and dispatched in fair order when one has."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
import trimtab_router
from stub_upstream import Received, StubUpstream, raw_client
from trimtab_router.proxy import dispatcher as dispatcher_module
from trimtab_router.scoring.state import StepTime

if TYPE_CHECKING:
    from tests.router.conftest import RouterFactory, RunningRouter

BODY = b'{"prompt": "hello"}'
STEP = StepTime(base=0.01, per_token=0.0001, per_sequence=0.0, per_context=0.0)


def set_load(router: RunningRouter, upstream: StubUpstream, prefill_tokens: float) -> None:
    """Report a replica's queue as its state stream would."""
    state = router.registry._replicas[upstream.endpoint.name].state
    state.step_time, state.token_budget, state.prefill_tokens = STEP, 1000, prefill_tokens
    state.reported_at = 0.0
    router.registry.on_change()


async def post(port: int, body: bytes = BODY, *headers: str) -> tuple[int, dict[str, str], bytes]:
    async with raw_client(port) as client:
        await client.request(body, "/v1/completions", "POST", *headers)
        response = await client.response()
        return response.status, response.fields, response.body


def dispatched(upstream: StubUpstream) -> list[bytes]:
    """Return the bodies in the order of their dispatch: several connections may be read in another order."""
    ordered = sorted(upstream.requests, key=lambda request: int(request.fields["x-trimtab-dispatch"].split(":")[1]))
    return [request.body for request in ordered]


@pytest.mark.parametrize(("tokens", "is_held"), [(0, False), (1000, False), (1100, True)])
async def test_room_is_a_queue_of_at_most_one_full_step(routers: RouterFactory, tokens: int, is_held: bool) -> None:
    router = await routers.start(await routers.upstream())
    set_load(router, router.upstreams[0], tokens)
    answer = asyncio.create_task(post(router.port))
    await asyncio.sleep(0.1)
    assert router.dispatcher.num_held == is_held
    set_load(router, router.upstreams[0], 0)
    assert (await answer)[0] == 200


async def test_request_is_held_until_the_queue_is_short(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream())
    set_load(router, router.upstreams[0], 5000)
    answer = asyncio.create_task(post(router.port))
    await router.held(1)
    assert router.dispatcher.demand.sequence == 1
    await asyncio.sleep(0.1)
    assert router.upstreams[0].requests == []
    set_load(router, router.upstreams[0], 0)
    assert (await answer)[0] == 200
    assert router.dispatcher.num_held == 0
    assert router.dispatcher.demand.sequence == 2
    assert router.metric("queue_seconds_sum", band="0", tenant="") > 0.1


async def test_short_queue_of_any_replica_ends_the_hold(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream(), await routers.upstream())
    for upstream in router.upstreams:
        set_load(router, upstream, 5000)
    answer = asyncio.create_task(post(router.port))
    await router.held(1)
    set_load(router, router.upstreams[1], 0)
    assert (await answer)[1]["x-trimtab-replica"] == router.upstreams[1].endpoint.name


async def test_held_requests_of_a_tenant_keep_their_order(routers: RouterFactory) -> None:
    router = await routers.start(max_hold_seconds=30.0)
    answers = []
    for number in range(20):
        answers.append(asyncio.create_task(post(router.port, b'{"prompt": "%d"}' % number)))
        await router.held(number + 1)
    upstream = await routers.upstream()
    router.set_endpoints(upstream)
    assert {(await answer)[0] for answer in answers} == {200}
    assert dispatched(upstream) == [b'{"prompt": "%d"}' % number for number in range(20)]


async def test_requests_wait_for_the_first_replica(routers: RouterFactory) -> None:
    """At zero replicas nothing is lost, and all requests are spread over the replicas that appear."""
    router = await routers.start()
    assert router.server.is_ready
    answers = [asyncio.create_task(post(router.port)) for _ in range(200)]
    await router.held(200)
    assert router.dispatcher.demand.held > 0
    upstreams = [await routers.upstream() for _ in range(2)]
    router.set_endpoints(*upstreams)
    assert Counter([(await answer)[0] for answer in answers]) == {200: 200}
    assert min(len(upstream.requests) for upstream in upstreams) > 50
    assert router.dispatcher.demand.held == 0
    assert router.dispatcher.body_bytes == 0


async def test_jumps_of_the_wall_clock_change_nothing(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream())
    set_load(router, router.upstreams[0], 5000)
    years = itertools.cycle([1e9, -1e9])
    with patch("time.time", lambda: 1e9 + next(years)):
        answer = asyncio.create_task(post(router.port))
        await router.held(1)
        await asyncio.sleep(0.6)  # the queue looks for expired requests every 0.25 s
        assert router.dispatcher.num_held == 1
        assert router.dispatcher.demand.in_flight == 0
        set_load(router, router.upstreams[0], 0)
        assert (await answer)[0] == 200


def test_only_monotonic_clocks_decide() -> None:
    package = Path(trimtab_router.__file__).parent
    wall = re.compile(r"\btime\.time\b|import time_ns\b|from time import .*\btime\b|\bdatetime\b|CLOCK_REALTIME")
    assert [path.name for path in package.rglob("*.py") if wall.search(path.read_text())] == []


async def test_hold_without_replicas_ends_with_503(routers: RouterFactory) -> None:
    router = await routers.start(max_hold_seconds=0.3)
    status, fields, _ = await post(router.port)
    assert (status, fields["x-trimtab-dropped"]) == (503, "no-replica")
    assert int(fields["retry-after"]) > 0


async def test_hold_with_busy_replicas_ends_with_429(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream(), max_hold_seconds=0.3)
    set_load(router, router.upstreams[0], 5000)
    status, fields, _ = await post(router.port)
    assert (status, fields["x-trimtab-dropped"]) == (429, "max-hold")


async def test_router_without_hold_rejects_at_once(routers: RouterFactory) -> None:
    router = await routers.start(max_hold_seconds=0.0)
    assert not router.server.is_ready
    assert (await post(router.port))[0] == 503


async def test_requests_beyond_the_bound_get_429(routers: RouterFactory) -> None:
    router = await routers.start(max_held_requests=2)
    held = [asyncio.create_task(post(router.port)) for _ in range(2)]
    await router.held(2)
    status, fields, _ = await post(router.port)
    assert (status, fields["x-trimtab-dropped"]) == (429, "queue-full")
    router.set_endpoints(await routers.upstream())
    assert [(await answer)[0] for answer in held] == [200, 200]


async def test_client_that_leaves_is_removed_from_the_queue(routers: RouterFactory) -> None:
    router = await routers.start()
    async with raw_client(router.port) as client:
        await client.request(BODY)
        await router.held(1)
        client.cut()
        await router.held(0)
    assert router.dispatcher.demand.sequence == 2
    assert router.dispatcher.body_bytes == 0


async def test_priorities_of_trusted_headers_decide_the_order(routers: RouterFactory) -> None:
    router = await routers.start(trust_headers=True, priorities={"high": 10, "low": -10})
    answers = []
    for number, name in enumerate(("low", "unknown", "high")):
        answers.append(asyncio.create_task(post(router.port, name.encode(), f"x-trimtab-priority: {name}")))
        await router.held(number + 1)
    upstream = await routers.upstream()
    router.set_endpoints(upstream)
    for answer in answers:
        await answer
    assert dispatched(upstream) == [b"high", b"unknown", b"low"]


async def test_priority_of_an_api_key_needs_no_trust(routers: RouterFactory) -> None:
    digest = hashlib.sha256(b"vip-key").hexdigest()
    router = await routers.start(priorities={"high": 10}, key_priorities={digest: "high"})
    answers = []
    for number, key in enumerate(("other", "vip-key")):
        headers = (f"Authorization: Bearer {key}", "x-trimtab-priority: high")
        answers.append(asyncio.create_task(post(router.port, key.encode(), *headers)))
        await router.held(number + 1)
    upstream = await routers.upstream()
    router.set_endpoints(upstream)
    for answer in answers:
        await answer
    assert dispatched(upstream) == [b"vip-key", b"other"]


async def test_untrusted_tenants_are_api_keys(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream())
    for key in ("one", "two"):
        await post(router.port, BODY, f"Authorization: Bearer {key}", "x-trimtab-tenant: same")
    tenants = {hashlib.sha256(key).hexdigest()[:16] for key in (b"one", b"two")}
    assert {tenant for tenant in tenants if router.metric("queue_seconds_count", band="0", tenant=tenant)} == tenants


async def test_tenant_labels_are_bounded(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream(), trust_headers=True)
    for number in range(30):
        await post(router.port, BODY, f"x-trimtab-tenant: t{number}")
    assert router.metric("queue_seconds_count", band="0", tenant="other") == 10


async def test_tokenizer_requests_do_not_wait_for_room(routers: RouterFactory) -> None:
    router = await routers.start(await routers.upstream())
    set_load(router, router.upstreams[0], 5000)
    async with raw_client(router.port) as client:
        await client.request(BODY, "/tokenize")
        assert (await client.response()).status == 200
    assert "x-trimtab-dispatch" not in router.upstreams[0].requests[0].fields


async def test_burst_leaves_the_queue_in_the_router(routers: RouterFactory) -> None:
    """Own dispatches count before the engine reports them: a burst does not move the queue into one engine."""
    release = asyncio.Event()

    async def slow(request: Received) -> None:
        await release.wait()
        await request.answer()

    router = await routers.start(await routers.upstream(slow))
    set_load(router, router.upstreams[0], 0)
    answers = [asyncio.create_task(post(router.port, b'{"prompt": "%s"}' % (b"x" * 4000))) for _ in range(10)]
    await router.until(lambda: router.dispatcher.num_held + len(router.upstreams[0].requests) == 10)
    assert 1 <= len(router.upstreams[0].requests) <= 3
    release.set()
    assert {(await answer)[0] for answer in answers} == {200}


async def test_held_stream_begins_with_comments_on_request(
    routers: RouterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stream(request: Received) -> None:
        await request.begin_stream()
        await request.event("one")
        await request.end_stream()

    monkeypatch.setattr(dispatcher_module, "PROGRESS_SECONDS", 0.05)
    router = await routers.start()
    async with raw_client(router.port) as client:
        await client.request(b'{"stream": true}', "/v1/completions", "POST", "x-trimtab-progress: 1")
        status, fields = await client.head()
        assert (status, fields["content-type"]) == (200, "text/event-stream; charset=utf-8")
        for _ in range(3):
            assert await client.reader.readexactly(16) == b"b\r\n: waiting\n\n\r\n"
        router.set_endpoints(await routers.upstream(stream))
        rest = await client.reader.readuntil(b"0\r\n\r\n")
        assert b"HTTP/1.1" not in rest
        assert rest.count(b"data: one\n\n") == 1
        await client.request(b'{"stream": true}')  # the connection goes on
        assert (await client.response()).status == 200


async def test_error_after_comments_is_an_event(routers: RouterFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    async def reject(request: Received) -> None:
        await request.answer(400, b'{"error": {"message": "bad field"}}')

    monkeypatch.setattr(dispatcher_module, "PROGRESS_SECONDS", 0.05)
    router = await routers.start()
    async with raw_client(router.port) as client:
        await client.request(b'{"stream": true}', "/v1/completions", "POST", "x-trimtab-progress: 1")
        await client.head()
        router.set_endpoints(await routers.upstream(reject))
        rest = await client.ended()
    assert rest.endswith(b'data: {"error":{"message":"bad field"}}\n\ndata: [DONE]\n\n\r\n0\r\n\r\n')


async def test_expired_hold_after_comments_is_an_event(routers: RouterFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "PROGRESS_SECONDS", 0.05)
    router = await routers.start(max_hold_seconds=0.3)
    async with raw_client(router.port) as client:
        await client.request(b'{"stream": true}', "/v1/messages", "POST", "x-trimtab-progress: 1")
        await client.head()
        rest = await client.ended()
    assert b"event: error\ndata: " in rest
    assert b"overloaded_error" in rest
    assert rest.endswith(b"\r\n0\r\n\r\n")


async def test_held_requests_get_no_comments_by_default(
    routers: RouterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher_module, "PROGRESS_SECONDS", 0.05)
    router = await routers.start(max_hold_seconds=0.3)
    assert (await post(router.port, b'{"stream": true}'))[0] == 503
    assert (await post(router.port, b"{}", "x-trimtab-progress: 1"))[0] == 503


async def test_flood_of_one_tenant_delays_others_by_few_requests(routers: RouterFactory) -> None:
    """A serial engine of 20 ms per request: a queue of 60 requests of one tenant would delay others by 1.2 s."""
    engine = asyncio.Lock()

    async def serve(request: Received) -> None:
        async with engine:
            await asyncio.sleep(0.02)
        await request.answer()

    router = await routers.start(await routers.upstream(serve))
    set_load(router, router.upstreams[0], 0)

    def body(number: int) -> bytes:
        return b'{"prompt": "%s"}' % (b"%d" % number * 2000)

    flood = [asyncio.create_task(post(router.port, body(n), "Authorization: Bearer flood")) for n in range(10, 70)]
    await router.until(lambda: router.dispatcher.num_held > 50)
    loop = asyncio.get_running_loop()
    waits = []
    for number in range(70, 75):
        started = loop.time()
        assert (await post(router.port, body(number), "Authorization: Bearer other"))[0] == 200
        waits.append(loop.time() - started)
    assert router.dispatcher.num_held > 20  # the flood is still waiting
    assert max(waits) < 0.4
    assert {(await answer)[0] for answer in flood} == {200}
