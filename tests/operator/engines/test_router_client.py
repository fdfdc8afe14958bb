"""Long polls of router pods against a real HTTP server: demand, state token, failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp import web
from trimtab_operator.builders.admin_token import Tokens, router_token, state_token, token_hash
from trimtab_operator.engines import http as bounded_http
from trimtab_operator.engines import router_client
from trimtab_operator.engines.router_client import RouterPoller
from trimtab_operator.observed.router import RouterTarget

TOKENS = Tokens("present", "former")


@dataclass
class FakeRouter:
    """A router's admin port."""

    held: int = 0
    sequence: int = 1
    token: str = field(default_factory=lambda: router_token(TOKENS.present))
    pushed: list[dict[str, Any]] = field(default_factory=list)
    polls: int = 0
    answer: Callable[[], web.Response] | None = None
    """Response instead of the demand; None for the demand."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def demand(self, request: web.Request) -> web.Response:
        self.authorize(request)
        self.polls += 1
        if self.answer is not None:
            return self.answer()
        since, wait = int(request.query["since"]), float(request.query["wait"])
        if self.sequence <= since:
            try:
                async with asyncio.timeout(wait):
                    await self.changed.wait()
            except TimeoutError:
                pass
            self.changed.clear()
        return web.json_response(
            {
                "sequence": self.sequence,
                "held": self.held,
                "in_flight": 2,
                "arrived": 7,
                "last_arrival_seconds_ago": 1.5,
            }
        )

    async def state_token(self, request: web.Request) -> web.Response:
        self.authorize(request)
        self.pushed.append(await request.json())
        return web.Response(status=204)

    def authorize(self, request: web.Request) -> None:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            raise web.HTTPUnauthorized

    def hold(self, count: int) -> None:
        self.held, self.sequence = count, self.sequence + 1
        self.changed.set()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[RouterTarget]:
        app = web.Application()
        app.add_routes([web.get("/admin/v1/demand", self.demand), web.put("/admin/v1/state-token", self.state_token)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        try:
            yield RouterTarget("m-router-x-1", "uid-1", "127.0.0.1", token_hash(router_token(TOKENS.present)), port)
        finally:
            await runner.cleanup()


@asynccontextmanager
async def polling(wakes: list[float] | None = None, **options: Any) -> AsyncIterator[RouterPoller]:
    async with bounded_http.new_client() as http:
        woken = [] if wakes is None else wakes
        poller = RouterPoller(
            http, time.time, lambda: woken.append(time.monotonic()), **{"wait_seconds": 0.5, **options}
        )
        try:
            yield poller
        finally:
            poller.close()


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - of a server without such an event
            await asyncio.sleep(0.01)


async def test_poller_reports_demand_and_pushes_state_token() -> None:
    router = FakeRouter()
    async with router.serve() as target, polling() as poller:
        assert poller.follow([target], TOKENS, has_replica=True) == {}
        await until(lambda: bool(poller.follow([target], TOKENS, has_replica=True)))
        report = poller.follow([target], TOKENS, has_replica=True)[target.instance]
        assert (report.held, report.in_flight, report.arrived, report.last_arrival_seconds_ago) == (0, 2, 7, 1.5)
        assert router.pushed == [{"token": state_token("present"), "former_token": state_token("former")}]


async def test_first_held_request_wakes_at_once() -> None:
    router, wakes = FakeRouter(), list[float]()
    async with router.serve() as target, polling(wakes, wait_seconds=30.0) as poller:
        poller.follow([target], TOKENS, has_replica=False)
        await until(lambda: router.polls == 2)  # the second one waits
        began = time.monotonic()
        router.hold(1)
        await until(lambda: bool(wakes))
        assert wakes[0] - began < 1.0
        router.hold(2)
        await until(lambda: poller.follow([target], TOKENS, has_replica=False)[target.instance].held == 2)
        assert len(wakes) == 1


async def test_held_request_with_a_replica_wakes_nothing() -> None:
    router, wakes = FakeRouter(), list[float]()
    async with router.serve() as target, polling(wakes) as poller:
        poller.follow([target], TOKENS, has_replica=True)
        router.hold(3)
        await until(lambda: bool(poller.follow([target], TOKENS, has_replica=True)))
        assert wakes == []


async def test_restarted_router_gets_the_state_token_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_client, "BACKOFF_SECONDS", (0.01,))
    router = FakeRouter()
    async with router.serve() as target, polling() as poller:
        poller.follow([target], TOKENS, has_replica=True)
        await until(lambda: len(router.pushed) == 1)
        router.answer = lambda: web.Response(status=503)
        await until(lambda: len(router.pushed) > 1)


async def test_waiting_requests_are_counted_each_second_without_a_replica() -> None:
    router = FakeRouter(held=1)
    async with router.serve() as target, polling(wait_seconds=30.0) as poller:
        await until(lambda: bool(poller.follow([target], TOKENS, has_replica=False)))
        router.held = 500  # more requests do not change the sequence
        await until(lambda: poller.follow([target], TOKENS, has_replica=False)[target.instance].held == 500)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"sequence": -1, "held": 0, "in_flight": 0, "arrived": 0}', b'{"held": 1}', b"x" * (1 << 17)],
)
async def test_invalid_response_is_no_report(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_client, "BACKOFF_SECONDS", (0.01,))
    router = FakeRouter(answer=lambda: web.Response(body=body))
    async with router.serve() as target, polling() as poller:
        poller.follow([target], TOKENS, has_replica=True)
        await until(lambda: router.polls > 3)
        assert poller.follow([target], TOKENS, has_replica=True) == {}


async def test_router_from_before_a_rotation_gets_its_token() -> None:
    router = FakeRouter(token=router_token(TOKENS.former or ""))
    async with router.serve() as target, polling() as poller:
        old = replace(target, token_sha256=token_hash(router_token("former")))
        await until(lambda: bool(poller.follow([old], TOKENS, has_replica=True)))


async def test_removed_pod_is_not_polled() -> None:
    router = FakeRouter()
    async with router.serve() as target, polling() as poller:
        await until(lambda: bool(poller.follow([target], TOKENS, has_replica=True)))
        assert poller.follow([], TOKENS, has_replica=True) == {}
        await asyncio.sleep(0.1)
        before = router.polls
        await asyncio.sleep(0.7)
        assert router.polls <= before + 1


async def test_follower_pushes_no_token() -> None:
    router = FakeRouter()
    async with router.serve() as target, polling(may_write=lambda: False) as poller:
        await until(lambda: bool(poller.follow([target], TOKENS, has_replica=True)))
        assert router.pushed == []
