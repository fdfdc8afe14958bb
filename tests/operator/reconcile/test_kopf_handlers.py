"""Kopf's handlers against a real Kopf and an HTTP API server: which loops run, and what reaches the cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import kopf
import pytest
from small_api_server import SmallApiServer, make_kubeconfig
from trimtab_operator.kube.informer_cache import Cache, Store
from trimtab_operator.reconcile.kopf_handlers import ReconcileLoops, build_registry, build_settings
from trimtab_operator.reconcile.reconciler import Reconciler
from trimtab_operator.resource.spec import GROUP, KIND, PLURAL, VERSION

RESOURCES = f"/apis/{GROUP}/{VERSION}/{PLURAL}"
TIMEOUT_SECONDS = 60.0


def make_resource(name: str, uid: str, version: int = 1, **metadata: Any) -> dict[str, Any]:
    meta = {"name": name, "namespace": "n", "uid": uid, "resourceVersion": str(version), **metadata}
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": meta, "spec": {}}


class FakeReconciler:
    """Records which loops run. A loop runs until it is cancelled or its resource is named in `gone`."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.running: set[str] = set()
        self.failing: set[str] = set()

    async def run(self, _namespace: str, name: str, uid: str) -> None:
        self.started.append(uid)
        if uid in self.failing:
            self.failing.remove(uid)
            raise RuntimeError(name)
        self.running.add(uid)
        try:
            await asyncio.Event().wait()
        finally:
            self.running.discard(uid)


class Running:
    """An operator that runs against the server."""

    def __init__(self) -> None:
        self.server = SmallApiServer()
        self.server.events[RESOURCES] = asyncio.Queue()
        self.reconciler = FakeReconciler()
        self.cache = Cache([Store(KIND)])

    async def send(self, event: str, body: dict[str, Any]) -> None:
        await self.server.events[RESOURCES].put({"type": event, "object": body})

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not condition():  # noqa: ASYNC110 - the condition has no event
                await asyncio.sleep(0.02)

    def known(self) -> set[str]:
        found = self.cache.list_all(KIND, None)
        return set() if found is None else {body["metadata"]["uid"] for body in found}


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    @asynccontextmanager
    async def start(*listed: dict[str, Any]) -> AsyncIterator[Running]:
        made = Running()
        made.server.listed[RESOURCES] = list(listed)
        async with made.server.served():
            monkeypatch.setenv("KUBECONFIG", str(make_kubeconfig(tmp_path, made.server.port)))
            loops, stop = ReconcileLoops(cast("Reconciler", made.reconciler)), asyncio.Event()
            operator = asyncio.create_task(
                kopf.operator(
                    registry=build_registry(loops, made.cache),
                    settings=build_settings(),
                    standalone=True,
                    clusterwide=True,
                    stop_flag=stop,
                )
            )
            try:
                yield made
            finally:
                stop.set()
                await operator
                assert not made.reconciler.running

    return start


async def test_listed_resources_get_one_loop_each(running: Callable[..., Any]) -> None:
    async with running(make_resource("a", "u-a"), make_resource("b", "u-b")) as operator:
        await operator.until(lambda: operator.reconciler.running == {"u-a", "u-b"})
        await operator.send("MODIFIED", make_resource("a", "u-a", 2))
        await operator.until(lambda: operator.cache.of(KIND, ("n", "a"))[0]["metadata"]["resourceVersion"] == "2")
        assert sorted(operator.reconciler.started) == ["u-a", "u-b"]
        assert operator.known() == {"u-a", "u-b"}
        assert operator.cache.is_synced(KIND, "n")


async def test_recreated_resource_gets_a_new_loop(running: Callable[..., Any]) -> None:
    async with running(make_resource("a", "u-1")) as operator:
        await operator.until(lambda: operator.reconciler.running == {"u-1"})
        await operator.send("DELETED", make_resource("a", "u-1", 2))
        await operator.send("ADDED", make_resource("a", "u-2", 3))
        await operator.until(lambda: "u-2" in operator.reconciler.running)
        assert operator.known() == {"u-2"}


async def test_terminating_resource_gets_no_loop(running: Callable[..., Any]) -> None:
    terminating = make_resource("a", "u-a", deletionTimestamp="2026-01-01T00:00:00Z")
    async with running(terminating) as operator:
        await operator.send("ADDED", make_resource("b", "u-b", 2))
        await operator.until(lambda: "u-b" in operator.reconciler.running)
        assert operator.reconciler.started == ["u-b"]


async def test_failed_loop_is_started_again_by_the_next_event(running: Callable[..., Any]) -> None:
    async with running() as operator:
        operator.reconciler.failing.add("u-a")
        await operator.send("ADDED", make_resource("a", "u-a", 2))
        await operator.until(lambda: operator.reconciler.started == ["u-a"])
        await operator.send("MODIFIED", make_resource("a", "u-a", 3))
        await operator.until(lambda: operator.reconciler.running == {"u-a"})


async def test_kopf_sends_no_write(running: Callable[..., Any]) -> None:
    """The operator has no permission to write to resources: no finalizer, annotation or Event."""
    async with running(make_resource("a", "u-a")) as operator:
        await operator.until(lambda: operator.reconciler.running == {"u-a"})
        await operator.send("MODIFIED", make_resource("a", "u-a", 2))
        await operator.until(lambda: operator.cache.of(KIND, ("n", "a"))[0]["metadata"]["resourceVersion"] == "2")
        assert operator.server.methods == {"GET"}


def test_discarded_object_leaves_the_cache_unless_it_was_recreated() -> None:
    cache = Cache([Store(KIND)])
    cache.apply_kopf_event(KIND, None, make_resource("a", "u-1"))
    cache.discard(KIND, ("n", "a"), "u-2")
    assert cache.of(KIND, ("n", "a"))
    cache.discard(KIND, ("n", "a"), "u-1")
    assert not cache.of(KIND, ("n", "a"))


def test_silent_watch_is_restarted_within_75_seconds() -> None:
    watching = build_settings().watching
    assert watching.server_timeout is not None
    assert watching.client_timeout is not None
    assert watching.server_timeout < watching.client_timeout <= 75 - 10  # and the time to connect
