"""Pods evicted through the API, as by `kubectl drain`.

Each pod stops gracefully and is recreated elsewhere. The PodDisruptionBudget never lets the last replica be evicted.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from operator_cluster import TICK_SECONDS, FakeCluster, a_loop, a_reconciler
from trimtab_operator.kube.client import Cluster
from trimtab_operator.observed.groups import is_pod_ready, is_terminating, revision_label
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.time import timestamp

BATCHES = 4
SHARE = 0.02
START_SECONDS = 20.0
TWO_PODS = {"pipeline": 2, "gpusPerNode": 1}


def settled(**spec: Any) -> FakeCluster:
    cluster = FakeCluster(start_seconds=START_SECONDS, **spec)
    cluster.serves.add("PodDisruptionBudget")
    cluster.settle()
    return cluster


def is_healthy(pod: Manifest) -> bool:
    return is_pod_ready(pod) and not is_terminating(pod)


def evict(cluster: FakeCluster, name: str) -> bool:
    """Evict as the API server does. Return False if the budget blocks it. An unready pod may always be evicted."""
    if not cluster.lets_go(name):
        return False
    pod = cluster.pods[name]
    pod["metadata"]["deletionTimestamp"] = timestamp(datetime.fromtimestamp(cluster.now + 1.0, UTC))
    return True


def serving(cluster: FakeCluster) -> int:
    """Return the number of replicas whose pods, of any revision, are all Ready and not terminating."""
    healthy = 0
    for group in cluster.groups:
        is_of_one = len({revision_label(pod) for pod in group.pods}) == 1
        healthy += is_of_one and len(group.pods) == group.num_pods and all(map(is_healthy, group.pods))
    return healthy


def test_evicted_pod_is_replaced() -> None:
    cluster = settled(replicas=2)
    uids = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
    assert evict(cluster, "m-g1-0")
    assert not evict(cluster, "m-g0-0"), "the last one"
    turned = cluster.plan_reconcile()
    assert not turned.urgent_deletes, "it drains: nobody cuts that short"
    assert not turned.children
    assert cluster.condition("Serving")["status"] == "True"
    cluster.controllers()
    assert not evict(cluster, "m-g0-0"), "its successor loads"
    cluster.settle()
    assert cluster.pods["m-g0-0"]["metadata"]["uid"] == uids["m-g0-0"]
    assert cluster.pods["m-g1-0"]["metadata"]["uid"] != uids["m-g1-0"]
    assert cluster.condition("Ready")["status"] == "True"
    assert evict(cluster, "m-g0-0")


def test_evicted_worker_restarts_its_replica_gracefully() -> None:
    cluster = settled(replicas=2, parallelism=TWO_PODS)
    assert evict(cluster, "m-g1-w-0")
    turned = cluster.plan_reconcile()
    assert [(action.name, action.grace_seconds) for action in turned.urgent_deletes] == [("m-g1-0", None)]
    assert not any(evict(cluster, name) for name in ("m-g0-0", "m-g0-w-0"))
    assert serving(cluster) == 1
    cluster.controllers()
    cluster.settle()
    assert serving(cluster) == 2


def test_a_single_replica_may_be_evicted() -> None:
    """Its node drain must not block forever; availability requires two replicas."""
    cluster = settled(replicas=1)
    assert evict(cluster, "m-g0-0")
    cluster.plan_reconcile()
    assert cluster.condition("Serving")["status"] == "False"
    cluster.controllers()
    cluster.settle()
    assert serving(cluster) == 1


def test_rollout_waits_for_evicted_pod() -> None:
    cluster = settled(replicas=3, rollout={"maxSurge": 0, "bakeTime": "0s"})
    cluster.edit(engine={"blockSize": 16})
    cluster.plan_reconcile()
    cluster.controllers()
    assert [pod.name for pod in cluster.decide().urgent_deletes] == ["m-g0-0"], "its template is another one by now"
    assert evict(cluster, "m-g2-0")
    cluster.plan_reconcile()
    assert serving(cluster) == 2
    cluster.settle()
    assert len(set(cluster.revisions)) == 1
    assert serving(cluster) == 3


class Contested(FakeCluster):
    """Cluster in which another replica is evicted just after the operator revalidated its snapshot."""

    victim: str | None = None
    is_evicted = False

    async def are_current(self, manifests: Iterable[Manifest]) -> bool:
        if self.victim is not None and ("Pod" in {m.get("kind", "Pod") for m in manifests}):
            self.is_evicted |= evict(self, self.victim)
        return True


@pytest.mark.parametrize("layout", [{}, TWO_PODS])
async def test_drain_before_replacement_keeps_availability(
    layout: dict[str, int],
) -> None:
    cluster = Contested(
        start_seconds=START_SECONDS, replicas=3, parallelism=layout, rollout={"maxSurge": 0, "bakeTime": "0s"}
    )
    cluster.serves.add("PodDisruptionBudget")
    cluster.settle()
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    reconciler = replace(reconciler, observer=replace(reconciler.observer, cluster=cast("Cluster", cluster)))
    await reconciler.tick(loop)
    cluster.edit(engine={"blockSize": 16})
    for tick in range(4):
        if tick == 1:
            cluster.victim = "m-g2-0"
        await reconciler.tick(loop)
        assert serving(cluster) >= 2, f"tick {tick}"
        cluster.now += TICK_SECONDS
        cluster.controllers()
    assert cluster.is_evicted
    cluster.victim = None
    cluster.settle()
    assert len(set(cluster.revisions)) == 1
    assert serving(cluster) == 3


@pytest.mark.parametrize("surge", [0, 1])
@pytest.mark.parametrize("batch", range(BATCHES))
def test_drains_during_rollout_respect_max_unavailable(batch: int, surge: int, worlds: int) -> None:
    for seed in range(batch, int(SHARE * worlds), BATCHES):
        chance = random.Random(seed)
        replicas, layout = chance.randrange(2, 5), chance.choice(({}, {}, TWO_PODS))
        cluster = settled(replicas=replicas, parallelism=layout, rollout={"maxSurge": surge, "bakeTime": "0s"})
        evicted = 0
        for tick in range(60):
            if tick == 3:
                cluster.edit(engine={"blockSize": 16})
            for name in chance.sample(sorted(cluster.pods), len(cluster.pods)):
                evicted += chance.random() < 0.3 and evict(cluster, name)
            assert serving(cluster) >= replicas - 1, f"seed {seed}, tick {tick}: drained"
            cluster.plan_reconcile()
            assert serving(cluster) >= replicas - 1, f"seed {seed}, tick {tick}: rolled"
            cluster.now += TICK_SECONDS
            cluster.controllers()
        assert evicted > 0
        cluster.settle()
        assert len(set(cluster.revisions)) == 1
        assert serving(cluster) == replicas
