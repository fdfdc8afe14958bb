"""An operator that lets resources rest does what one does that looks at them at every tick, and seldom looks."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from loaded_cluster import LoadedCluster
from operator_cluster import TICK_SECONDS, FakeCluster
from trimtab_operator.observed.engines import EngineSeen, Target
from trimtab_operator.planning.idle import REST_SECONDS, Rest, caught_up, rest_of
from trimtab_operator.planning.plan import Turn, turn
from trimtab_operator.planning.snapshot import World
from trimtab_operator.planning.state import Memory
from trimtab_operator.report.conditions import said_by_us

ENGINE = {"gpuMemoryUtilization": "0.74", "maxNumSeqs": 32, "maxNumBatchedTokens": 512}
SCALING = {"minReplicas": 1, "maxReplicas": 2, "behavior": {"scaleDown": {"stabilizationWindowSeconds": 30}}}


def page_of(seen: EngineSeen) -> bytes | None:
    """What stands in for the engine's page of metrics."""
    sample = seen.sample
    if sample is None or seen.problem is not None:
        return None
    return repr((sample.counters, sample.gauges, sample.ttft, sample.itl, sample.mean_itl)).encode()


class Seen(LoadedCluster):
    """A cluster that is seen by watches, and whose engines have pages of metrics. `rests`: its operator rests."""

    def __init__(self, *, rests: bool, **spec: Any) -> None:
        super().__init__(**spec)
        self.rests = rests
        self.rest: Rest | None = None
        self.looks = 0
        self.before: tuple[str, Turn] | None = None

    def look(self, memory: Memory | None = None) -> World:
        world = super().look(memory)
        engines = {name: replace(seen, page=page_of(seen)) for name, seen in world.engines.items()}
        return replace(world, engines=engines, remembered=self.body)

    def decide(self, memory: Memory | None = None) -> Turn:
        self.looks += 1
        world, rest = self.look(memory), self.rest
        if rest is not None and rest.ended_in(world):
            self.memory = caught_up(rest, self.memory)
        self.world = world
        return turn(world, self.memory)

    def turn(self, decided: Turn | None = None) -> Turn:
        rest = self.rest
        if rest is not None and self.before is not None and self._is_quiet(rest):
            self.rest = rest.later(self.now)
            return self.before[1]
        decided = super().turn(decided)
        self.rest = (
            rest_of(self.world, decided, self.status, before=said_by_us(self.world.deployment.status))
            if self.rests
            else None
        )
        self.before = self._told_by_watches(), decided
        return decided

    def _is_quiet(self, rest: Rest) -> bool:
        assert self.before is not None
        is_told = self._told_by_watches() != self.before[0]
        return (
            not is_told and self.now < rest.until and all(self._page(target) == page for target, page in rest.engines)
        )

    def _page(self, target: Target) -> bytes | None:
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
    """All that anybody could see."""
    values = {name: cluster.engines[pod["metadata"]["uid"]].values for name, pod in cluster.pods.items()}
    specs = {str(key): made.get("spec") for key, made in sorted(cluster.objects.items()) if key[0] != "ConfigMap"}
    return {"status": cluster.status, "events": cluster.events, "values": values, "specs": specs}


@pytest.mark.parametrize("seed", range(3))
def test_what_it_does_is_what_an_operator_does_that_looks_at_every_tick(seed: int) -> None:
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
    assert cluster.looks <= 600 / REST_SECONDS + 2


def test_what_others_write_into_the_status_keeps_no_resource_awake() -> None:
    cluster = a_resting(tuning={"mode": "Auto"})
    assert cluster.body is not None
    theirs = {"type": "Checked", "status": "True", "reason": "Yes", "message": "", "lastTransitionTime": "2026-01-01"}
    cluster.body["status"]["conditions"] = [*cluster.body["status"]["conditions"], theirs]
    cluster.tick()
    cluster.tick()
    assert cluster.rest is not None


@pytest.mark.parametrize("what", ["a request", "a pod", "the spec"])
def test_whatever_happens_ends_the_rest(what: str) -> None:
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


def test_who_may_be_scaled_in_does_not_rest() -> None:
    cluster = a_resting(tuning={"mode": "Recommend"}, scaling={"minReplicas": 1, "maxReplicas": 3})
    cluster.edit(scaling={"minReplicas": 2, "maxReplicas": 3})
    cluster.settle()
    assert cluster.rest is not None
    cluster.edit(scaling={"minReplicas": 1, "maxReplicas": 3})
    cluster.tick()
    cluster.tick()
    assert cluster.status["desiredReplicas"] == 2
    assert cluster.rest is None
