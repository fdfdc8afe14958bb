"""Property test: an operator that is killed at any write converges to the same state as an undisturbed one.

Randomized states: a resource whose children are as rendered, edited, missing or owned by another resource, with missing
pods, engines that lost their tuned values, and automatic replicas with changing bounds and load. In each state the
operator is killed after a random write (ConfigMap, child, engine values, Event, status), and a new operator continues
from the persisted state only.
"""

from __future__ import annotations

import functools
import pickle
import random
from typing import Any

import pytest
from coming_to_rest import come_to_rest, end_state
from operator_builders import a_spec
from operator_cluster import BROKEN, TOKEN, FakeCluster, Killed, a_loop, a_reconciler
from trimtab_operator.builders.config_map import tuning_config_map
from trimtab_operator.builders.labels import REVISION_LABEL, ROLE_LABEL
from trimtab_operator.planning.tuning import dump_tuner_state
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.rules import replicas
from trimtab_operator.tuner.scaling import control_law
from trimtab_operator.tuner.state import TunerState

BATCHES = 20
SCALED_SHARE = 0.06
SCALED_BATCHES = 6
STILL_TICKS = 12  # steps of a scale-in are a hold time apart: a start-up and a drain
QUICK = {"startTimeout": "20s", "drainTimeout": "1s"}
MOST_REPLICAS = 3
SURGES: tuple[int | str, ...] = (0, 1, 1, "50%")
LAYOUTS: tuple[dict[str, Any], ...] = ({}, {}, {"pipeline": 2, "gpusPerNode": 1})
APPLIED = TunerState(applied={Parameter.MAX_NUM_SEQS: 16})


def a_runtime(*args: str) -> dict[str, Any]:
    return {"device": "cpu", "image": "engine:1", "args": list(args)}


def a_small_spec(layout: int, mode: str, surge: int | str) -> dict[str, Any]:
    rollout = {**QUICK, "maxSurge": surge, "bakeTime": "10s" if layout == 0 else "0s"}
    return a_spec(runtime=a_runtime(), rollout=rollout, tuning={"mode": mode}, parallelism=LAYOUTS[layout])


@functools.cache
def a_settled_cluster(replicas: int, layout: int, mode: str, surge: int | str, nodes: int) -> bytes:
    """Return an idle cluster, to be copied."""
    cluster = FakeCluster(replicas=replicas, nodes=nodes, **a_small_spec(layout, mode, surge))
    cluster.objects["ConfigMap", "m-tuning"] = tuning_config_map(
        cluster.deployment, dump_tuner_state(APPLIED, key=TOKEN)
    )
    cluster.objects["ConfigMap", "m-tuning"]["metadata"] |= {"uid": "o-0", "creationTimestamp": "2026-01-01T12:00:00Z"}
    cluster.settle()
    return pickle.dumps(cluster)


def a_copy(cluster: bytes) -> FakeCluster:
    found = pickle.loads(cluster)
    assert isinstance(found, FakeCluster)
    return found


def a_world(chance: random.Random, *, is_scaled: bool = False) -> FakeCluster:
    """Return a cluster in a random state, often with much pending work."""
    layout, mode = chance.randrange(len(LAYOUTS)), chance.choice(["Off", "Recommend", "Auto"])
    surge = chance.choice(SURGES)
    spare = chance.choice((0, 9, 9))  # there may be no node for another replica
    nodes = (MOST_REPLICAS + is_scaled) * (2 if LAYOUTS[layout] else 1) + spare
    if chance.random() < 0.2:
        spec = a_small_spec(layout, mode, surge)
        cluster = FakeCluster(knows_the_model=chance.random() < 0.5, replicas=chance.randrange(3), nodes=nodes, **spec)
    else:
        cluster = a_copy(a_settled_cluster(chance.randrange(1, 4), layout, mode, surge, nodes))
    if is_scaled:
        _scale(cluster, chance)
    for _ in range(chance.randrange(1, 4)):
        if is_scaled and chance.random() < 0.3:
            _scale(cluster, chance)
        _disturb(cluster, chance)
        for _ in range(chance.choice((0, 0, 1))):
            cluster.tick()
    cluster.controllers()
    return cluster


def _scale(cluster: FakeCluster, chance: random.Random) -> None:
    """Change the bounds of automatic replicas, and sometimes the tuning mode."""
    least = chance.randrange(1, 3)
    pace: dict[str, Any] = {"scaleDown": {"stabilizationWindowSeconds": 0}}
    if chance.random() < 0.3:
        pace["scaleUp"] = {"policies": [{"type": "Pods", "value": 1, "periodSeconds": 1}]}
    cluster.edit(scaling={"minReplicas": least, "maxReplicas": least + chance.randrange(3), "behavior": pace})
    if chance.random() < 0.7:
        cluster.edit(tuning={"mode": "Auto"})


