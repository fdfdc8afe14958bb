"""The loop: it writes what differs, is still when nothing does, survives failures and ends with its resource."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from prometheus_client import generate_latest
from trimtab_operator.builders.config_map import facts_config_map
from trimtab_operator.decisions.actions import Apply
from trimtab_operator.decisions.model_facts import FACTS_KEY, SUBJECT_KEY, subject_of
from trimtab_operator.decisions.plan import plan
from trimtab_operator.edge.bounded_http import new_client
from trimtab_operator.edge.cluster import Cluster
from trimtab_operator.edge.health import Heartbeats, OperatorMetrics
from trimtab_operator.edge.nodes import Nodes
from trimtab_operator.errors import Gone
from trimtab_operator.loop.reconciler import BUSY_TICK_SECONDS, Reconciler
from trimtab_operator.loop.view import LoopMemory
from trimtab_operator.loop.wake_ups import WakeUps
from trimtab_operator.observed.groups import Observed
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.tuner import Decision, Reason, TickResult, TunerState, Verdict

FACTS = (Path(__file__).parents[2] / "golden" / "model_facts_smollm2.json").read_text()


class FakeCluster:
    """Keeps what is applied; no controllers, so no pods. `failures` are raised by the next observations."""

    def __init__(self, spec: dict[str, Any], *, knows_the_model: bool = False) -> None:
        metadata = {"name": "m", "namespace": "models", "uid": "u-1", "generation": 1}
        self.body: dict[str, Any] | None = {"metadata": metadata, "spec": spec}
        self.children: dict[tuple[str, str], dict[str, Any]] = {}
        if knows_the_model:
            deployment = InferenceDeployment.parse(self.body, default_image="engine:1")
            data = {SUBJECT_KEY: subject_of(deployment), FACTS_KEY: FACTS}
            self.children["ConfigMap", "m-facts"] = facts_config_map(deployment, data)
        self.pods: list[dict[str, Any]] = []
        self.writes = 0
        self.events: list[str] = []
        self.refusals: list[dict[str, Any]] = []  # Events of StatefulSets
        self.failures: list[Exception] = []

    async def get(self, _kind: str, _namespace: str, _name: str) -> dict[str, Any] | None:
        return copy.deepcopy(self.body)

    async def observe(self, _deployment: InferenceDeployment) -> Observed:
        if self.failures:
            raise self.failures.pop(0)

        def of(kind: str) -> tuple[dict[str, Any], ...]:
            return tuple(m for (k, _), m in sorted(self.children.items()) if k == kind)

        return Observed(of("Service"), of("StatefulSet"), of("ConfigMap"), tuple(self.pods), of("Job"))

    async def list(
        self, kind: str, _namespace: str | None, *, selector: str | None = None, fields: str | None = None
    ) -> list[dict[str, Any]]:
        if kind == "Event":
            assert fields == "involvedObject.kind=StatefulSet,reason=FailedCreate"
            return self.refusals
        return []

    async def apply(self, manifest: Mapping[str, Any], _owner: InferenceDeployment, *, is_new: bool) -> None:
        key = (manifest["kind"], manifest["metadata"]["name"])
        assert is_new == (key not in self.children)
        self.children[key] = copy.deepcopy(dict(manifest))
        self.writes += 1

    async def delete(
        self, kind: str, _namespace: str, name: str, *, uid: str, grace_seconds: int | None = None
    ) -> None:
        self.writes += 1
        if kind == "Pod":
            self.pods = [pod for pod in self.pods if pod["metadata"]["name"] != name]
            return
        assert self.children.pop((kind, name))["metadata"].get("uid", "") == uid

    async def apply_status(self, _deployment: InferenceDeployment, status: Mapping[str, Any]) -> None:
        assert self.body is not None
        self.body["status"] = copy.deepcopy(dict(status))
        self.writes += 1

    async def event(
        self, _deployment: InferenceDeployment, *, kind: str, reason: str, message: str, now: datetime, key: str
    ) -> None:
        self.events.append(reason)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with new_client() as client:
        yield client


def a_reconciler(
    cluster: FakeCluster, http: httpx.AsyncClient, clock: Callable[[], float] = lambda: 1_000_000.0
) -> Reconciler:
    return Reconciler(
        cluster=cast("Cluster", cluster),
        nodes=Nodes(cast("Cluster", cluster)),
        http=http,
        secret=b"s",
        default_image="engine:1",
        tick_seconds=15.0,
        heartbeats=Heartbeats(max_age_seconds=60.0),
        metrics=OperatorMetrics(),
        wake_ups=WakeUps(),
        clock=clock,
    )


LONG_AGO, NOW = "1970-01-10T00:00:00Z", "1970-01-12T13:46:30Z"
GOOD = {"model": {"uri": "file:///models/m"}, "runtime": {"device": "cpu"}}


async def test_the_first_tick_creates_the_second_starts_the_clock_and_the_third_writes_nothing(
    http: httpx.AsyncClient,
) -> None:
    cluster, memory = FakeCluster(GOOD, knows_the_model=True), LoopMemory()
    reconciler = a_reconciler(cluster, http)
    assert await reconciler.tick("models", "m", "u-1", memory) == BUSY_TICK_SECONDS
    kinds = sorted(kind for kind, _ in cluster.children)
    assert kinds == ["ConfigMap", "ConfigMap", "Service", "Service", "StatefulSet"]
    assert cluster.events == ["ReplicaCreated"]
    await reconciler.tick("models", "m", "u-1", memory)
    assert ("ConfigMap", "m-rollout") in cluster.children
    written = cluster.writes
    await reconciler.tick("models", "m", "u-1", memory)
    assert cluster.writes == written


async def test_no_engine_exists_before_the_model_was_read(http: httpx.AsyncClient) -> None:
    cluster, memory = FakeCluster(GOOD), LoopMemory()
    reconciler = a_reconciler(cluster, http)
    assert await reconciler.tick("models", "m", "u-1", memory) == BUSY_TICK_SECONDS
    assert [kind for kind, _ in cluster.children if kind in ("Job", "StatefulSet")] == ["Job"]
    assert cluster.body is not None
    assert cluster.body["status"]["phase"] == "ReadingModel"
    ended = {"terminated": {"exitCode": 0, "message": FACTS}}
    owner = [{"uid": None}]  # the Job that was just created has no uid here
    cluster.pods = [
        {"metadata": {"name": "x", "ownerReferences": owner}, "status": {"containerStatuses": [{"state": ended}]}}
    ]
    await reconciler.tick("models", "m", "u-1", memory)
    assert {kind for kind, _ in cluster.children} == {"ConfigMap", "Service", "StatefulSet"}


async def test_a_model_that_cannot_be_read_starts_nothing_and_shows_the_last_words(http: httpx.AsyncClient) -> None:
    cluster, memory = FakeCluster(GOOD), LoopMemory()
    reconciler = a_reconciler(cluster, http)
    await reconciler.tick("models", "m", "u-1", memory)
    ended = {"terminated": {"exitCode": 2, "message": "no such file"}}
    cluster.pods = [
        {
            "metadata": {"name": "x", "ownerReferences": [{"uid": None}]},
            "status": {"containerStatuses": [{"state": ended}]},
        }
    ]
    await reconciler.tick("models", "m", "u-1", memory)
    assert all(kind == "ConfigMap" for kind, _ in cluster.children)
    assert cluster.body is not None
    by_type = {c["type"]: c for c in cluster.body["status"]["conditions"]}
    assert (by_type["Ready"]["status"], by_type["Ready"]["reason"]) == ("False", "ModelUnreadable")
    assert "no such file" in by_type["Degraded"]["message"]
    assert by_type["LayoutValid"]["status"] == "Unknown"


async def test_a_refused_spec_creates_nothing_and_says_so(http: httpx.AsyncClient) -> None:
    cluster = FakeCluster({**GOOD, "model": {"uri": "hf://a/b"}})
    await a_reconciler(cluster, http).tick("models", "m", "u-1", LoopMemory())
    assert cluster.children == {}
    assert cluster.body is not None
    assert cluster.body["status"]["phase"] == "InvalidSpec"
    assert "hf://" in cluster.body["status"]["conditions"][0]["message"]


@pytest.mark.parametrize("bad", [{"model": {"uri": "hf://a/b"}}, {"parallelism": {"tensor": 2, "gpusPerNode": 1}}])
async def test_what_runs_is_cared_for_while_its_spec_is_refused(bad: dict[str, Any], http: httpx.AsyncClient) -> None:
    """By its own rules or by the model's: SmolLM2's 9 heads. A leader that ends takes its worker along all the same."""
    cluster = FakeCluster({**GOOD, "parallelism": {"pipeline": 2, "gpusPerNode": 1}}, knows_the_model=True)
    deployment = InferenceDeployment.parse(cluster.body or {}, default_image="engine:1")
    rendezvous = {"clusterIP": "10.0.0.1"}
    manifests = plan(deployment, Observed(), admin_token_sha256="")
    for action in manifests:
        assert isinstance(action, Apply)
        manifest = copy.deepcopy(dict(action.manifest))
        cluster.children[manifest["kind"], manifest["metadata"]["name"]] = manifest
        manifest["spec"] = {**manifest.get("spec", {}), **(rendezvous if manifest["kind"] == "Service" else {})}
    await a_reconciler(cluster, http).tick("models", "m", "u-1", LoopMemory())
    cluster.pods = [_pod_of(cluster, "m-g0", leaving=True), _pod_of(cluster, "m-g0-w")]
    assert cluster.body is not None
    cluster.body["spec"] = {**GOOD, **bad}
    await a_reconciler(cluster, http).tick("models", "m", "u-1", LoopMemory())
    assert cluster.body["status"]["phase"] == "InvalidSpec"
    assert [pod["metadata"]["name"] for pod in cluster.pods] == ["m-g0-0"]
    assert "RestartedAsOne" in cluster.events


def _pod_of(cluster: FakeCluster, stateful_set: str, *, leaving: bool = False) -> dict[str, Any]:
    labels = cluster.children["StatefulSet", stateful_set]["spec"]["template"]["metadata"]["labels"]
    metadata = {"name": f"{stateful_set}-0", "uid": stateful_set, "labels": labels, "creationTimestamp": LONG_AGO}
    if leaving:
        metadata |= {"deletionTimestamp": NOW, "deletionGracePeriodSeconds": 45}
    return {"metadata": metadata, "spec": {"nodeName": "one"}, "status": {}}


async def test_a_group_that_a_quota_lets_have_only_its_leader_names_the_quota_and_gives_back_until_an_edit(
    http: httpx.AsyncClient,
) -> None:
    two_pods = {**GOOD, "parallelism": {"tensor": 3, "pipeline": 2, "gpusPerNode": 3}}
    cluster, memory, moment = FakeCluster(two_pods, knows_the_model=True), LoopMemory(), [1_000_000.0]
    reconciler = a_reconciler(cluster, http, lambda: moment[0])
    assert cluster.body is not None
    await reconciler.tick("models", "m", "u-1", memory)
    cluster.children["Service", "m-g0"]["spec"]["clusterIP"] = "10.0.0.1"
    await reconciler.tick("models", "m", "u-1", memory)
    cluster.pods = [_pod_of(cluster, "m-g0")]
    quota = 'pods "m-g0-w-0" is forbidden: exceeded quota: few, requested: pods=1, used: pods=1, limited: pods=1'
    message = f"create Pod m-g0-w-0 in StatefulSet m-g0-w failed error: {quota}"
    cluster.refusals = [{"involvedObject": {"name": "m-g0-w"}, "message": message}]

    def replicas() -> list[int]:
        return [cluster.children["StatefulSet", name]["spec"]["replicas"] for name in ("m-g0", "m-g0-w")]

    def limited() -> tuple[str, str]:
        assert cluster.body is not None
        found = next(c for c in cluster.body["status"]["conditions"] if c["type"] == "ScalingLimited")
        return found["reason"], found["message"]

    for _ in range(2):
        await reconciler.tick("models", "m", "u-1", memory)
        moment[0] += 6
    assert limited() == ("PodsRefused", f"m-g0: 1 of 2 pods are not created yet: {quota}")
    assert replicas() == [1, 1]
    moment[0] += 120
    await reconciler.tick("models", "m", "u-1", memory)
    assert (replicas(), cluster.events.count("GaveBack")) == ([0, 0], 1)
    cluster.pods = []
    moment[0] += 1
    await reconciler.tick("models", "m", "u-1", memory)
    assert (replicas(), quota in limited()[1]) == ([0, 0], True)
    cluster.body["metadata"]["generation"] = 2
    await reconciler.tick("models", "m", "u-1", memory)
    assert (replicas(), cluster.events.count("GaveBack")) == ([1, 1], 1)


async def test_a_spec_that_cannot_be_read_is_told_field_by_field(http: httpx.AsyncClient) -> None:
    cluster = FakeCluster({**GOOD, "replicas": "many"})
    await a_reconciler(cluster, http).tick("models", "m", "u-1", LoopMemory())
    assert cluster.body is not None
    assert "spec.replicas" in cluster.body["status"]["conditions"][0]["message"]


@pytest.mark.parametrize("change", ["deleted", "deleting", "namesake"])
async def test_the_loop_ends_with_its_resource(change: str, http: httpx.AsyncClient) -> None:
    cluster = FakeCluster(GOOD)
    assert cluster.body is not None
    if change == "deleted":
        cluster.body = None
    elif change == "deleting":
        cluster.body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    else:
        cluster.body["metadata"]["uid"] = "u-2"
    reconciler = a_reconciler(cluster, http)
    with pytest.raises(Gone):
        await reconciler.tick("models", "m", "u-1", LoopMemory())
    await reconciler.run("models", "m", "u-1")
    assert reconciler.heartbeats.problems() == []


async def test_a_failing_tick_is_tried_again_and_shown_when_it_keeps_failing(http: httpx.AsyncClient) -> None:
    cluster, memory = FakeCluster(GOOD, knows_the_model=True), LoopMemory()
    reconciler = a_reconciler(cluster, http)
    cluster.failures = [OSError("no route")] * 3
    delays = [await reconciler._guarded_tick("models", "m", "u-1", memory) for _ in range(3)]
    assert delays == [5.0, 10.0, 20.0]
    assert cluster.body is not None
    assert cluster.body["status"]["phase"] == "ReconcileError"
    await reconciler._guarded_tick("models", "m", "u-1", memory)
    assert memory.failures == 0
    assert cluster.body["status"]["phase"] == "Pending"


async def test_a_failure_that_cannot_even_be_shown_does_not_end_the_loop(http: httpx.AsyncClient) -> None:
    cluster, memory = FakeCluster(GOOD), LoopMemory()
    cluster.failures = [KeyError("a bug")] * 6
    reconciler = a_reconciler(cluster, http)
    delays = [await reconciler._guarded_tick("models", "m", "u-1", memory) for _ in range(3)]
    assert delays == [5.0, 10.0, 20.0]


async def test_a_resource_that_is_gone_is_no_longer_counted(http: httpx.AsyncClient) -> None:
    cluster = FakeCluster(GOOD)
    reconciler = a_reconciler(cluster, http)
    await reconciler.tick("models", "m", "u-1", LoopMemory())
    cluster.body = None
    await reconciler.run("models", "m", "u-1")
    assert b"trimtab_desired_replicas{" not in generate_latest(reconciler.metrics.registry)


def test_a_namesake_keeps_its_alarm_when_the_old_loop_ends() -> None:
    wake_ups = WakeUps()
    old = wake_ups.of("models", "m")
    new = wake_ups.of("models", "m")
    wake_ups.forget("models", "m", old)
    wake_ups.ring("models", "m")
    assert new.is_set()


async def test_a_decision_whose_memory_could_not_be_written_is_told_on_the_next_tick(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, memory = FakeCluster(GOOD, knows_the_model=True), LoopMemory()
    reconciler, apply, refusing = a_reconciler(cluster, http), cluster.apply, [OSError("no route")]

    async def refuses_a_config_map_once(m: Mapping[str, Any], owner: InferenceDeployment, *, is_new: bool) -> None:
        if m["kind"] == "ConfigMap" and refusing:
            raise refusing.pop()
        await apply(m, owner, is_new=is_new)

    def decides_once(state: TunerState, *_: object) -> TickResult:
        made = Decision("id", 1.0, Reason.SATURATED, None, None, None, "Every knob is at its bound.", {})
        decisions = () if state.history else (made,)
        ok = Verdict(True, "Tuning", "")
        return TickResult(state if state.history else state.with_decision(made), ok, ok, (), decisions)

    monkeypatch.setattr(cluster, "apply", refuses_a_config_map_once)
    monkeypatch.setattr("trimtab_operator.loop.engine_tuning.tick", decides_once)
    for _ in range(3):
        await reconciler._guarded_tick("models", "m", "u-1", memory)
    assert cluster.events.count("Saturated") == 1
