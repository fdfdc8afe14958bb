"""Two operators that both believe to lead do no harm: their actions are equal and idempotent.

The Lease prevents this case (tests/operator/kube/test_leader_election.py); this is the second line of defence.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import virtual_time
from operator_builders import a_spec
from operator_cluster import BROKEN, TICK_SECONDS, FakeCluster, a_loop, a_reconciler
from trimtab_operator.errors import NotLeading
from trimtab_operator.observed.actions import Apply, Patch
from trimtab_operator.reconcile.reconciler import ReconcileLoop, Reconciler
from trimtab_operator.resource.canonical_json import compact

MINUTE_OF_TICKS = round(60 / TICK_SECONDS)
QUICK = {"startTimeout": "20s", "drainTimeout": "1s"}
Event = Callable[[FakeCluster], None]


class SharedCluster(FakeCluster):
    """Cluster in which another operator may have applied the action already; responds like an API server."""

    def __init__(self, **spec: Any) -> None:
        super().__init__(**spec)
        self.forms: dict[tuple[str, str], list[str]] = {}
        """What each child's spec has been, one after the other."""
        self.pods_made = 0

    def apply_now(self, action: Apply) -> None:
        key = (action.manifest["kind"], action.manifest["metadata"]["name"])
        super().apply_now(replace(action, is_new=key not in self.objects))
        form = compact(self.objects[key].get("spec") or {})
        known = self.forms.setdefault(key, [])
        if not known or known[-1] != form:
            known.append(form)

    def delete_now(self, kind: str, name: str, uid: str, grace_seconds: int | None = None) -> None:
        present = self.pods.get(name) if kind == "Pod" else self.objects.get((kind, name))
        if present is not None and present["metadata"].get("uid", "") == uid:
            super().delete_now(kind, name, uid, grace_seconds)

    def patch(self, order: Patch) -> None:
        engine = self.engines.get(order.target.instance)
        if engine is not None and engine.generation == order.if_match:
            super().patch(order)

    def _make_pod(self, name: str, owner: dict[str, Any], template: dict[str, Any]) -> None:
        self.pods_made += 1
        super()._make_pod(name, owner, template)


def scaled(count: int) -> Event:
    return lambda cluster: cluster.edit(replicas=count)


def changed(*arguments: str) -> Event:
    return lambda cluster: cluster.edit(runtime={"device": "cpu", "image": "engine:1", "args": list(arguments)})


def lost_a_pod(cluster: FakeCluster) -> None:
    cluster.pods.pop(min(cluster.pods), None)


def lost_a_set(cluster: FakeCluster) -> None:
    del cluster.objects[next(key for key in sorted(cluster.objects) if key[0] == "StatefulSet")]


EVENTS: dict[str, Event] = {
    "nothing": lambda _: None,
    "more replicas": scaled(4),
    "fewer replicas": scaled(1),
    "an edit": changed("--seed=1"),
    "an edit that breaks": changed(BROKEN),
    "a pod is lost": lost_a_pod,
    "a StatefulSet is deleted": lost_a_set,
}


async def both(
    cluster: FakeCluster, first: tuple[Reconciler, ReconcileLoop], second: tuple[Reconciler, ReconcileLoop]
) -> None:
    """Run one tick of each operator, from the same snapshot."""
    looks = [
        await reconciler.observer.observe(loop.key, loop.state, loop.engines, loop.routers)
        for reconciler, loop in (first, second)
    ]
    for (reconciler, loop), seen in zip((first, second), looks, strict=True):

        async def observe(*_: object, seen: Any = seen, **__: object) -> Any:
            return seen

        blind = replace(reconciler, observer=_FixedObserver(reconciler, observe))  # type: ignore[arg-type]
        await blind.guarded_tick(loop)


class _FixedObserver:
    """Observer with a fixed snapshot."""

    def __init__(self, reconciler: Reconciler, observe: Callable[..., Any]) -> None:
        self._observer, self.observe = reconciler.observer, observe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._observer, name)


async def a_minute(cluster: FakeCluster, leaders: int) -> None:
    """Run ticks of several operators on one cluster."""
    pairs = [(a_reconciler(cluster), a_loop(cluster)) for _ in range(leaders)]
    for _ in range(2 * MINUTE_OF_TICKS):
        if leaders == 1:
            await pairs[0][0].guarded_tick(pairs[0][1])
        else:
            await both(cluster, *pairs)
        cluster.now += TICK_SECONDS
        cluster.controllers()


def a_settled_cluster(layout: dict[str, Any]) -> SharedCluster:
    spec = a_spec(runtime={"device": "cpu", "image": "engine:1"}, rollout=QUICK, parallelism=layout)
    cluster = SharedCluster(replicas=2, **spec)
    cluster.settle()
    cluster.forms, cluster.pods_made, cluster.writes = {}, 0, 0
    return cluster


def end_of(cluster: FakeCluster) -> dict[str, Any]:
    specs = {f"{kind}/{name}": made["spec"] for (kind, name), made in cluster.objects.items() if "spec" in made}
    for spec in specs.values():
        spec.pop("clusterIP", None)
    conditions = {c["type"]: (c["status"], c["reason"]) for c in cluster.status["conditions"]}
    return {"specs": specs, "pods": sorted(cluster.pods), "conditions": conditions}


@pytest.mark.parametrize("layout", [{}, {"pipeline": 2, "gpusPerNode": 1}], ids=["one-pod", "two-pods"])
@pytest.mark.parametrize("event", EVENTS, ids=str)
async def test_two_leaders_converge_like_one(event: str, layout: dict[str, Any]) -> None:
    clusters = [a_settled_cluster(layout) for _ in range(2)]
    for cluster, leaders in zip(clusters, (1, 2), strict=True):
        EVENTS[event](cluster)
        await a_minute(cluster, leaders)
    alone, doubled = clusters
    assert end_of(doubled) == end_of(alone)
    assert doubled.pods_made == alone.pods_made
    for child, forms in doubled.forms.items():
        assert len(forms) <= len(alone.forms.get(child, forms)), f"{child} changes to and fro"


async def test_two_idle_leaders_write_nothing() -> None:
    cluster = a_settled_cluster({})
    await a_minute(cluster, 2)
    cluster.writes = 0
    await a_minute(cluster, 2)
    assert cluster.writes == 0


def test_suspended_leader_writes_nothing() -> None:
    """SIGSTOP at any moment: the process may be suspended after every step of a tick."""

    async def stopped(at: int) -> int:
        now = asyncio.get_running_loop().time
        held_until = now() + 10.0
        cluster = SharedCluster(replicas=2)
        reconciler, loop = a_reconciler(cluster), a_loop(cluster)
        asked = 0

        def is_leading() -> bool:
            nonlocal asked
            asked += 1
            if asked == at:
                asyncio.get_running_loop().skipping.now += 30.0  # type: ignore[attr-defined]
            return now() < held_until

        reconciler = replace(reconciler, executor=replace(reconciler.executor, is_leading=is_leading))
        with pytest.raises(NotLeading):
            await reconciler.tick(loop)
        return cluster.writes

    chance = random.Random(1)
    for at in sorted(chance.sample(range(1, 8), 5)):
        assert virtual_time.run(stopped(at)) == at - 1