def _disturb(cluster: FakeCluster, chance: random.Random) -> None:
    """Apply a random external change to the cluster."""
    kind = chance.choice(
        ["scale", "edit", "edit", "live edit", "break", "lose a child", "lose a pod", "meddle", "forget", "refuse"]
    )
    if kind == "scale":
        cluster.edit(replicas=chance.randrange(MOST_REPLICAS + 1))
    elif kind == "edit":
        cluster.edit(runtime=a_runtime(f"--seed={chance.randrange(3)}"))
    elif kind == "live edit":
        cluster.edit(engine={"maxNumSeqs": chance.choice([64, 200, 300])})  # caps: 256, or 600 for the last
    elif kind == "break":
        cluster.edit(runtime=a_runtime(BROKEN))
    elif kind == "refuse":
        cluster.edit(parallelism=chance.choice([{"tensor": 2}, {}]))  # 9 heads are not divisible by 2
    elif kind == "lose a child" and cluster.objects:
        del cluster.objects[chance.choice(sorted(cluster.objects))]
    elif kind == "lose a pod" and cluster.pods:
        del cluster.pods[chance.choice(sorted(cluster.pods))]
    elif kind == "meddle":
        found = [m for (kind, _), m in sorted(cluster.objects.items()) if kind == "StatefulSet"]
        if found:
            chance.choice(found)["spec"]["template"]["spec"]["containers"][0]["image"] = "evil:1"
    elif kind == "forget":
        for engine in cluster.engines.values():
            engine.values[Parameter.MAX_NUM_SEQS] = 32


@pytest.mark.parametrize("batch", range(BATCHES))
async def test_killed_operator_converges_like_undisturbed_one(batch: int, worlds: int) -> None:
    for seed in range(batch, worlds, BATCHES):
        chance = random.Random(seed)
        undisturbed, killed = await both_ends(a_world(chance), chance)
        ends = end_state(killed), end_state(undisturbed)
        different = {part: (ends[0][part], ends[1][part]) for part in ends[0] if ends[0][part] != ends[1][part]}
        assert not different, f"seed {seed}"


@pytest.mark.parametrize("batch", range(SCALED_BATCHES))
async def test_killed_operator_converges_with_autoscaling(
    batch: int, worlds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removed replicas may differ: the serving or updated ones at that moment stay."""
    monkeypatch.setattr(control_law, "LEARN_SECONDS", 0.0)
    for seed in range(batch, int(SCALED_SHARE * worlds), SCALED_BATCHES):
        chance = random.Random(seed)
        needed = chance.randrange(1, 6)
        need = replicas.Need(needed, 3.0, 3.0, 1.0, 0.8, 0.99)
        monkeypatch.setattr(replicas, "_need", lambda *_, need=need: need)
        undisturbed, killed = await both_ends(a_world(chance, is_scaled=True), chance, still_ticks=STILL_TICKS)
        ends = without_names(killed), without_names(undisturbed)
        different = {part: (ends[0][part], ends[1][part]) for part in ends[0] if ends[0][part] != ends[1][part]}
        assert not different, f"seed {seed}"
        scaling, wanted = killed.deployment.spec.scaling, killed.status["desiredReplicas"]
        assert scaling is not None
        assert scaling.min_replicas <= wanted <= scaling.max_replicas, f"seed {seed}"
        if killed.condition("TuningActive")["reason"] == "Tuning":
            assert wanted == max(scaling.min_replicas, min(scaling.max_replicas, needed)), f"seed {seed}"


async def both_ends(
    undisturbed: FakeCluster, chance: random.Random, *, still_ticks: int = 1
) -> tuple[FakeCluster, FakeCluster]:
    """Return the final states with one operator and with several killed ones."""
    undisturbed.writes = 0
    killed = a_copy(pickle.dumps(undisturbed))
    loop = a_loop(undisturbed)
    await come_to_rest(undisturbed, a_reconciler(undisturbed), loop, still_ticks=still_ticks)
    left = undisturbed.decide(loop.state)
    assert left.is_idle, f"more to do: {[a.reason for a in (*left.state_writes, *left.children)]}"
    for _ in range(chance.choice((1, 1, 2))):
        killed.lives = chance.randint(1, max(1, undisturbed.writes))
        try:
            await come_to_rest(killed, a_reconciler(killed), a_loop(killed), still_ticks=still_ticks)
        except Killed:
            if chance.random() < 0.5:
                killed.controllers()
        killed.restart_operator()
    killed.controllers()
    await come_to_rest(killed, a_reconciler(killed), a_loop(killed), still_ticks=still_ticks)
    return undisturbed, killed


def without_names(cluster: FakeCluster) -> dict[str, Any]:
    """Return the final state independent of replica ordinals."""
    found = end_state(cluster)
    pods = sorted(
        (labels[ROLE_LABEL], labels[REVISION_LABEL]) for labels in found["pods"].values() if ROLE_LABEL in labels
    )
    conditions = {kind: (status, reason) for kind, (status, reason, _) in found["conditions"].items()}
    return {"status": found["status"], "conditions": conditions, "pods": pods}
