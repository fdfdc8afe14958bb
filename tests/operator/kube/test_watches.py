"""Watches continue at the last version, list again after expiry, and time out."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, cast

import kubernetes.aio.client
import pytest
import virtual_time
from aiohttp import web
from kubernetes.aio.client.exceptions import ApiException
from trimtab_operator.kube import watches
from trimtab_operator.kube.client import Cluster
from trimtab_operator.kube.informer_cache import STALE_SECONDS, Cache, Store


def a_pod(version: int, name: str = "m-g0-0") -> dict[str, Any]:
    labels = {"trimtab.dev/deployment": "m"}
    return {"metadata": {"name": name, "namespace": "n", "uid": "u", "resourceVersion": str(version), "labels": labels}}


class Server:
    """API server with pods only; `script` is the behaviour of each watch."""

    def __init__(self, *, script: Callable[[Server], AsyncIterator[dict[str, Any]]]) -> None:
        self.script = script
        self.pods: dict[str, dict[str, Any]] = {}
        self.version = 10
        self.lists: list[float] = []
        self.watches: list[tuple[float, str]] = []
        self.error: Exception | None = None
        self.is_synced = False
        """Whether pods were known at the end."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def list_at(self, _kind: str, _namespace: str | None, *, selector: str | None) -> tuple[tuple[Any, ...], str]:
        assert selector == watches.MANAGED_SELECTOR
        self.lists.append(self.now())
        if self.error is not None:
            raise self.error
        return tuple(self.pods.values()), str(self.version)

    @asynccontextmanager
    async def watch(
        self, _kind: str, _namespace: str | None, *, selector: str | None, version: str, seconds: int
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        self.watches.append((self.now(), version))
        yield self.script(self)


def watched(server: Server, seconds: float) -> Cache:
    """Return the cache after some virtual seconds."""

    async def run() -> Cache:
        store = Store("Pod")
        cache = Cache([store], clock=server.now)
        task = asyncio.create_task(watches.run_watches(cast("Cluster", server), cache))
        await asyncio.sleep(seconds)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        server.is_synced = cache.is_synced("Pod", "n")
        return cache

    return virtual_time.run(run())


async def silent(_: Server) -> AsyncIterator[dict[str, Any]]:
    await asyncio.Event().wait()
    yield {}


async def polite(server: Server) -> AsyncIterator[dict[str, Any]]:
    """Report a pod, then end regularly."""
    server.version += 1
    yield {"type": "ADDED", "object": a_pod(server.version)}
    await asyncio.sleep(watches.WATCH_SECONDS)


def test_watch_continues_at_last_version() -> None:
    server = Server(script=polite)
    cache = watched(server, 120.0)
    assert server.lists == [0.0]
    assert [version for _, version in server.watches] == ["10", "11", "12"]
    assert cache.of("Pod", ("n", "m"))[0]["metadata"]["resourceVersion"] == "13"


def test_hung_watch_is_restarted_within_75_seconds() -> None:
    server = Server(script=silent)
    watched(server, 300.0)
    begun = [at for at, _ in server.watches]
    assert max(after - before for before, after in itertools.pairwise(begun)) <= 75.0


async def too_old(server: Server) -> AsyncIterator[dict[str, Any]]:
    if len(server.watches) == 1:
        yield {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}
    await asyncio.Event().wait()


def test_expired_version_causes_relist() -> None:
    server = Server(script=too_old)
    server.pods["m-g0-0"] = a_pod(5)
    watched(server, 10.0)
    assert len(server.lists) == 2


async def cut_off(server: Server) -> AsyncIterator[dict[str, Any]]:
    if 30.0 < server.now() < 60.0 or len(server.watches) == 1:
        await asyncio.sleep(max(0.0, 30.0 - server.now()))
        raise ConnectionResetError
    await asyncio.sleep(watches.WATCH_SECONDS)
    yield {"type": "BOOKMARK", "object": a_pod(99)}


def test_watch_recovers_after_api_server_outage() -> None:
    server = Server(script=cut_off)
    watched(server, 200.0)
    assert next(at for at, _ in server.watches if at >= 60.0) <= 66.0
    assert server.is_synced


def test_forbidden_watch_marks_kind_not_served() -> None:
    server = Server(script=silent)
    server.error = ApiException(status=403, reason="Forbidden")
    cache = watched(server, 10.0)
    assert cache.is_not_served("Pod", "n")
    assert len(server.lists) == 1


@pytest.mark.parametrize("status", [429, 500, 503])
def test_failing_watch_backs_off(status: int) -> None:
    server = Server(script=silent)
    server.error = ApiException(status=status, reason="trouble")
    watched(server, 60.0)
    assert 5 <= len(server.lists) <= 20


def test_watch_timeout_is_below_stale_seconds() -> None:
    assert watches.WATCH_SECONDS < watches.WATCH_CLIENT_TIMEOUT_SECONDS < STALE_SECONDS


async def test_paged_lists_and_long_watch_lines() -> None:
    """Uses the real API client over HTTP."""
    asked: list[dict[str, str]] = []
    long = a_pod(12, name="m" * 100_000)

    async def pods(request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        asked.append(query)
        if "watch" in query:
            response = web.StreamResponse()
            await response.prepare(request)
            text = "".join(json.dumps({"type": "ADDED", "object": pod}) + "\n" for pod in (long, a_pod(13)))
            for at in range(0, len(text), 7000):
                await response.write(text[at : at + 7000].encode())
            return response
        page = 2 if "continue" in query else 1
        more = {"continue": "more"} if page == 1 else {}
        return web.json_response(
            {"metadata": {"resourceVersion": "11", **more}, "items": [a_pod(page, f"m-g{page}-0")]}
        )

    application = web.Application()
    application.router.add_get("/api/v1/namespaces/n/pods", pods)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        client: Any = kubernetes.aio.client
        cluster = Cluster()
        async with AsyncExitStack() as stack:
            stack.push_async_exit(cluster.__aexit__)
            await cluster.connect(client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}"))
            items, version = await cluster.list_at("Pod", "n", selector=watches.MANAGED_SELECTOR)
            async with cluster.watch(
                "Pod", "n", selector=watches.MANAGED_SELECTOR, version=version, seconds=5
            ) as events:
                found = [event["object"]["metadata"]["resourceVersion"] async for event in events]
    finally:
        await runner.cleanup()
    assert [item["metadata"]["name"] for item in items] == ["m-g1-0", "m-g2-0"]
    assert found == ["12", "13"]
    assert all(query["labelSelector"] == watches.MANAGED_SELECTOR for query in asked)
    assert asked[-1] | {"resourceVersion": "11", "timeoutSeconds": "5", "allowWatchBookmarks": "true"} == asked[-1]


async def refused(_: Server) -> AsyncIterator[dict[str, Any]]:
    yield {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}


async def ends_at_once(_: Server) -> AsyncIterator[dict[str, Any]]:
    events: tuple[dict[str, Any], ...] = ()
    for event in events:
        yield event


@pytest.mark.parametrize("script", [refused, ends_at_once])
def test_watch_without_progress_backs_off(script: Callable[[Server], AsyncIterator[dict[str, Any]]]) -> None:
    server = Server(script=script)
    watched(server, 60.0)
    assert 10 <= len(server.watches) <= 20
    assert len(server.lists) <= 20
