"""Faults at every point: the operator is killed or loses its API server after each write, edits arrive in any order,
pods cannot be created, engines hang.

The final state must be the desired state of the last spec.
"""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Callable, Mapping
from typing import Any, cast

import aiohttp
import pytest
from coming_to_rest import come_to_rest, end_state
from kubernetes.aio.client.exceptions import ApiException
from operator_builders import a_spec
from operator_cluster import TICK_SECONDS, FakeCluster, Killed, a_loop, a_reconciler
from trimtab_operator.engines import scrape
from trimtab_operator.engines.poller import EnginePoller
from trimtab_operator.observed.engines import EngineObservation, EngineTarget

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
async def test_killed_after_any_write_converges(
    story: str,
) -> None:
    begun = STORIES[story]()
    begun.state = type(begun.state)()
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


AWAY_SECONDS = 30.0
CUT_OFF = (
    "create",
    "roll beside what serves",
    "a change that is taken back",
    "scale out and roll",
    "delete all replicas",
)


class Cut(FakeCluster):
    """Cluster whose API server is unavailable for AWAY_SECONDS after a number of writes."""

    away_after: int | None = None
    away_until = 0.0

    def _written(self) -> None:
        super()._written()
        if self.writes == self.away_after:
            self.away_until = self.now + AWAY_SECONDS

    def _reach(self) -> None:
        if self.now < self.away_until:
            raise ConnectionResetError("the API server is away")

    async def get(self, *arguments: Any) -> Any:
        self._reach()
        return await super().get(*arguments)

    async def list_children(self, deployment: Any) -> Any:
        self._reach()
        return await super().list_children(deployment)

    async def apply(self, *arguments: Any, **options: Any) -> None:
        self._reach()
        await super().apply(*arguments, **options)

    async def delete(self, *arguments: Any, **options: Any) -> None:
        self._reach()
        await super().delete(*arguments, **options)

    async def apply_status(self, *arguments: Any) -> Any:
        self._reach()
        return await super().apply_status(*arguments)

    async def event(self, *arguments: Any, **options: Any) -> None:
        self._reach()
        await super().event(*arguments, **options)


async def lived_through(cluster: Cut) -> Cut:
    """Run one operator until it is idle, despite failures. Pods continue meanwhile."""
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    for _ in range(60):
        failures = loop.failures
        cluster.now += await reconciler.guarded_tick(loop)
        cluster.controllers()
        if failures and not loop.failures:
            break
    await come_to_rest(cluster, reconciler, loop)
    return cluster


@pytest.mark.parametrize("story", CUT_OFF)
async def test_api_server_outage_restarts_no_engine(story: str) -> None:
    begun = STORIES[story]()
    begun.state = type(begun.state)()
    begun.__class__, begun.writes = Cut, 0
    start = pickle.dumps(begun)
    undisturbed: Cut = await lived_through(pickle.loads(start))
    for k in range(1, undisturbed.writes + 1):
        cut: Cut = pickle.loads(start)
        cut.away_after = k
        await lived_through(cut)
        assert cut.away_until > 0
        assert end_state(cut) == end_state(undisturbed), f"cut off after write {k} of {undisturbed.writes}"
        assert len(cut.engines) == len(undisturbed.engines), f"an engine more, cut off after write {k}"


def an_edit(chance: random.Random) -> dict[str, Any]:
    """Return one valid spec change."""
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
    """Return all objects that create and reach engines, without state and shared objects."""
    found = end_state(cluster)
    state = ("ConfigMap/", "Secret/")
    return {
        part: {name: value for name, value in found[part].items() if not name.startswith(state)}
        for part in ("specs", "labels", "pods")
    }


