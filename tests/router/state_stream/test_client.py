"""State streams over HTTP: snapshots after breaks and gaps, tokens, silence, and engines that send nonsense."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from trimtab_router.endpoints.endpoint import Endpoint
from trimtab_router.protocol.messages import (
    Beat,
    Delta,
    Hello,
    KeyRule,
    Load,
    Message,
    Snapshot,
    encode_frame,
    pack_keys,
)
from trimtab_router.protocol.prefix_keys import CUT_BYTES, KEY_RULE
from trimtab_router.scoring.state import ReplicaState
from trimtab_router.state_stream import client
from trimtab_router.state_stream.client import StateStreams
from trimtab_router.state_stream.registry import Registry

HELLO = Hello(1, "epoch", [0], 16, KeyRule(KEY_RULE, CUT_BYTES, ["base"], separates_api_keys=True))
Script = Callable[[web.StreamResponse], Awaitable[None]]


@dataclass
class FakeEngine:
    """Answers each connection with the next script; the last one repeats."""

    scripts: list[Script]
    token: str | None = None
    requests: list[web.BaseRequest] = field(default_factory=list)
    port: int = 0

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requests.append(request)
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401)
        response = web.StreamResponse()
        await response.prepare(request)
        await self.scripts[min(len(self.requests), len(self.scripts)) - 1](response)
        return response


async def send(response: web.StreamResponse, *messages: Message) -> None:
    await response.write(b"".join(map(encode_frame, messages)))


def a_script(*messages: Message, then_close: bool = False) -> Script:
    async def script(response: web.StreamResponse) -> None:
        await send(response, *messages)
        while not then_close:
            await asyncio.sleep(0.05)
            await send(response, Beat())

    return script


@pytest.fixture
async def follow(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[FakeEngine], Awaitable[Registry]]]:
    monkeypatch.setattr(client, "MIN_RETRY_SECONDS", 0.01)
    closers: list[Callable[[], Awaitable[None]]] = []

    async def start(engine: FakeEngine) -> Registry:
        runner = web.ServerRunner(web.Server(engine.handle), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        engine.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        registry = Registry()
        streams = StateStreams(registry)
        closers.extend([runner.cleanup, streams.close])
        registry.set_endpoints([Endpoint("a", "127.0.0.1", 1, engine.port)])
        return registry

    yield start
    for close in reversed(closers):
        await close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # set by the code under test
            await asyncio.sleep(0.005)


def state_of(registry: Registry) -> ReplicaState:
    (state,) = registry.replicas(asyncio.get_running_loop().time())
    return state


async def test_stream_reports_load_keys_and_rules(follow: Callable[[FakeEngine], Awaitable[Registry]]) -> None:
    engine = FakeEngine([a_script(HELLO, Snapshot(0, 0, Load(running=3), pack_keys([5])))])
    registry = await follow(engine)
    await until(lambda: state_of(registry).running == 3)
    assert registry.index.match((5,), 0.0) == {0: 1}
    assert engine.requests[0].query == {"router": registry.router_id}
    now = asyncio.get_running_loop().time()
    age = registry.state_age("a", now)
    assert age is not None
    assert age < 2
    plain = registry.routed_request({"model": "base", "prompt": "a" * 1000})
    assert registry.routed_request({"model": "french", "prompt": "a"}).adapter == "french"
    assert registry.routed_request({"model": "base", "prompt": "a" * 1000}, api_key=b"k").keys != plain.keys


async def test_broken_stream_starts_again_with_snapshot(follow: Callable[[FakeEngine], Awaitable[Registry]]) -> None:
    engine = FakeEngine(
        [
            a_script(HELLO, Snapshot(0, 0, Load(running=3), pack_keys([5])), then_close=True),
            a_script(HELLO, Snapshot(0, 0, Load(running=1), pack_keys([6]))),
        ]
    )
    registry = await follow(engine)
    await until(lambda: state_of(registry).running == 1)
    assert [registry.index.match((key,), 0.0) for key in (5, 6)] == [{}, {0: 1}]


@pytest.mark.parametrize(
    "nonsense",
    [
        a_script(HELLO, Snapshot(0, 0, Load(running=9)), Delta(5, 0)),
        a_script(Snapshot(0, 0, Load(running=9))),
        a_script(Hello(99, "epoch", [0], 16, HELLO.key_rule)),
        a_script(HELLO, *[Beat()] * 3000),
        lambda response: response.write(b"HTTP is not msgpack"),
        lambda response: response.write(b"\xff\xff\xff\x7f"),
    ],
    ids=["gap", "no hello", "version", "flood", "text", "huge"],
)
async def test_stream_of_a_lying_engine_is_closed(
    follow: Callable[[FakeEngine], Awaitable[Registry]], nonsense: Script
) -> None:
    registry = await follow(FakeEngine([nonsense, a_script(HELLO, Snapshot(0, 0, Load(running=1)))]))
    await until(lambda: state_of(registry).running == 1)


async def test_work_of_a_lying_engine_is_bounded_over_its_connections(
    follow: Callable[[FakeEngine], Awaitable[Registry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_BURST_BYTES", 2 * client.HELLO_BYTES)
    monkeypatch.setattr(client, "MAX_BYTES_PER_SECOND", 0)
    engine = FakeEngine([a_script(HELLO, Snapshot(0, 0, Load(running=1)), then_close=True)] * 2 + [a_script(HELLO)])
    registry = await follow(engine)
    await until(lambda: len(engine.requests) >= 4)
    assert state_of(registry).running == 1  # the third Hello has changed nothing


async def test_silent_stream_is_closed(
    follow: Callable[[FakeEngine], Awaitable[Registry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(response: web.StreamResponse) -> None:
        await send(response, HELLO)
        await asyncio.sleep(30)

    monkeypatch.setattr(client, "SILENCE_SECONDS", 0.1)
    registry = await follow(FakeEngine([silent, a_script(HELLO, Snapshot(0, 0, Load(running=1)))]))
    await until(lambda: state_of(registry).running == 1)


async def test_token_is_tried_when_set_and_former_one_after_401(
    follow: Callable[[FakeEngine], Awaitable[Registry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_RETRY_SECONDS", 60.0)
    monkeypatch.setattr(client, "MIN_RETRY_SECONDS", 30.0)
    engine = FakeEngine([a_script(HELLO, Snapshot(0, 0, Load(running=1)))], token="old")
    registry = await follow(engine)
    await until(lambda: len(engine.requests) == 1)
    registry.set_token("new", "old")
    await until(lambda: state_of(registry).running == 1)
    sent = [request.headers.get("Authorization") for request in engine.requests]
    assert sent == [None, "Bearer new", "Bearer old"]


async def test_removed_endpoint_ends_its_stream(follow: Callable[[FakeEngine], Awaitable[Registry]]) -> None:
    engine = FakeEngine([a_script(HELLO, Snapshot(0, 0, Load(running=1), pack_keys([5])))])
    registry = await follow(engine)
    await until(lambda: state_of(registry).running == 1)
    registry.set_endpoints([])
    await asyncio.sleep(0.1)
    assert (registry.replicas(0.0), registry.index.match((5,), 0.0), len(engine.requests)) == ([], {}, 1)
