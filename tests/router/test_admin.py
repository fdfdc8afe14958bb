"""The admin port: probes, token, demand, drain, metrics."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from stub_upstream import raw_client
from trimtab_router.admin import build_admin_app
from trimtab_router.workers import Worker, WorkerFleet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tests.router.conftest import RouterFactory, RunningRouter

    AdminOf = Callable[[RunningRouter], Awaitable["Admin"]]

TOKEN = "secret"
AUTHORIZATION = {"Authorization": f"Bearer {TOKEN}"}
BODY = b'{"prompt": "hello there"}'


class Admin:
    """A client of the admin port."""

    def __init__(self, url: str, session: aiohttp.ClientSession, worker: Worker) -> None:
        self._url, self._session, self.worker = url, session, worker

    async def call(self, method: str, path: str, *, token: str | None = TOKEN, **fields: Any) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        async with self._session.request(method, self._url + path, headers=headers, **fields) as response:
            return response.status, await response.read()

    async def demand(self, query: str = "") -> dict[str, Any]:
        async with self._session.get(f"{self._url}/admin/v1/demand{query}", headers=AUTHORIZATION) as response:
            found: dict[str, Any] = await response.json()
            return found


@pytest_asyncio.fixture
async def admin_of() -> AsyncIterator[Callable[[RunningRouter], Awaitable[Admin]]]:
    runners: list[web.AppRunner] = []
    async with aiohttp.ClientSession() as session:

        async def start(router: RunningRouter) -> Admin:
            worker = Worker(router.server, router.dispatcher)
            digest = hashlib.sha256(TOKEN.encode()).hexdigest()
            runner = web.AppRunner(build_admin_app(WorkerFleet(worker), digest), shutdown_timeout=0.1)
            runners.append(runner)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            return Admin(f"http://127.0.0.1:{runner.addresses[0][1]}", session, worker)

        yield start
    for runner in runners:
        await runner.cleanup()


@pytest.mark.parametrize("token", [None, "", "wrong", "sécret"])
async def test_admin_api_requires_the_token(routers: RouterFactory, admin_of: AdminOf, token: str | None) -> None:
    admin = await admin_of(await routers.start())
    for method, path in (("GET", "demand"), ("PUT", "state-token"), ("POST", "drain"), ("GET", "nothing")):
        assert (await admin.call(method, f"/admin/v1/{path}", token=token))[0] == 401
    assert not admin.worker.drain_requested.is_set()
    for path in ("/healthz", "/readyz", "/metrics"):
        assert (await admin.call("GET", path, token=None))[0] == 200


async def test_state_token_reaches_the_registry(routers: RouterFactory, admin_of: AdminOf) -> None:
    router = await routers.start()
    admin = await admin_of(router)
    assert (await admin.call("PUT", "/admin/v1/state-token", json={"token": "one"}))[0] == 204
    assert list(router.registry.tokens) == ["one"]
    fields = {"token": "two", "former_token": "one"}
    assert (await admin.call("PUT", "/admin/v1/state-token", json=fields))[0] == 204
    assert list(router.registry.tokens) == ["two", "one"]


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"token": 1}', b'{"token": ""}', b'{"token": "a\\nb"}', b'{"token": "\xc3\xa9"}']
)
async def test_wrong_state_tokens_are_rejected(routers: RouterFactory, admin_of: AdminOf, body: bytes) -> None:
    router = await routers.start()
    admin = await admin_of(router)
    assert (await admin.call("PUT", "/admin/v1/state-token", data=body))[0] == 400
    assert router.registry.tokens == ()


async def test_demand_counts_arrivals_and_held_requests(routers: RouterFactory, admin_of: AdminOf) -> None:
    router = await routers.start()
    admin = await admin_of(router)
    assert await admin.demand() == {
        "sequence": 0,
        "held": 0,
        "oldest_held_seconds": 0.0,
        "arrived": 0,
        "arrived_prompt_tokens": 0,
        "last_arrival_seconds_ago": None,
        "in_flight": 0,
    }
    async with raw_client(router.port) as client:
        await client.request(BODY)
        await router.held(1)
        await asyncio.sleep(0.05)
        demand = await admin.demand()
        assert (demand["held"], demand["arrived"], demand["sequence"]) == (1, 1, 1)
        assert demand["arrived_prompt_tokens"] > 0
        assert demand["oldest_held_seconds"] >= 0.05
        assert demand["last_arrival_seconds_ago"] >= 0.05


async def test_long_poll_ends_as_soon_as_a_request_is_held(routers: RouterFactory, admin_of: AdminOf) -> None:
    router = await routers.start()
    admin = await admin_of(router)
    poll = asyncio.create_task(admin.demand("?since=0&wait=20"))
    await asyncio.sleep(0.05)
    assert not poll.done()
    async with raw_client(router.port) as client:
        await client.request(BODY)
        async with asyncio.timeout(2):
            assert (await poll)["held"] == 1
        assert (await admin.demand("?since=0&wait=20"))["sequence"] == 1  # at once: newer than 0
    assert (await admin.demand("?since=99&wait=0.05"))["held"] in (0, 1)  # after the wait


async def test_unready_router_answers_503(routers: RouterFactory, admin_of: AdminOf) -> None:
    router = await routers.start()
    admin = await admin_of(router)
    assert (await admin.call("GET", "/readyz"))[0] == 200  # without a replica: requests can be held
    router.server.knows_replicas = False
    assert (await admin.call("GET", "/readyz"))[0] == 503
    router.server.knows_replicas = True
    assert (await admin.call("POST", "/admin/v1/drain"))[0] == 202
    assert admin.worker.drain_requested.is_set()
    assert (await admin.call("GET", "/readyz"))[0] == 503
    assert (await admin.call("GET", "/healthz"))[0] == 200


async def test_metrics_contain_counters_and_gauges(routers: RouterFactory, admin_of: AdminOf) -> None:
    router = await routers.start(await routers.upstream())
    admin = await admin_of(router)
    async with raw_client(router.port) as client:
        await client.request(BODY)
        await client.response()
        text = (await admin.call("GET", "/metrics"))[1].decode()
    for line in (
        'trimtab_router_requests_total{code="200",route="generate"} 1.0',
        "trimtab_router_replicas 1.0",
        "trimtab_router_connections 1.0",
        "trimtab_router_held_requests 0.0",
    ):
        assert f"\n{line}\n" in text