@pytest.mark.parametrize("batch", range(WALK_BATCHES))
def test_any_edit_history_converges_to_fresh_state(batch: int) -> None:
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
        ({"terminated": {"reason": "OOMKilled", "exitCode": 137}}, "the engine terminated: OOMKilled (exit code 137)"),
        ({"waiting": {"reason": "CrashLoopBackOff"}}, "the engine is in a crash loop: boom (exit code 1)"),
    ],
)
def test_failed_pod_is_reported_only(state: dict[str, Any], said: str) -> None:
    cluster = settled()
    pod = cluster.pods["m-g1-0"]
    last = {"terminated": {"exitCode": 1, "message": "boom"}}
    status = {"name": "main", "restartCount": 3, "state": state, "lastState": last}
    others = {name: one["metadata"]["uid"] for name, one in cluster.pods.items()}
    for _ in range(20):
        ready = {"type": "Ready", "status": "False"}
        pod["status"] = {**pod["status"], "conditions": [ready], "containerStatuses": [status]}
        turned = cluster.plan_reconcile()
        assert not turned.children
        assert not turned.urgent_deletes
        cluster.now += 5.0
    assert cluster.condition("Degraded")["message"] == f"m-g1: {said}"
    assert cluster.condition("Serving")["status"] == "True"
    assert {name: one["metadata"]["uid"] for name, one in cluster.pods.items()} == others


def test_node_pressure_eviction_is_reported_and_replaced() -> None:
    cluster = settled()
    pod, others = cluster.pods["m-g1-0"], cluster.pods["m-g0-0"]["metadata"]["uid"]
    words = "The node was low on resource: memory."
    pod["status"] = {"phase": "Failed", "reason": "Evicted", "message": words}
    turned = cluster.plan_reconcile()
    assert not turned.children
    assert not turned.urgent_deletes
    assert cluster.condition("Degraded")["message"] == f"m-g1: Evicted: {words}"
    assert cluster.condition("Serving")["status"] == "True"
    del cluster.pods["m-g1-0"]  # its StatefulSet's controller makes it anew
    cluster.controllers()
    cluster.settle()
    assert cluster.condition("Ready")["status"] == "True"
    assert cluster.condition("Degraded")["status"] == "False"
    assert cluster.pods["m-g0-0"]["metadata"]["uid"] == others


async def test_hung_engine_is_reported_and_blocks_no_edit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = settled(tuning={"mode": "Auto"})
    never = asyncio.Event()

    async def answers(target: EngineTarget, **_: Any) -> EngineObservation:
        if target.group == "m-g1":
            await never.wait()
        return cluster.said(target)

    monkeypatch.setattr(scrape, "observe_engine", answers)
    engines = EnginePoller(cast("aiohttp.ClientSession", None), lambda: cluster.now, timeout_seconds=0.02)
    reconciler, loop = a_reconciler(cluster), a_loop(cluster, engines)
    try:
        for _ in range(30):
            await reconciler.tick(loop)
            cluster.now += TICK_SECONDS
        available = cluster.condition("MetricsAvailable")
        assert available["status"] == "False"
        assert "m-g1" in available["message"]
        assert cluster.condition("Serving")["status"] == "True"
        uids = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
        cluster.edit(replicas=3)
        await reconciler.tick(loop)
        assert ("StatefulSet", "m-g2") in cluster.objects
        cluster.controllers()
        assert {name: cluster.pods[name]["metadata"]["uid"] for name in uids} == uids
    finally:
        engines.close()


async def test_foreign_condition_causes_no_write() -> None:
    told: list[Mapping[str, Any]] = []

    class Shared(FakeCluster):
        """API server that merges conditions by type."""

        def write_status(self, status: Mapping[str, Any]) -> None:
            assert self.body is not None
            theirs = [c for c in self.body["status"].get("conditions", []) if c["type"] == "Audited"]
            self._written()
            told.append(status)
            self.body["status"] = {**status, "conditions": [*status["conditions"], *theirs]}

    cluster = Shared(**a_spec(runtime=a_runtime()))
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    for _ in range(5):
        await reconciler.tick(loop)
        cluster.controllers()
    theirs = {"type": "Audited", "status": "True", "reason": "Yes", "message": "", "lastTransitionTime": "2026-01-01"}
    cluster.status["conditions"].insert(3, theirs)
    written = cluster.writes
    for _ in range(5):
        await reconciler.tick(loop)
        cluster.now += TICK_SECONDS
    assert cluster.writes == written
    cluster.failures = [ApiException(status=500, reason="the children cannot be seen")] * 6
    for _ in range(3):
        await reconciler.guarded_tick(loop)
    assert cluster.condition("Ready")["status"] == "Unknown"
    assert "Audited" not in {c["type"] for c in told[-1]["conditions"]}, "what is theirs is not ours to keep"
