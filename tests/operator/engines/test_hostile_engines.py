"""Hostile engines hang, lie and flood without affecting other tenants or the operator's memory."""

from __future__ import annotations

import asyncio
import gzip
import time
import tracemalloc
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web
from trimtab_operator.builders.admin_token import Tokens
from trimtab_operator.engines.http import MAX_BODY_BYTES, Reply, Unreachable, fetch, new_client
from trimtab_operator.engines.poller import MAX_CONCURRENT_POLLS, EnginePoller
from trimtab_operator.engines.scrape import MAX_METRICS_BYTES, scrape
from trimtab_operator.observed.engines import EngineTarget

if TYPE_CHECKING:
    from tests.operator.conftest import ContractEngine

MEBIBYTE = 1 << 20
LONGEST_STALL_SECONDS = 0.1  # of the event loop; the others' requests wait for so long


async def served(handler: web.RequestHandler | object) -> tuple[web.AppRunner, str]:
    application = web.Application()
    application.router.add_get("/{any:.*}", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def test_a_compressed_answer_is_not_unpacked(http: aiohttp.ClientSession) -> None:
    bomb = gzip.compress(bytes(200 * MEBIBYTE))
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.headers.get("Accept-Encoding", ""))
        return web.Response(body=bomb, headers={"Content-Encoding": "gzip"})

    runner, url = await served(answer)
    tracemalloc.start()
    try:
        replies = await asyncio.gather(*(fetch(http, "GET", url, deadline_seconds=60.0) for _ in range(4)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        await runner.cleanup()
    assert asked == ["identity"] * 4
    assert all(isinstance(reply, Unreachable) and "gzip" in reply.message for reply in replies)
    assert peak < 4 * MEBIBYTE


async def test_an_endless_answer_is_cut_off(http: aiohttp.ClientSession) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(bytes(1 << 16))

    runner, url = await served(answer)
    try:
        reply = await fetch(http, "GET", url, deadline_seconds=60.0)
    finally:
        await runner.cleanup()
    assert isinstance(reply, Unreachable)
    assert f"larger than {MAX_BODY_BYTES:,}" in reply.message


@pytest.mark.usefixtures("frozen_gc")
@pytest.mark.parametrize("line", ['x{a="%d"} 1.0\n', 'vllm:num_requests_running{a="%d"} 1.0\n'])
async def test_the_largest_page_of_metrics_does_not_stall_the_loop(line: str, http: aiohttp.ClientSession) -> None:
    page = "".join(line % number for number in range(MAX_METRICS_BYTES // (len(line) + 6)))

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=page)

    async def longest_stall() -> float:
        """Measure by the CPU time of the loop's thread, independent of the machine's load."""
        longest, before = 0.0, time.thread_time()
        while not done.is_set():
            await asyncio.sleep(0.001)
            longest, before = max(longest, time.thread_time() - before), time.thread_time()
        return longest

    runner, url = await served(answer)
    done = asyncio.Event()
    watching = asyncio.create_task(longest_stall())
    try:
        await scrape(http, url)
    finally:
        done.set()
        await runner.cleanup()
    assert await watching < LONGEST_STALL_SECONDS


async def test_redirects_are_not_followed(http: aiohttp.ClientSession) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        raise web.HTTPTemporaryRedirect("/elsewhere")

    runner, url = await served(answer)
    try:
        reply = await fetch(http, "GET", f"{url}/here", deadline_seconds=60.0)
    finally:
        await runner.cleanup()
    assert isinstance(reply, Reply)
    assert (reply.status, asked) == (307, ["/here"])


@pytest.mark.parametrize("tenants", [3, 8])
async def test_engines_that_hang_take_no_connection_from_the_others(
    engine: ContractEngine, other_engine: ContractEngine, tenants: int
) -> None:
    """Checks if a request had to wait for a connection, independent of timing."""
    other_engine.hangs = True
    begun, waited = list[object](), list[object]()

    async def begins(_session: object, _context: object, params: object) -> None:
        begun.append(params)

    async def waits(_session: object, _context: object, params: object) -> None:
        waited.append(params)

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(begins)
    trace.on_connection_queued_start.append(waits)
    trace.freeze()
    async with new_client() as http:
        http.trace_configs.append(trace)
        hostile = [EnginePoller(http, timeout_seconds=0.05) for _ in range(tenants)]
        hanging = [
            EngineTarget(f"g{n}", "127.0.0.1", True, f"u{n}", api_port=other_engine.port, admin_port=other_engine.port)
            for n in range(32)
        ]
        await asyncio.gather(*(engines.poll(hanging, Tokens("right")) for engines in hostile))
        healthy = EnginePoller(http, timeout_seconds=30.0)
        target = EngineTarget("m-g0", "127.0.0.1", True, "u", api_port=engine.port, admin_port=engine.port)
        try:
            await healthy.poll([target], Tokens("right"))
        finally:
            for engines in (*hostile, healthy):
                engines.close()
    assert len(begun) >= tenants * MAX_CONCURRENT_POLLS
    assert "GET /metrics" in engine.calls
    assert waited == []
