"""Random failures of replicas and clients at once: answerable requests are answered, and nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from stub_upstream import Received, raw_client

if TYPE_CHECKING:
    from tests.router.conftest import RouterFactory, RunningRouter

NUM_REQUESTS = 300
NUM_REPLICAS = 4


class RandomReplica:
    """Handles requests in random ways; each request's first byte is sent at most once."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def handle(self, request: Received) -> None:
        await asyncio.sleep(self._rng.random() * 0.02)
        kind = self._rng.choice(["answer"] * 6 + ["stream"] * 4 + ["cut", "close", "busy", "draining", "half"])
        if kind == "answer":
            await request.answer()
        elif kind == "stream":
            await request.begin_stream()
            for number in range(5):
                await request.event(str(number))
                await asyncio.sleep(self._rng.random() * 0.005)
            await request.end_stream()
        elif kind == "half":
            await request.begin_stream()
            await request.event("half")
            await asyncio.sleep(0.01)
            request.cut()
        elif kind == "cut":
            request.cut()
        elif kind == "close":
            request.writer.close()
        else:
            await request.answer(429 if kind == "busy" else 503, b"{}")


async def change_endpoints(router: RunningRouter, rng: random.Random) -> None:
    """Remove and add replicas, sometimes all of them."""
    while True:
        await asyncio.sleep(0.03)
        router.set_endpoints(*[each for each in router.upstreams if rng.random() < 0.7])


async def send(router: RunningRouter, rng: random.Random, number: int) -> str:
    """Send one request and return its outcome."""
    leaves = rng.random() < 0.15
    async with raw_client(router.port) as client:
        await client.request(b'{"prompt": "%d", "stream": true}' % number)
        if leaves:
            await asyncio.sleep(rng.random() * 0.05)
            return "left"
        status, fields = await client.head()
        if fields.get("transfer-encoding") != "chunked":
            await client.reader.readexactly(int(fields["content-length"]))
            return str(status)
        body = b""
        while not body.endswith(b"0\r\n\r\n"):
            piece = await client.reader.read(65536)
            if not piece:
                return "cut"
            body += piece
        return "interrupted" if b'"error"' in body else str(status)


@pytest.mark.parametrize("seed", range(3))
async def test_random_failures_lose_nothing_and_leave_nothing(routers: RouterFactory, seed: int) -> None:
    rng = random.Random(seed)
    replica = RandomReplica(rng)
    router = await routers.start(*[await routers.upstream(replica.handle) for _ in range(NUM_REPLICAS)])
    changing = asyncio.create_task(change_endpoints(router, rng))
    tasks = []
    for number in range(NUM_REQUESTS):
        tasks.append(asyncio.create_task(send(router, rng, number)))
        await asyncio.sleep(rng.random() * 0.01)
    outcomes = Counter(await asyncio.gather(*tasks))
    changing.cancel()
    await router.until(lambda: router.server.num_connections == 0)
    answered = outcomes["200"] + outcomes["left"] + outcomes["interrupted"]
    # Three failures in a row end a request: about (4 / 15) ** 3 of them, here with other causes too.
    assert answered >= 0.93 * NUM_REQUESTS, outcomes
    assert set(outcomes) <= {"200", "left", "interrupted", "429", "502", "503"}, outcomes
    dispatcher = router.dispatcher
    assert (dispatcher.demand.in_flight, dispatcher.num_held, dispatcher.body_bytes) == (0, 0, 0)
    assert len(dispatcher.binder.queue) == 0
    router.set_endpoints(*router.upstreams)
    states = router.registry.replicas(0.0)
    assert [(state.pending_requests, state.pending_prefill_tokens) for state in states] == [(0, 0.0)] * len(states)
    assert router.metric("requests_total", route="generate", code="499") <= outcomes["left"]
