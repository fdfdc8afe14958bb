"""The API server rejects some objects: only what depends on them stops, and every rejection is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kubernetes.aio.client.exceptions import ApiException
from operator_cluster import BROKEN, TICK_SECONDS, FakeCluster, a_loop, a_reconciler
from trimtab_operator.errors import NameTaken
from trimtab_operator.observed.actions import Apply
from trimtab_operator.planning.state import ReconcilerState
from trimtab_operator.reconcile.reconciler import ReconcileLoop, Reconciler
from trimtab_operator.resource.installation import Installation, NetworkAccess
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.state import TunerState

ROLLOUT = {"startTimeout": "1m", "drainTimeout": "1s", "bakeTime": "10s"}
POLICY = 'admission webhook "policy.example.com" denied the request'


class RejectingCluster(FakeCluster):
    """Cluster whose API server rejects the writes that `is_rejected` selects."""

    is_rejected: Callable[[Apply], bool] = staticmethod(lambda _: False)
    error: Exception = ApiException(status=403, reason=POLICY)

    async def apply(self, manifest: Any, owner: Any, *, is_new: bool) -> None:
        if type(self).is_rejected(Apply(manifest, is_new, "")):
            raise self.error
        await super().apply(manifest, owner, is_new=is_new)


def runtime(*args: str, image: str = "engine:1") -> dict[str, Any]:
    return {"device": "cpu", "image": image, "args": list(args)}


@pytest.fixture
def cluster() -> FakeCluster:
    RejectingCluster.is_rejected = staticmethod(lambda _: False)
    RejectingCluster.error = ApiException(status=403, reason=POLICY)
    made = RejectingCluster(replicas=3, runtime=runtime(), rollout=ROLLOUT)
    made.serves = {"PodDisruptionBudget", "NetworkPolicy"}
    made.installation = Installation(network=NetworkAccess(operator={"podSelector": {}}))
    made.settle()
    made.restart_operator()
    return made


def reject(kind: str, *, only_new: bool = False) -> None:
    RejectingCluster.is_rejected = staticmethod(
        lambda action: action.manifest["kind"] == kind and (action.is_new or not only_new)
    )


def damage(cluster: FakeCluster, kind: str) -> None:
    """Edit or delete the objects of a kind, so that the operator must write them."""
    for key in [key for key in cluster.objects if key[0] == kind]:
        if kind in ("Service", "NetworkPolicy", "PodDisruptionBudget"):
            cluster.objects[key]["spec"] = {"clusterIP": "10.0.0.9", "selector": {"app": "other"}}
        else:
            del cluster.objects[key]


async def run(cluster: FakeCluster, ticks: int = 40) -> None:
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    await go_on(cluster, reconciler, loop, ticks)


async def go_on(cluster: FakeCluster, reconciler: Reconciler, loop: ReconcileLoop, ticks: int) -> None:
    for _ in range(ticks):
        delay = await reconciler.guarded_tick(loop)
        assert delay <= 15.0, "the rest must not wait for the rejected object"
        cluster.now += TICK_SECONDS
        cluster.controllers()


@pytest.mark.parametrize("kind", ["Service", "ConfigMap", "PodDisruptionBudget", "NetworkPolicy", "ServiceAccount"])
@pytest.mark.parametrize("replicas", [1, 5])
async def test_scaling_continues_while_a_kind_is_rejected(cluster: FakeCluster, kind: str, replicas: int) -> None:
    if kind == "ServiceAccount":
        cluster.objects["ServiceAccount", "m-engine"]["metadata"]["labels"] = {}
    else:
        damage(cluster, kind)
    reject(kind)
    if kind == "ConfigMap":
        cluster.learn_the_model()
    cluster.edit(replicas=replicas)
    await run(cluster)
    assert [group.is_ready for group in cluster.groups] == [True] * replicas


@pytest.mark.parametrize("kind", ["Service", "ConfigMap", "PodDisruptionBudget", "NetworkPolicy"])
async def test_rollout_continues_while_a_kind_is_rejected(cluster: FakeCluster, kind: str) -> None:
    damage(cluster, kind)
    reject(kind)
    if kind == "ConfigMap":
        cluster.learn_the_model()
    cluster.edit(runtime=runtime(image="engine:2"))
    await run(cluster)
    images = {pod["spec"]["containers"][0]["image"] for group in cluster.groups for pod in group.pods}
    assert images == {"engine:2"}
    assert all(group.is_ready for group in cluster.groups)


@pytest.mark.parametrize("kind", ["Service", "ConfigMap", "PodDisruptionBudget", "NetworkPolicy"])
async def test_rollback_continues_while_a_kind_is_rejected(cluster: FakeCluster, kind: str) -> None:
    if kind != "ConfigMap":
        damage(cluster, kind)
    reject(kind)
    cluster.edit(runtime=runtime(BROKEN))
    await run(cluster, 60)
    assert [group.is_ready for group in cluster.groups] == [True] * 3
    assert not any(BROKEN in pod["spec"]["containers"][0]["args"] for pod in cluster.pods.values())


@pytest.mark.parametrize("kind", ["Service", "PodDisruptionBudget"])
async def test_lost_pod_is_replaced_while_a_kind_is_rejected(cluster: FakeCluster, kind: str) -> None:
    damage(cluster, kind)
    reject(kind)
    del cluster.objects["StatefulSet", "m-g1"]
    cluster.controllers()
    await run(cluster)
    assert [group.is_ready for group in cluster.groups] == [True] * 3


async def test_rejected_surge_replica_falls_back_to_in_place(cluster: FakeCluster) -> None:
    reject("StatefulSet", only_new=True)
    RejectingCluster.error = ApiException(
        status=403, reason="exceeded quota: sets, requested: count/statefulsets.apps=1"
    )
    cluster.edit(runtime=runtime(image="engine:2"))
    await run(cluster, 60)
    images = {pod["spec"]["containers"][0]["image"] for group in cluster.groups for pod in group.pods}
    assert images == {"engine:2"}
    assert "SurgeUnschedulable" in cluster.events


async def test_engine_is_not_patched_while_state_is_rejected(cluster: FakeCluster) -> None:
    cluster.edit(tuning={"mode": "Auto"})
    reject("ConfigMap")
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    loop.state = ReconcilerState(tuner=TunerState(applied={Parameter.MAX_NUM_SEQS: 16}))
    await go_on(cluster, reconciler, loop, 5)
    assert {cluster.engine(ordinal).generation for ordinal in range(3)} == {1}
    RejectingCluster.is_rejected = staticmethod(lambda _: False)
    await go_on(cluster, reconciler, loop, 5)
    assert {cluster.engine(ordinal).values[Parameter.MAX_NUM_SEQS] for ordinal in range(3)} == {16}


async def test_every_rejection_is_reported(cluster: FakeCluster) -> None:
    damage(cluster, "Service")
    cluster.edit(replicas=5)
    RejectingCluster.is_rejected = staticmethod(lambda action: action.manifest["kind"] in ("Service", "StatefulSet"))
    await run(cluster, 1)
    message = cluster.condition("Ready")["message"]
    assert all(name in message for name in ("Service m:", "StatefulSet m-g3:", "StatefulSet m-g4:", POLICY))
    assert cluster.condition("Stalled")["status"] == "True"


@pytest.mark.parametrize("kind", ["PodDisruptionBudget", "NetworkPolicy"])
async def test_rejected_optional_child_degrades_only(cluster: FakeCluster, kind: str) -> None:
    del cluster.objects[kind, "m"]
    reject(kind)
    RejectingCluster.error = NameTaken(f"{kind} m exists and has another owner; delete it")
    await run(cluster, 3)
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.condition("Stalled")["status"] == "False"
    degraded = cluster.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "NameConflict")
    assert f"{kind} m exists" in degraded["message"]


async def test_unavailable_api_server_stops_the_iteration(cluster: FakeCluster) -> None:
    cluster.edit(replicas=6)
    reject("StatefulSet")
    RejectingCluster.error = ConnectionResetError("connection reset")
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    assert await reconciler.guarded_tick(loop) > 0
    assert loop.failures == 1
