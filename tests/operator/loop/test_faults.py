"""Faults at every point: an operator killed after each single write; edits in any order; pods that cannot be had.

Whatever happened on the way, what is there in the end is what the last spec asks for.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
from coming_to_rest import come_to_rest, end_state
from operator_builders import a_spec
from operator_cluster import FakeCluster, Killed, a_loop, a_reconciler

ROLLOUT = {"startTimeout": "1m", "drainTimeout": "1s", "bakeTime": "10s"}
WALKS, EDITS = 100, 6  # so 600 transitions
WALK_BATCHES = 10
PIPELINE = {"pipeline": 2, "gpusPerNode": 1}


def a_runtime(*args: str) -> dict[str, Any]:
    return {"device": "cpu", "image": "engine:1", "args": list(args)}


def a_cluster(**spec: Any) -> FakeCluster:
    rollout = {**ROLLOUT, **spec.pop("rollout", {})}
    return FakeCluster(**a_spec(**{"runtime": a_runtime(), "replicas": 2, "rollout": rollout, **spec}))


def settled(**spec: Any) -> FakeCluster:
    cluster = a_cluster(**spec)
    cluster.settle()
    return cluster


def edited(cluster: FakeCluster, **spec: Any) -> FakeCluster:
    cluster.edit(**spec)
    return cluster


STORIES: dict[str, Callable[[], FakeCluster]] = {
    "create": a_cluster,
    "create, several pods each": lambda: a_cluster(parallelism=PIPELINE),
    "roll beside what serves": lambda: edited(settled(), runtime=a_runtime("--seed=1")),
    "roll in place": lambda: edited(settled(rollout={"maxSurge": 0}), runtime=a_runtime("--seed=1")),
    "roll of a single replica": lambda: edited(settled(replicas=1), runtime=a_runtime("--seed=1")),
    "another layout": lambda: edited(settled(), parallelism=PIPELINE),
    "a change that is taken back": lambda: edited(settled(), runtime=a_runtime("--broken")),
    "scale out and roll": lambda: edited(settled(), replicas=3, runtime=a_runtime("--seed=1")),
    "scale in": lambda: edited(settled(parallelism=PIPELINE), replicas=1),
    "delete all replicas": lambda: edited(settled(parallelism=PIPELINE), replicas=0),
}


@pytest.mark.parametrize("story", STORIES)
async def test_an_operator_that_is_killed_after_any_single_write_is_followed_by_one_that_ends_the_same(
    story: str,
) -> None:
    begun = STORIES[story]()
    begun.memory = type(begun.memory)()
    start = pickle.dumps(begun)
    undisturbed: FakeCluster = pickle.loads(start)
    undisturbed.writes = 0
    await come_to_rest(undisturbed, a_reconciler(undisturbed), a_loop(undisturbed))
    wanted, writes = end_state(undisturbed), undisturbed.writes
    assert writes > 3
    for k in range(1, writes + 1):
        killed: FakeCluster = pickle.loads(start)
        killed.lives = k
        with pytest.raises(Killed):
            await come_to_rest(killed, a_reconciler(killed), a_loop(killed))
        killed.restart_operator()
        await come_to_rest(killed, a_reconciler(killed), a_loop(killed))
        assert end_state(killed) == wanted, f"killed after write {k} of {writes}"


def an_edit(chance: random.Random) -> dict[str, Any]:
    """One valid change of a spec."""
    return chance.choice(
        [
            {"replicas": chance.randrange(4)},
            {"runtime": a_runtime(f"--seed={chance.randrange(3)}")},
            {"runtime": {**a_runtime(), "image": f"engine:{chance.randrange(1, 3)}"}},
            {"engine": {"maxNumSeqs": chance.choice([16, 32]), "maxModelLen": chance.choice([512, 1024])}},
            {"engine": None},
            {"tuning": {"mode": chance.choice(["Off", "Recommend", "Auto"])}},
            {"parallelism": chance.choice([None, PIPELINE])},
            {"objectives": chance.choice([None, {"ttft": {"target": "500ms"}}])},
            {"template": chance.choice([None, {"metadata": {"labels": {"team": chance.choice("ab")}}}])},
            {"rollout": {**ROLLOUT, "maxSurge": chance.choice([0, 1, 2, "50%"])}},
            {"rollout": {**ROLLOUT, "maxUnavailable": chance.choice([1, 2]), "bakeTime": chance.choice(["0s", "10s"])}},
        ]
    )


def what_runs(cluster: FakeCluster) -> dict[str, Any]:
    """Everything that makes and reaches engines; what is only remembered, or shared by pods, may differ."""
    found = end_state(cluster)
    memory = ("ConfigMap/", "Secret/")
    return {
        part: {name: value for name, value in found[part].items() if not name.startswith(memory)}
        for part in ("specs", "labels", "pods")
    }


@pytest.mark.parametrize("batch", range(WALK_BATCHES))
def test_whatever_was_asked_for_before_what_runs_is_what_a_fresh_resource_would_get(batch: int) -> None:
    for seed in range(batch, WALKS, WALK_BATCHES):
        chance = random.Random(seed)
        walked = a_cluster()
        for _ in range(EDITS):
            for _ in range(chance.choice((0, 1, 3, 30))):
                walked.tick()
            if chance.random() < 0.2:
                walked.restart_operator()
            walked.edit(**an_edit(chance))
        walked.settle()
        assert walked.body is not None
        fresh = FakeCluster(**walked.body["spec"])
        fresh.settle()
        assert what_runs(walked) == what_runs(fresh), f"seed {seed}"
        assert walked.status["readyReplicas"] == walked.deployment.replicas


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}, "ImagePullBackOff: no such image"),
        ({"terminated": {"reason": "OOMKilled", "exitCode": 137}}, "the engine ended: OOMKilled (exit code 137)"),
        ({"waiting": {"reason": "CrashLoopBackOff"}}, "the engine crashes again and again: boom (exit code 1)"),
    ],
)
def test_a_pod_that_fails_is_told_and_nothing_else_is_touched(state: dict[str, Any], said: str) -> None:
    cluster = settled()
    pod = cluster.pods["m-g1-0"]
    last = {"terminated": {"exitCode": 1, "message": "boom"}}
    status = {"name": "main", "restartCount": 3, "state": state, "lastState": last}
    others = {name: one["metadata"]["uid"] for name, one in cluster.pods.items()}
    for _ in range(20):
        ready = {"type": "Ready", "status": "False"}
        pod["status"] = {**pod["status"], "conditions": [ready], "containerStatuses": [status]}
        turned = cluster.turn()
        assert not turned.children
        assert not turned.care
        cluster.now += 5.0
    assert cluster.condition("Degraded")["message"] == f"m-g1: {said}"
    assert cluster.condition("Serving")["status"] == "True"
    assert {name: one["metadata"]["uid"] for name, one in cluster.pods.items()} == others
