"""An operator with idle detection acts like one that reconciles at every tick, with fewer reconciles."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from loaded_cluster import LoadedCluster
from operator_cluster import TICK_SECONDS, FakeCluster
from trimtab_operator.observed.engines import EngineObservation, EngineTarget
from trimtab_operator.planning.idle import IDLE_RECONCILE_SECONDS, IdleState, detect_idle, replay_idle_period
from trimtab_operator.planning.plan import ReconcilePlan, plan_reconcile
from trimtab_operator.planning.snapshot import ClusterSnapshot
from trimtab_operator.planning.state import ReconcilerState
from trimtab_operator.report.conditions import without_foreign_conditions

ENGINE = {"gpuMemoryUtilization": "0.74", "maxNumSeqs": 32, "maxNumBatchedTokens": 512}
SCALING = {"minReplicas": 1, "maxReplicas": 2, "behavior": {"scaleDown": {"stabilizationWindowSeconds": 30}}}


def page_of(seen: EngineObservation) -> bytes | None:
    """Return a substitute for the engine's metrics page."""
    sample = seen.sample
    if sample is None or seen.problem is not None:
        return None
    return repr((sample.counters, sample.gauges, sample.ttft, sample.itl, sample.mean_itl)).encode()


class Seen(LoadedCluster):
    """A cluster with watches and metrics pages; `rests` enables idle detection."""

    def __init__(self, *, rests: bool, **spec: Any) -> None:
        super().__init__(**spec)
        self.rests = rests
        self.rest: IdleState | None = None
        self.looks = 0
        self.before: tuple[str, ReconcilePlan] | None = None

    def look(self, state: ReconcilerState | None = None) -> ClusterSnapshot:
        snapshot = super().look(state)
        engines = {name: replace(seen, page=page_of(seen)) for name, seen in snapshot.engines.items()}
        return replace(snapshot, engines=engines, cached_resource=self.body)

    def decide(self, state: ReconcilerState | None = None) -> ReconcilePlan:
        self.looks += 1
        snapshot, rest = self.look(state), self.rest
        if rest is not None and rest.has_ended(snapshot):
            self.state = replay_idle_period(rest, self.state)
        self.snapshot = snapshot
        return plan_reconcile(snapshot, self.state)

    def plan_reconcile(self, plan: ReconcilePlan | None = None) -> ReconcilePlan:
        rest = self.rest
        if rest is not None and self.before is not None and self._is_quiet(rest):
            self.rest = rest.seen_again(self.now)
            return self.before[1]
        plan = super().plan_reconcile(plan)
        self.rest = (
            detect_idle(
                self.snapshot, plan, self.status, before=without_foreign_conditions(self.snapshot.deployment.status)
            )
            if self.rests
            else None
        )
        self.before = self._told_by_watches(), plan
        return plan

    def _is_quiet(self, rest: IdleState) -> bool:
        assert self.before is not None
        is_told = self._told_by_watches() != self.before[0]
        return (
            not is_told and self.now < rest.until and all(self._page(target) == page for target, page in rest.engines)
        )

    def _page(self, target: EngineTarget) -> bytes | None:
        told, finished = dict(self.told), list(self.engines[target.instance].finished)
        try:
            return page_of(self.said(target))
        finally:
            self.told, self.engines[target.instance].finished = told, finished

    def _told_by_watches(self) -> str:
        assert self.body is not None
        written = {key: value for key, value in self.body.items() if key != "status"}
        others = {str(key): made for key, made in sorted(self.objects.items()) if key[0] != "ConfigMap"}
        return json.dumps([written, others, self.pods], sort_keys=True, default=str)


def seen_of(cluster: FakeCluster) -> Mapping[str, Any]:
    """Return everything that is visible to users."""
    values = {name: cluster.engines[pod["metadata"]["uid"]].values for name, pod in cluster.pods.items()}
    specs = {str(key): made.get("spec") for key, made in sorted(cluster.objects.items()) if key[0] != "ConfigMap"}
    return {"status": cluster.status, "events": cluster.events, "values": values, "specs": specs}


@pytest.mark.parametrize("seed", range(3))
def test_idle_operator_acts_like_one_that_polls_every_tick(seed: int) -> None:
    chance = random.Random(seed)
    mode = chance.choice(["Recommend", "Auto", "Auto"])
    spec: dict[str, Any] = {
        "engine": ENGINE,
        "tuning": {"mode": mode},
        "runtime": {"device": "cpu"},
        "rollout": {"bakeTime": "0s"},
    }
    if chance.random() < 0.5:
        spec["scaling"] = SCALING
    both = Seen(rests=True, **spec), Seen(rests=False, **spec)
    for _ in range(4):
        clients, pause = chance.choice([0, 0, 1, 6]), chance.choice([2.0, 9.0])
        ticks, edit = chance.randrange(8, 20), chance.choice([None, None, {"maxSurge": 1}, {"drainTimeout": "3s"}])
        for cluster in both:
            cluster.load(clients, pause_seconds=pause)
            if edit is not None:
                cluster.edit(rollout={"bakeTime": "0s", **edit})
        for _ in range(ticks):
            for cluster in both:
                cluster.tick()
            assert seen_of(both[0]) == seen_of(both[1])
    assert both[0].looks < both[1].looks


def a_resting(**spec: Any) -> Seen:
    cluster = Seen(rests=True, runtime={"device": "cpu"}, rollout={"bakeTime": "0s"}, **spec)
    cluster.settle()
    cluster.looks = 0
    return cluster


def test_a_resource_at_rest_is_looked_at_seldom() -> None:
    cluster = a_resting(tuning={"mode": "Auto"})
    for _ in range(round(600 / TICK_SECONDS)):
        cluster.tick()
    assert cluster.looks <= 600 / IDLE_RECONCILE_SECONDS + 2


def test_foreign_status_conditions_do_not_prevent_idle() -> None:
    cluster = a_resting(tuning={"mode": "Auto"})
    assert cluster.body is not None
    theirs = {"type": "Checked", "status": "True", "reason": "Yes", "message": "", "lastTransitionTime": "2026-01-01"}
    cluster.body["status"]["conditions"] = [*cluster.body["status"]["conditions"], theirs]
    cluster.tick()
    cluster.tick()
    assert cluster.rest is not None


@pytest.mark.parametrize("what", ["a request", "a pod", "the spec"])
def test_any_change_ends_idle(what: str) -> None:
    cluster = a_resting(tuning={"mode": "Auto"})
    cluster.tick()
    assert cluster.rest is not None
    looks = cluster.looks
    if what == "a request":
        cluster.load(1)
        cluster.tick()
    elif what == "a pod":
        cluster.set_ready("m-g0-0", False)
    else:
        cluster.edit(replicas=2)
    cluster.tick()
    assert cluster.looks > looks


def test_resource_that_may_scale_in_is_not_idle() -> None:
    cluster = a_resting(tuning={"mode": "Recommend"}, scaling={"minReplicas": 1, "maxReplicas": 3})
    cluster.edit(scaling={"minReplicas": 2, "maxReplicas": 3})
    cluster.settle()
    assert cluster.rest is not None
    cluster.edit(scaling={"minReplicas": 1, "maxReplicas": 3})
    cluster.tick()
    cluster.tick()
    assert cluster.status["desiredReplicas"] == 2
    assert cluster.rest is None
