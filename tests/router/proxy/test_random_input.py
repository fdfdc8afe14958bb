"""Random bytes and random splits of valid requests."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

import pytest
from stub_upstream import Received, raw_client

if TYPE_CHECKING:
    from tests.router.conftest import RouterFactory

VALID = [
    b'POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 15\r\n\r\n{"prompt": "a"}',
    (
        b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n"
        b'8;x\r\n{"prompt\r\n7\r\n": "b"}\r\n0\r\n\r\n'
    ),
    b"GET /version HTTP/1.1\r\nHost: r\r\n\r\n",
]
ALPHABET = b'\r\n\t :;,0123456789abcdefGETPOST/HTTP1.{}[]"\x00\x80\xff'


async def echo(request: Received) -> None:
    await request.answer(200, request.body or b"none")


@pytest.mark.parametrize("seed", range(5))
async def test_any_split_of_a_request_gives_the_same_answer(routers: RouterFactory, seed: int) -> None:
    rng = random.Random(seed)
    router = await routers.start(await routers.upstream(echo))
    async with raw_client(router.port) as client:
        for _ in range(20):
            order = rng.choices(range(len(VALID)), k=rng.randint(1, 3))
            data = b"".join(VALID[place] for place in order)
            at = 0
            for place in order:
                end = at + len(VALID[place])
                while at < end:
                    size = min(rng.choice([1, 2, 3, 10, 50, 200]), end - at)
                    await client.send(data[at : at + size])
                    at += size
                    if rng.random() < 0.3:
                        await asyncio.sleep(0.001)
                expected = [b'{"prompt": "a"}', b'{"prompt": "b"}', b"none"][place]
                assert (await client.response()).body == expected


@pytest.mark.parametrize("seed", range(4))
async def test_random_bytes_leave_the_router_working(
    routers: RouterFactory, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    router = await routers.start(await routers.upstream(echo), max_body_bytes=10_000)

    def mutated() -> bytes:
        data = bytearray(b"".join(rng.choices(VALID, k=rng.randint(1, 3))))
        for _ in range(rng.randint(1, 8)):
            place = rng.randrange(len(data) + 1)
            action = rng.random()
            if action < 0.4:
                data[place:place] = bytes(rng.choices(ALPHABET, k=rng.randint(1, 5)))
            elif action < 0.7:
                del data[place : place + rng.randint(1, 20)]
            else:
                data[place : place + 1] = bytes(rng.choices(ALPHABET, k=1))
        return bytes(data)

    async def attack() -> None:
        async with raw_client(router.port) as client:
            await client.send(mutated())
            await asyncio.sleep(0.02)

    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            await asyncio.gather(*(attack() for _ in range(15)))
    assert [record for record in caplog.records if record.exc_info] == []
    async with raw_client(router.port) as client:
        await client.send(VALID[0])
        assert (await client.response()).status == 200
    await router.until(lambda: router.server.num_connections == 0)
    assert router.dispatcher.body_bytes == 0
    assert router.dispatcher.demand.in_flight == 0
    for request in router.upstreams[0].requests:  # whatever passed is one well-formed request
        assert request.head.count(b"\r\n\r\n") == 1
        assert b"\x00" not in request.head
