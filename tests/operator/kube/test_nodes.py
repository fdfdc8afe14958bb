"""Nodes are listed once a minute at most, and a missing permission is not an error."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from trimtab_operator.kube.client import API_ERRORS, Cluster
from trimtab_operator.kube.nodes import FRESH_SECONDS, Nodes


class FakeCluster:
    """Cluster that counts node lists; `status` is the error of the API server."""

    def __init__(self, status: int | None = None) -> None:
        self.status, self.lists = status, 0

    async def list(self, _kind: str, _namespace: str | None) -> list[dict[str, Any]]:
        self.lists += 1
        if self.status is not None:
            raise API_ERRORS[1](status=self.status)
        return [{"metadata": {"name": "n"}}]


async def test_nodes_are_cached_until_stale() -> None:
    cluster, now = FakeCluster(), [0.0]
    nodes = Nodes(cast("Cluster", cluster), clock=lambda: now[0])
    for moment, lists in ((0.0, 1), (FRESH_SECONDS - 1, 1), (FRESH_SECONDS, 2)):
        now[0] = moment
        assert len(await nodes.list_nodes() or ()) == 1
        assert cluster.lists == lists


async def test_nodes_fresh_seconds_forces_new_list() -> None:
    cluster, now = FakeCluster(), [0.0]
    nodes = Nodes(cast("Cluster", cluster), clock=lambda: now[0])
    for now[0], fresh_seconds, lists in ((0.0, 60.0, 1), (4.0, 5.0, 1), (5.0, 5.0, 2), (64.0, 60.0, 2)):
        await nodes.list_nodes(fresh_seconds=fresh_seconds)
        assert cluster.lists == lists


async def test_nodes_without_permission_returns_none() -> None:
    assert await Nodes(cast("Cluster", FakeCluster(403))).list_nodes() is None
    with pytest.raises(API_ERRORS):
        await Nodes(cast("Cluster", FakeCluster(500))).list_nodes()


async def test_concurrent_node_requests_share_one_list() -> None:
    class SlowCluster(FakeCluster):
        async def list(self, kind: str, namespace: str | None) -> list[dict[str, Any]]:
            await asyncio.sleep(0)
            return await super().list(kind, namespace)

    cluster = SlowCluster()
    nodes = Nodes(cast("Cluster", cluster), clock=lambda: 0.0)
    found = await asyncio.gather(*(nodes.list_nodes() for _ in range(1000)))
    assert cluster.lists == 1
    assert all(len(each or ()) == 1 for each in found)


class HeldUp(FakeCluster):
    """Cluster whose node list is delayed."""

    def __init__(self, status: int | None = None) -> None:
        super().__init__(status)
        self.may_go, self.begun = asyncio.Event(), 0

    async def list(self, kind: str, namespace: str | None) -> list[dict[str, Any]]:
        self.begun += 1
        await self.may_go.wait()
        return await super().list(kind, namespace)


async def asked_in_vain(nodes: Nodes) -> None:
    """Start a request and cancel it."""
    asking = asyncio.create_task(nodes.list_nodes())
    for _ in range(10):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_slow_node_list_survives_cancellation() -> None:
    cluster = HeldUp()
    nodes = Nodes(cast("Cluster", cluster), clock=lambda: 0.0)
    for _ in range(3):
        await asked_in_vain(nodes)
    cluster.may_go.set()
    assert len(await nodes.list_nodes() or ()) == 1
    assert cluster.begun == 1


async def test_failed_node_list_is_retried() -> None:
    cluster = HeldUp(500)
    nodes = Nodes(cast("Cluster", cluster), clock=lambda: 0.0)
    await asked_in_vain(nodes)
    cluster.may_go.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert cluster.lists == 1
    cluster.status = None
    assert len(await nodes.list_nodes() or ()) == 1
