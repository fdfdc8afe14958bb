"""Limits on connections: silent clients are closed, and never keep others out."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI, Request
from trimtab_engine.api.http.connections import BODY_SILENCE_SECONDS, HEAD_SECONDS, ConnectionLimits
from trimtab_engine.api.http.server import HttpServer, bind
from trimtab_engine.ipc.open_files import MAX_OPEN_FILES, raise_open_file_limit

HEAD = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
WAIT_SECONDS = 30.0


class FakeConnection:
    """Records why it was closed."""

    def __init__(self, *, is_reading_paused: bool = False) -> None:
        self.is_reading_paused = is_reading_paused
        self.reasons: list[str] = []

    def time_out(self, message: str) -> None:
        self.reasons.append(message)


def make_limits(max_connections: int = 9, max_unfinished_bytes: int = 100) -> ConnectionLimits:
    return ConnectionLimits(max_connections, lambda: max_unfinished_bytes)


def test_sweep_closes_connections_without_a_head() -> None:
    limits, early, late = make_limits(), FakeConnection(), FakeConnection()
    limits.open(early, 0.0)
    limits.open(late, 5.0)
    limits.sweep(HEAD_SECONDS - 0.1)
    assert early.reasons == []
    limits.sweep(HEAD_SECONDS)
    assert (len(early.reasons), late.reasons) == (1, [])


def test_sweep_closes_silent_bodies_unless_reading_is_paused() -> None:
    limits, silent, paused, done = (
        make_limits(),
        FakeConnection(),
        FakeConnection(is_reading_paused=True),
        FakeConnection(),
    )
    for connection in (silent, paused, done):
        limits.open(connection, 0.0)
        limits.await_body(connection, 0.0)
        limits.receive_body(connection, 10, 1.0)
    limits.finish_body(done)
    limits.sweep(BODY_SILENCE_SECONDS)
    assert silent.reasons == []
    limits.sweep(BODY_SILENCE_SECONDS + 1.0)
    assert (len(silent.reasons), paused.reasons, done.reasons) == (1, [], [])


def test_connection_limit_closes_the_longest_silent_one() -> None:
    limits, silent, busy, third = make_limits(2), FakeConnection(), FakeConnection(), FakeConnection()
    assert limits.open(busy, 0.0)
    limits.await_body(busy, 0.0)
    limits.finish_body(busy)
    assert limits.open(silent, 1.0)
    assert limits.open(third, 2.0)
    assert (len(silent.reasons), busy.reasons) == (1, [])
    limits.close(silent)
    limits.await_body(third, 2.0)
    limits.finish_body(third)
    assert not limits.open(FakeConnection(), 3.0)


def test_unfinished_bodies_beyond_the_limit_close_the_longest_silent_one() -> None:
    limits, first, second = make_limits(max_unfinished_bytes=100), FakeConnection(), FakeConnection()
    for connection in (first, second):
        limits.open(connection, 0.0)
        limits.await_body(connection, 0.0)
        limits.receive_body(connection, 60, 0.0)
    assert (len(first.reasons), second.reasons) == (1, [])
    limits.receive_body(second, 40, 0.0)
    assert second.reasons == []


@asynccontextmanager
async def serving(limits: ConnectionLimits) -> AsyncIterator[int]:
    """Serve /echo, which returns the length of the body, and yield the port."""
    app = FastAPI()

    @app.post("/echo")
    async def echo(request: Request) -> int:
        return len(await request.body())

    @app.get("/livez")
    async def livez() -> str:
        return "ok"

    bound = bind("127.0.0.1", 0, "--port")
    server = HttpServer(app, bound, limits)
    server.start()
    try:
        yield bound.getsockname()[1]
    finally:
        await server.close(0)


async def connect(port: int, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize(
    ("data", "response"),
    [(b"", b""), (b"GET /li", b"HTTP/1.1 408 "), (HEAD + b"x", b"HTTP/1.1 408 ")],
    ids=["nothing", "half a head", "half a body"],
)
async def test_silent_connection_is_closed(monkeypatch: pytest.MonkeyPatch, data: bytes, response: bytes) -> None:
    monkeypatch.setattr("trimtab_engine.api.http.connections.HEAD_SECONDS", 0.1)
    monkeypatch.setattr("trimtab_engine.api.http.connections.BODY_SILENCE_SECONDS", 0.1)
    monkeypatch.setattr("trimtab_engine.api.http.connections.SWEEP_SECONDS", 0.05)
    async with serving(make_limits(max_unfinished_bytes=1 << 20)) as port:
        reader, writer = await connect(port, data)
        assert (await asyncio.wait_for(reader.read(), WAIT_SECONDS)).startswith(response)
        writer.close()


@pytest.mark.parametrize("data", [b"", b"GET /li", HEAD + b"x"], ids=["nothing", "half a head", "half a body"])
async def test_probes_are_answered_despite_silent_connections(data: bytes) -> None:
    async with serving(make_limits(20, 1 << 20)) as port:
        open_ones = [await connect(port, data) for _ in range(60)]
        async with httpx.AsyncClient() as client:
            for _ in range(5):
                assert (await client.get(f"http://127.0.0.1:{port}/livez", timeout=WAIT_SECONDS)).status_code == 200
        for _, writer in open_ones:
            writer.close()


async def test_requests_on_one_connection_and_pipelined_ones_are_answered() -> None:
    async with serving(make_limits(max_unfinished_bytes=1 << 20)) as port:
        request = HEAD + b"x" * 1000
        reader, writer = await connect(port, request + request)
        for _ in range(2):
            assert b"\r\n\r\n1000" in await asyncio.wait_for(reader.readuntil(b"1000"), WAIT_SECONDS)
        writer.write(request[:500])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(request[500:])
        assert b"1000" in await asyncio.wait_for(reader.readuntil(b"1000"), WAIT_SECONDS)
        writer.close()


async def test_unfinished_bodies_are_bounded_in_memory() -> None:
    async with serving(make_limits(max_unfinished_bytes=4 << 20)) as port:
        head = HEAD.replace(b"1000", b"8000000")
        open_ones = [await connect(port, head + bytes(1 << 20)) for _ in range(8)]
        closed = 0
        for reader, writer in open_ones[:4]:
            answer = await asyncio.wait_for(reader.read(), WAIT_SECONDS)
            closed += answer.startswith(b"HTTP/1.1 408 ")
            writer.close()
        assert closed == 4
        async with httpx.AsyncClient() as client:
            response = await client.post(f"http://127.0.0.1:{port}/echo", content=bytes(1 << 20), timeout=WAIT_SECONDS)
        assert response.json() == 1 << 20
        for _, writer in open_ones[4:]:
            writer.close()


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [
        (1024, 4096, 4096),
        (1024, resource.RLIM_INFINITY, MAX_OPEN_FILES),
        (4096, 4096, 4096),
        (1 << 20, 1 << 20, 1 << 20),
    ],
)
def test_open_file_limit_is_raised_to_the_hard_limit(
    soft: int, hard: int, then: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[int, tuple[int, int]] = {resource.RLIMIT_NOFILE: (soft, hard)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    assert raise_open_file_limit() == then
    assert limits == {resource.RLIMIT_NOFILE: (then, hard)}
