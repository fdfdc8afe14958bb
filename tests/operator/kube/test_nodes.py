"""Nodes are read once a minute at most, and not seeing them is no failure."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from trimtab_operator.kube.client import API_ERRORS, Cluster
from trimtab_operator.kube.nodes import FRESH_SECONDS, Nodes


class FakeCluster:
    """Counts how often nodes are listed; `status` is the API server's refusal."""

    def __init__(self, status: int | None = None) -> None:
        self.status, self.lists = status, 0

    async def list(self, _kind: str, _namespace: str | None) -> list[dict[str, Any]]:
        self.lists += 1
        if self.status is not None:
            raise API_ERRORS[1](status=self.status)
        return [{"metadata": {"name": "n"}}]


async def test_nodes_are_read_again_only_when_they_are_old() -> None:
    cluster, now = FakeCluster(), [0.0]
    nodes = Nodes(cast("Cluster", cluster), clock=lambda: now[0])
    for moment, lists in ((0.0, 1), (FRESH_SECONDS - 1, 1), (FRESH_SECONDS, 2)):
        now[0] = moment
        assert len(await nodes.present() or ()) == 1
        assert cluster.lists == lists


async def test_who_needs_them_fresher_has_them_read_sooner_for_all() -> None:
    cluster, now = FakeCluster(), [0.0]
    nodes = Nodes(cast("Cluster", cluster), clock=lambda: now[0])
    for now[0], fresh_seconds, lists in ((0.0, 60.0, 1), (4.0, 5.0, 1), (5.0, 5.0, 2), (64.0, 60.0, 2)):
        await nodes.present(fresh_seconds=fresh_seconds)
        assert cluster.lists == lists


async def test_without_the_right_to_see_nodes_there_are_none_to_judge_by() -> None:
    assert await Nodes(cast("Cluster", FakeCluster(403))).present() is None
    with pytest.raises(API_ERRORS):
        await Nodes(cast("Cluster", FakeCluster(500))).present()


async def test_a_thousand_who_ask_at_once_are_served_by_one_list() -> None:
    class SlowCluster(FakeCluster):
        async def list(self, kind: str, namespace: str | None) -> list[dict[str, Any]]:
            await asyncio.sleep(0)
            return await super().list(kind, namespace)

    cluster = SlowCluster()
    nodes = Nodes(cast("Cluster", cluster), clock=lambda: 0.0)
    found = await asyncio.gather(*(nodes.present() for _ in range(1000)))
    assert cluster.lists == 1
    assert all(len(each or ()) == 1 for each in found)


class HeldUp(FakeCluster):
    """Nodes are told of once they may be."""

    def __init__(self, status: int | None = None) -> None:
        super().__init__(status)
        self.may_go, self.begun = asyncio.Event(), 0

    async def list(self, kind: str, namespace: str | None) -> list[dict[str, Any]]:
        self.begun += 1
        await self.may_go.wait()
        return await super().list(kind, namespace)


async def asked_in_vain(nodes: Nodes) -> None:
    """Somebody asks who does not wait for the answer."""
    asking = asyncio.create_task(nodes.present())
    for _ in range(10):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_a_list_that_takes_longer_than_those_wait_who_ask_is_there_for_the_next_one() -> None:
    cluster = HeldUp()
    nodes = Nodes(cast("Cluster", cluster), clock=lambda: 0.0)
    for _ in range(3):
        await asked_in_vain(nodes)
    cluster.may_go.set()
    assert len(await nodes.present() or ()) == 1
    assert cluster.begun == 1


async def test_a_list_that_fails_once_nobody_waits_for_it_is_asked_for_again() -> None:
    cluster = HeldUp(500)
    nodes = Nodes(cast("Cluster", cluster), clock=lambda: 0.0)
    await asked_in_vain(nodes)
    cluster.may_go.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert cluster.lists == 1
    cluster.status = None
    assert len(await nodes.present() or ()) == 1
