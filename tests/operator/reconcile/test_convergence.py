"""Property test: whatever happened before, a resource with a working spec ends with all replicas serving that spec.

Everyday lives contain edits, some to engines that never become Ready, scaling and lost pods. Rough lives add evictions,
quotas, too few nodes, pauses, restarts of the operator and steps of its clock. At the end every obstacle is removed and
a spec that works is written; the operator must apply it and must not roll it back.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from operator_cluster import BROKEN, FakeCluster
from trimtab_operator.observed.groups import is_terminating
from trimtab_operator.resource.spec import PAUSED

BATCHES = 10
LIVES_SHARE = 0.25  # of the number of worlds, for each kind of life
CONVERGENCE_TICKS = 240
GOOD = "engine:9"
LAYOUTS: tuple[dict[str, Any], ...] = ({}, {}, {}, {"parallelism": {"pipeline": 2, "gpusPerNode": 1}})


def a_runtime(image: str, *args: str) -> dict[str, Any]:
    return {"device": "cpu", "image": image, "args": list(args)}


def a_life(chance: random.Random, *, is_rough: bool) -> FakeCluster:
    """Return a cluster after a random life, with a working spec and no obstacle left."""
    rollout: dict[str, Any] = {"startTimeout": "2m", "drainTimeout": "20s"}
    if is_rough:
        rollout |= {"maxSurge": chance.choice([0, 1, "50%"]), "maxUnavailable": chance.choice([1, 2])}
        rollout["bakeTime"] = chance.choice(["0s", "30s", "60s"])
    layout = chance.choice(LAYOUTS) if is_rough else {}
    start_seconds = chance.choice([0.0, 10.0, 40.0])
    runtime = a_runtime("engine:1")
    replicas = chance.randrange(1, 4)
    cluster = FakeCluster(start_seconds=start_seconds, replicas=replicas, runtime=runtime, rollout=rollout, **layout)
    cluster.serves = {"PodDisruptionBudget"}
    cluster.drain_seconds = chance.choice([0.0, 10.0, 20.0])
    if chance.random() < 0.8:
        run(cluster, 12)
    for _ in range(chance.randrange(2, 8)):
        disturb(cluster, chance, is_rough=is_rough)
        run(cluster, chance.choice([0, 1, 1, 2, 3, 6, 12, 24]))
    cluster.nodes, cluster.quota, cluster.unready = 99, 9999, set()
    pause(cluster, is_paused=False)
    cluster.edit(runtime=a_runtime(GOOD))
    if cluster.deployment.spec.replicas == 0:
        cluster.edit(replicas=1)
    return cluster


def run(cluster: FakeCluster, ticks: int) -> None:
    for _ in range(ticks):
        cluster.tick()


def pause(cluster: FakeCluster, *, is_paused: bool) -> None:
    assert cluster.body is not None
    cluster.body["metadata"]["annotations"] = {PAUSED: "true"} if is_paused else {}


def disturb(cluster: FakeCluster, chance: random.Random, *, is_rough: bool) -> None:
    kinds = ["edit", "edit", "break", "scale", "lose a pod"]
    if is_rough:
        kinds += ["evict", "quota", "nodes", "pause", "restart", "clock", "unready", "resume", "learn again"]
    kind = chance.choice(kinds)
    pods = sorted(name for name, pod in cluster.pods.items() if not is_terminating(pod))
    if kind == "edit":
        cluster.edit(runtime=a_runtime(f"engine:{chance.randrange(1, 4)}"))
    elif kind == "break":
        cluster.edit(runtime=a_runtime(f"engine:{chance.randrange(1, 4)}", BROKEN))
    elif kind == "scale":
        cluster.edit(replicas=chance.randrange(5))
    elif kind == "lose a pod" and pods:
        del cluster.pods[chance.choice(pods)]
    elif kind == "evict" and pods:
        name = chance.choice(pods)
        if ("PodDisruptionBudget", "m") not in cluster.objects or cluster.lets_go(name):
            cluster.delete_now("Pod", name, cluster.pods[name]["metadata"]["uid"])
    elif kind == "quota":
        cluster.quota = chance.choice([0, 1, 2, 4, 9999])
    elif kind == "nodes":
        cluster.nodes = chance.choice([0, 1, 2, 4, 99])
    elif kind in ("pause", "resume"):
        pause(cluster, is_paused=kind == "pause")
    elif kind == "restart":
        cluster.restart_operator()
    elif kind == "clock":
        cluster.now += chance.choice([30.0, 300.0])
    elif kind == "unready" and pods:
        cluster.set_ready(chance.choice(pods), ready=chance.random() < 0.5)
    elif kind == "learn again":
        cluster.objects.pop(("ConfigMap", "m-facts"), None)


def has_converged(cluster: FakeCluster) -> bool:
    replicas = cluster.deployment.spec.replicas
    groups = cluster.groups
    images = {pod["spec"]["containers"][0]["image"] for group in groups for pod in group.pods}
    return len(groups) == replicas and images == {GOOD} and all(group.is_ready for group in groups)


@pytest.mark.parametrize("is_rough", [False, True], ids=["everyday", "rough"])
@pytest.mark.parametrize("batch", range(BATCHES))
def test_working_spec_converges_after_any_life(batch: int, is_rough: bool, worlds: int) -> None:
    for seed in range(batch, int(LIVES_SHARE * worlds), BATCHES):
        check(seed, is_rough=is_rough)


def check(seed: int, *, is_rough: bool) -> None:
    cluster = a_life(random.Random(seed), is_rough=is_rough)
    for _ in range(CONVERGENCE_TICKS):
        cluster.tick()
        degraded = cluster.condition("Degraded")
        assert degraded["reason"] != "RolledBack", f"seed {seed}: {degraded['message']}"
        if has_converged(cluster) and cluster.condition("Ready")["status"] == "True":
            return
    raise AssertionError(f"seed {seed}: {cluster.revisions} {cluster.status['conditions']}")
