"""Reconcile loop: writes differences, is idle without any, survives failures and ends with its resource."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar, Literal, cast

import aiohttp
import pytest
from kubernetes.aio.client.exceptions import ApiException
from operator_builders import MODEL_FACTS, a_resource
from operator_cluster import KEY, TICK_SECONDS, FakeCluster, FakeEnginePoller, a_loop, a_reconciler
from prometheus_client import generate_latest
from trimtab_operator.engines import scrape
from trimtab_operator.engines.poller import EnginePoller
from trimtab_operator.engines.router_client import RouterPoller
from trimtab_operator.errors import Gone, NameTaken
from trimtab_operator.kube.informer_cache import Cache, Store
from trimtab_operator.observed.actions import Apply
from trimtab_operator.observed.engines import EngineObservation, EngineTarget
from trimtab_operator.observed.groups import ObservedChildren
from trimtab_operator.planning import state as state_module
from trimtab_operator.planning.idle import IDLE_RECONCILE_SECONDS, IdleState
from trimtab_operator.planning.plan import ReconcilePlan, plan_reconcile
from trimtab_operator.planning.snapshot import ClusterSnapshot
from trimtab_operator.reconcile import reconciler as reconciler_module
from trimtab_operator.reconcile.executor import ExecutionResult, Executor
from trimtab_operator.reconcile.health import Heartbeats
from trimtab_operator.reconcile.observer import ClusterObserver, Key
from trimtab_operator.reconcile.priority_limiter import PriorityLimiter, Slot
from trimtab_operator.reconcile.reconciler import (
    BUSY_TICK_SECONDS,
    MAX_CONCURRENT_TICKS,
    MAX_UNREAD_METRICS_SECONDS,
    ReconcileLoop,
    Reconciler,
    _wait_for_event,
)
from trimtab_operator.reconcile.work_queue import WorkQueue
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import KIND, InferenceDeployment
from trimtab_operator.tuner.decide import Condition, TunerOutput
from trimtab_operator.tuner.moves import Decision, Move, Reason, ReplicaCount
from trimtab_operator.tuner.state import TunerState


async def test_idle_tick_writes_nothing() -> None:
    cluster = FakeCluster()
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    assert await reconciler.tick(loop) == BUSY_TICK_SECONDS
    kinds = sorted(kind for kind, _ in cluster.objects)
    assert kinds == ["ConfigMap", "ConfigMap", "Service", "ServiceAccount", "StatefulSet"]
    assert cluster.events == ["ReplicaCreated"]
    cluster.controllers()
    await reconciler.tick(loop)
    assert ("ConfigMap", "m-rollout") in cluster.objects
    assert cluster.condition("Ready")["status"] == "True"
    written = cluster.writes
    assert await reconciler.tick(loop) == reconciler.observer.tick_seconds
    assert cluster.writes == written


async def test_objective_is_patched_into_serving_engines() -> None:
    cluster = FakeCluster(replicas=2, tuning={"mode": "Auto"})
    cluster.settle()
    pods = {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    cluster.silent.add("m-g0-0")
    cluster.edit(objectives={"ttft": {"target": "2s"}})
    for _ in range(3):
        await reconciler.tick(loop)
    assert [cluster.engine(ordinal).policy for ordinal in (0, 1)] == ["fcfs", "deadline"]
    cluster.silent.clear()
    for _ in range(2):
        await reconciler.tick(loop)
    assert [cluster.engine(ordinal).policy for ordinal in (0, 1)] == ["deadline", "deadline"]
    assert cluster.events.count("SchedulingPolicyChanged") == 1
    assert {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()} == pods


class Copied(FakeCluster):
    """Cluster whose API server returns copies, so that read objects can become outdated."""

    async def list_children(self, _deployment: InferenceDeployment) -> ObservedChildren:
        return copy.deepcopy(self.children())

    async def are_current(self, manifests: Iterable[Manifest]) -> bool:
        return all(known in (*self.pods.values(), *self.objects.values(), self.body) for known in manifests)


async def test_uncached_pods_are_revalidated_before_deletion() -> None:
    """Polling engines and planning take time between the read and the deletion."""
    cluster = Copied(replicas=2, rollout={"maxSurge": 0, "bakeTime": "0s"})
    cluster.settle()
    old = cluster.pods["m-g0-0"]["metadata"]["uid"]
    cluster.edit(engine={"blockSize": 16})
    cluster.plan_reconcile()
    cluster.controllers()
    assert any(action.name == "m-g0-0" for action in cluster.decide().urgent_deletes)

    class Blinks(FakeEnginePoller):
        async def poll(self, *arguments: Any, **options: Any) -> dict[str, EngineObservation]:
            said = await super().poll(*arguments, **options)
            cluster.set_ready("m-g1-0", ready=False)
            return said

    reconciler, loop = a_reconciler(cluster), a_loop(cluster, Blinks(cluster))
    loop.state = cluster.state
    await reconciler.tick(loop)
    cluster.controllers()
    assert cluster.pods["m-g0-0"]["metadata"]["uid"] == old


class OlderSchema(FakeCluster):
    """Cluster with an older CRD, whose API server prunes unknown fields."""

    def write_status(self, status: Mapping[str, Any]) -> None:
        tuning = {name: value for name, value in (status.get("tuning") or {}).items() if name != "schedulingPolicy"}
        super().write_status({**status, "tuning": tuning} if "tuning" in status else status)


async def test_older_crd_causes_no_idle_writes() -> None:
    cluster = OlderSchema(replicas=2, tuning={"mode": "Auto"}, objectives={"ttft": {"target": "2s"}})
    asked: list[str] = []
    for _ in range(2):  # two operators, one after the other
        reconciler, loop = a_reconciler(cluster), a_loop(cluster)
        written = 0.0
        for number in range(30):
            if number == 20:
                written = written_by(reconciler)
            await reconciler.tick(loop)
            cluster.now += TICK_SECONDS
            cluster.controllers()
        assert written_by(reconciler) == written
        assert "schedulingPolicy" not in cluster.status["tuning"]
        asked.append(cluster.engine(0).policy)
    assert asked == ["deadline", "deadline"]
    assert cluster.events.count("SchedulingPolicyChanged") == 1
    cluster.edit(objectives=None, engine={"schedulingPolicy": "fcfs"})
    for _ in range(5):
        await reconciler.tick(loop)
    assert [cluster.engine(ordinal).policy for ordinal in (0, 1)] == ["fcfs", "fcfs"]


def written_by(reconciler: Reconciler) -> float:
    """Return the number of writes at the API server."""
    found = reconciler.executor.metrics.writes.collect()
    return sum(sample.value for metric in found for sample in metric.samples if sample.name.endswith("_total"))


async def test_pruned_status_is_written_on_change() -> None:
    cluster = OlderSchema(tuning={"mode": "Auto"}, objectives={"ttft": {"target": "2s"}})
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    for _ in range(20):
        await reconciler.tick(loop)
        cluster.now += TICK_SECONDS
        cluster.controllers()
    cluster.status["phase"] = "Somebody wrote this"
    await reconciler.tick(loop)
    assert cluster.status["phase"] == "Ready"


@pytest.mark.parametrize("mode", ["Off", "Recommend", "Auto"])
async def test_late_idle_engines_cause_no_write(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(tuning={"mode": mode})
    cluster.settle()
    is_late = iter([False, True, False, False, True, True, False, True, False])

    async def answers(target: EngineTarget, **_: Any) -> EngineObservation:
        if next(is_late):
            await asyncio.sleep(0.1)
        return cluster.said(target)

    monkeypatch.setattr(scrape, "observe_engine", answers)
    engines = EnginePoller(cast("aiohttp.ClientSession", None), lambda: cluster.now, timeout_seconds=0.02)
    reconciler, loop = a_reconciler(cluster), a_loop(cluster, engines)
    await reconciler.tick(loop)
    written = cluster.writes
    for _ in range(8):
        cluster.now += 5.0
        await reconciler.tick(loop)
        await asyncio.sleep(0.1)  # late results arrived before the next poll
    assert cluster.writes == written


async def test_engine_starts_after_model_facts() -> None:
    cluster = FakeCluster(knows_the_model=False)
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    assert await reconciler.tick(loop) == BUSY_TICK_SECONDS
    assert [kind for kind, _ in cluster.objects if kind in ("Job", "StatefulSet")] == ["Job"]
    assert cluster.status["phase"] == "ReadingModel"
    cluster.controllers()
    await reconciler.tick(loop)
    assert {kind for kind, _ in cluster.objects} == {"ConfigMap", "Service", "ServiceAccount", "StatefulSet"}


async def test_unreadable_model_starts_no_engine() -> None:
    cluster = FakeCluster(knows_the_model=False)
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    cluster.model_words = (2, "no such file")
    await reconciler.tick(loop)
    cluster.controllers()
    await reconciler.tick(loop)
    assert {kind for kind, _ in cluster.objects} <= {"ConfigMap", "ServiceAccount"}
    ready = cluster.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "ModelUnreadable")
    assert "no such file" in cluster.condition("Degraded")["message"]
    assert cluster.condition("LayoutValid")["status"] == "Unknown"


async def test_invalid_spec_creates_nothing() -> None:
    cluster = FakeCluster(knows_the_model=False, model={"uri": "oci://a/b"})
    await a_reconciler(cluster).tick(a_loop(cluster))
    assert cluster.objects == {}
    assert cluster.status["phase"] == "InvalidSpec"
    assert "oci://" in cluster.condition("Ready")["message"]


async def test_unparsable_spec_is_reported_by_field() -> None:
    cluster = FakeCluster(knows_the_model=False, replicas="many")
    await a_reconciler(cluster).tick(a_loop(cluster))
    assert "spec.replicas" in cluster.condition("Ready")["message"]


@pytest.mark.parametrize("change", ["deleted", "deleting", "namesake"])
async def test_loop_ends_with_deleted_resource(change: str) -> None:
    cluster = FakeCluster()
    assert cluster.body is not None
    if change == "deleted":
        cluster.body = None
    elif change == "deleting":
        cluster.body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    else:
        cluster.body["metadata"]["uid"] = "u-2"
    reconciler = a_reconciler(cluster)
    with pytest.raises(Gone):
        await reconciler.tick(a_loop(cluster))
    await reconciler.run(KEY.namespace, KEY.name, KEY.uid)
    assert reconciler.heartbeats.problems() == []


class Counted(Reconciler):
    """Reconciler whose ticks only yield to others."""

    __slots__ = ()
    ticking: ClassVar[list[int]] = [0, 0]

    async def tick(self, loop: ReconcileLoop) -> float:
        self.ticking[0] += 1
        self.ticking[1] = max(self.ticking)
        for _ in range(3):
            await asyncio.sleep(0)
        self.ticking[0] -= 1
        return 1.0


async def test_concurrent_ticks_are_limited() -> None:
    cluster = FakeCluster()
    plain = a_reconciler(cluster)
    counted = Counted(plain.observer, plain.executor, plain.http, plain.heartbeats, plain.work_queue)
    assert await asyncio.gather(*(counted.guarded_tick(a_loop(cluster)) for _ in range(300))) == [1.0] * 300
    assert counted.ticking == [0, MAX_CONCURRENT_TICKS]


class Pages(FakeEnginePoller):
    """Poller with a fixed result of the metrics comparison."""

    same = True

    async def are_metrics_unchanged(self, _known: object) -> bool:
        return self.same


class Ordered(Reconciler):
    """Reconciler whose ticks only record their order."""

    order: ClassVar[list[str]]

    async def _guarded_tick(self, loop: ReconcileLoop) -> float:
        self.order.append(loop.key.name)
        for _ in range(3):
            await asyncio.sleep(0)
        return 1.0


def a_body(name: str, generation: int, *, version: int) -> dict[str, Any]:
    """Return a resource whose status observed its first generation."""
    metadata = {"namespace": "n", "name": name, "uid": name, "resourceVersion": str(version), "generation": generation}
    return {"kind": KIND, "metadata": metadata, "status": {"observedGeneration": 1}}


async def test_edits_run_before_follow_ups() -> None:
    """One queued resource was edited before, and another one is edited while it is queued."""
    names = ["a", "b", "c", "d", "e"]
    store, work_queue = Store(KIND), WorkQueue()
    cache = Cache([store], work_queue.enqueue)
    cache.replace_all(store, [a_body(name, 2 if name == "d" else 1, version=1) for name in names], 1)
    like = a_reconciler(FakeCluster())
    Ordered.order = []
    observer = replace(like.observer, cache=cache)
    reconciler = Ordered(
        observer,
        like.executor,
        like.http,
        like.heartbeats,
        work_queue,
        _tick_limiter=PriorityLimiter(1, max_background_when_urgent=1),
    )
    loops = {
        name: ReconcileLoop(Key("n", name, name), cast("EnginePoller", None), cast("RouterPoller", None))
        for name in names
    }
    ticks = [asyncio.create_task(reconciler.guarded_tick(loop)) for loop in loops.values()]
    await asyncio.sleep(0)
    cache.apply_event(store, "MODIFIED", a_body("e", 2, version=2))
    await asyncio.gather(*ticks)
    assert reconciler.order == ["a", "d", "e", "b", "c"]
    assert [loop.slot.urgent for loop in loops.values()] == [False, False, False, True, True]
    await reconciler.guarded_tick(loops["d"])  # once: follow-ups and failing ticks are not urgent
    assert not loops["d"].slot.urgent


async def test_status_update_yields_to_urgent_edits() -> None:
    cluster, limiter = FakeCluster(), PriorityLimiter(3, max_background_when_urgent=1)
    reconciler, loop, other = replace(a_reconciler(cluster), _tick_limiter=limiter), a_loop(cluster), Slot(urgent=True)
    doors = {name: asyncio.Event() for name in ("other", "follower")}

    async def stay(place: Slot, name: str) -> None:
        async with limiter.acquire(place):
            await doors[name].wait()

    async def ticked() -> float:
        async with limiter.acquire(loop.slot):
            return await reconciler.tick(loop)

    loop.slot.urgent = True
    crowd = [asyncio.create_task(stay(other, "other")), asyncio.create_task(stay(Slot(), "follower"))]
    ticking = asyncio.create_task(ticked())
    for _ in range(500):
        await asyncio.sleep(0.001 if ("StatefulSet", "m-g0") not in cluster.objects else 0)
    assert ("StatefulSet", "m-g0") in cluster.objects
    assert (cluster.events, "conditions" in cluster.status, ticking.done()) == ([], False, False)
    doors["other"].set()
    await ticking
    assert cluster.events == ["ReplicaCreated"]
    assert cluster.condition("Ready")["status"] == "False"
    doors["follower"].set()
    await asyncio.gather(*crowd)


async def test_edit_during_apply_keeps_slot() -> None:
    """The next tick applies the second edit, and starts after this one has reported the first."""
    cluster, limiter, work_queue = FakeCluster(), PriorityLimiter(2, max_background_when_urgent=0), WorkQueue()
    store, like = Store(KIND), a_reconciler(cluster)
    cache = Cache([store], work_queue.enqueue)
    cache.replace_all(store, [a_body(KEY.name, 2, version=1)], 1)
    loop, door = a_loop(cluster), asyncio.Event()

    class EditedMeanwhile(Executor):
        async def apply(
            self, snapshot: ClusterSnapshot, plan: ReconcilePlan, engines: EnginePoller, before: ExecutionResult
        ) -> ExecutionResult:
            cache.apply_event(store, "MODIFIED", a_body(KEY.name, 3, version=2))
            return await like.executor.apply(snapshot, plan, engines, before)

        async def persist_state(self, snapshot: ClusterSnapshot, plan: ReconcilePlan) -> ExecutionResult:
            return await like.executor.persist_state(snapshot, plan)

    class Sees(ClusterObserver):
        def pending_generation(self, key: Key) -> int | None:
            return replace(like.observer, cache=cache).pending_generation(Key(key.namespace, key.name, key.uid))

    executor = EditedMeanwhile(like.executor.cluster, like.executor.metrics, like.executor.clock)
    observer = Sees(**{each.name: getattr(like.observer, each.name) for each in fields(ClusterObserver) if each.init})
    reconciler = replace(like, observer=observer, executor=executor, work_queue=work_queue, _tick_limiter=limiter)

    async def stay() -> None:
        async with limiter.acquire(Slot(urgent=True)):
            await door.wait()

    other = asyncio.create_task(stay())
    await asyncio.sleep(0)
    async with asyncio.timeout(10.0):
        await reconciler.guarded_tick(loop)
    assert (loop.generation, loop.failures, cluster.events) == (2, 0, ["ReplicaCreated"])
    door.set()
    await other


@pytest.mark.parametrize(
    ("last_seconds", "running", "scaling", "is_here"),
    [
        (None, 0.0, None, False),  # the planning time is not known yet
        (0.003, 0.0, None, True),
        (0.3, 0.0, None, False),
        (0.003, 2.0, None, False),  # a load may have to be predicted
        (0.003, 0.0, {"minReplicas": 1, "maxReplicas": 2}, False),
    ],
)
async def test_fast_plan_runs_inline_others_in_thread(
    last_seconds: float | None,
    running: float,
    scaling: dict[str, Any] | None,
    is_here: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec: dict[str, Any] = {} if scaling is None else {"scaling": scaling}
    cluster = FakeCluster(**spec)
    cluster.settle()
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    snapshot = await reconciler.observer.observe(KEY, cluster.state, loop.engines, loop.routers)
    ((name, said),) = snapshot.engines.items()
    assert said.sample is not None
    gauges = replace(said.sample.gauges, running=running, waiting=0.0)
    snapshot = replace(snapshot, engines={name: replace(said, sample=replace(said.sample, gauges=gauges))})
    threads = []

    def noted(seen: ClusterSnapshot, state: state_module.ReconcilerState) -> ReconcilePlan:
        threads.append(threading.current_thread())
        return plan_reconcile(seen, state)

    monkeypatch.setattr(reconciler_module, "plan_reconcile", noted)
    loop.state, loop.plan_seconds = cluster.state, last_seconds
    decided = await reconciler._plan(loop, snapshot)
    assert [thread is threading.current_thread() for thread in threads] == [is_here]
    assert decided == plan_reconcile(snapshot, cluster.state)
    assert loop.plan_seconds is not None


class RingsLate(asyncio.Event):
    """Event that is set just at the timeout."""

    async def wait(self) -> Literal[True]:
        try:
            return await super().wait()
        except asyncio.CancelledError:
            self.set()
            raise


async def test_wake_up_at_timeout_is_noticed() -> None:
    """The waiter clears the event next: otherwise the change would be handled one tick or idle period later."""
    assert await _wait_for_event(RingsLate(), 0.0) is True
    assert await _wait_for_event(asyncio.Event(), 0.0) is False


async def test_idle_tick_compares_metrics_only() -> None:
    cluster = FakeCluster()
    reconciler, pages = a_reconciler(cluster), Pages(cluster)
    loop = a_loop(cluster, pages)
    assert not await reconciler.is_idle(loop)  # before the first observation
    loop.idle = IdleState(cluster.look(), (), cluster.now)
    cluster.now += IDLE_RECONCILE_SECONDS / 2
    assert await reconciler.is_idle(loop)
    assert loop.idle.seen_at == cluster.now
    pages.same = False
    assert not await reconciler.is_idle(loop)
    pages.same = True
    cluster.now += IDLE_RECONCILE_SECONDS / 2
    assert not await reconciler.is_idle(loop)


@pytest.mark.parametrize(("tick_seconds", "unread"), [(3.0, 2), (5.0, 1), (6.0, 0), (15.0, 0)])
async def test_crowded_idle_tick_skips_metrics(tick_seconds: float, unread: int) -> None:
    cluster = FakeCluster()
    reconciler, pages = a_reconciler(cluster), Pages(cluster)
    reconciler = replace(reconciler, observer=replace(reconciler.observer, tick_seconds=tick_seconds))
    loop = a_loop(cluster, pages)
    loop.idle = IdleState(cluster.look(), (), cluster.now)
    pages.same = False
    limiter = reconciler._tick_limiter
    async with limiter.acquire(Slot(urgent=True)), limiter.acquire(Slot(urgent=True)):
        cluster.now += tick_seconds
        assert not await reconciler.is_idle(loop), "two are not many"
        async with limiter.acquire(Slot(urgent=True)):
            for _ in range(unread):
                assert await reconciler.is_idle(loop)
                cluster.now += tick_seconds
            assert not await reconciler.is_idle(loop)
            assert cluster.now - loop.idle.seen_at <= max(tick_seconds, MAX_UNREAD_METRICS_SECONDS)


@pytest.mark.parametrize("urgent", [True, False])
async def test_edit_allows_stale_engine_status(urgent: bool) -> None:
    cluster = FakeCluster()
    engines = FakeEnginePoller(cluster)
    loop = a_loop(cluster, engines)
    loop.slot.urgent = urgent
    cluster.settle()
    loop.state = cluster.state
    reconciler = a_reconciler(cluster)
    await reconciler.tick(loop)
    loop.slot.urgent = urgent
    assert await reconciler.tick(loop) == reconciler.observer.tick_seconds
    assert engines.allowed_stale == [urgent, urgent]


async def test_failing_tick_is_retried_and_reported() -> None:
    cluster = FakeCluster(start_seconds=60.0)
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    cluster.failures = [OSError("no route")] * 3
    delays = [await reconciler.guarded_tick(loop) for _ in range(3)]
    assert delays == [5.0, 10.0, 20.0]
    assert cluster.status["phase"] == "ReconcileError"
    await reconciler.guarded_tick(loop)
    assert loop.failures == 0
    assert cluster.status["phase"] == "Pending"


async def test_unreportable_failure_does_not_end_loop() -> None:
    cluster = FakeCluster()
    cluster.failures = [KeyError("a bug")] * 6
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    delays = [await reconciler.guarded_tick(loop) for _ in range(3)]
    assert delays == [5.0, 10.0, 20.0]


class RefusingCluster(FakeCluster):
    """API server that rejects writes of some kinds."""

    refuses: tuple[str, ...] = ()
    error: Exception = ApiException(status=403, reason="exceeded quota")

    def apply_now(self, action: Apply) -> None:
        if action.manifest["kind"] in self.refuses:
            raise self.error
        super().apply_now(action)


async def test_rejected_child_is_reported_once() -> None:
    cluster = RefusingCluster()
    cluster.refuses = ("StatefulSet",)
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    for _ in range(4):
        await reconciler.guarded_tick(loop)
    assert cluster.status["phase"] == "ReconcileError"
    written = cluster.writes
    await reconciler.guarded_tick(loop)
    assert cluster.writes == written


async def test_name_conflict_is_reported_at_once() -> None:
    cluster = RefusingCluster()
    cluster.refuses, cluster.error = ("Service",), NameTaken("Service m exists and has another owner")
    await a_reconciler(cluster).guarded_tick(a_loop(cluster))
    assert cluster.status["phase"] == "NameConflict"


async def test_running_engines_ignore_new_model_facts_job() -> None:
    """A quota rejects the Job that reads the model facts; a lost replica is replaced all the same."""
    cluster = RefusingCluster()
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    for _ in range(3):
        await reconciler.tick(loop)
        cluster.controllers()
    cluster.edit(model={"uri": "file:///models/other"})
    cluster.refuses = ("Job",)
    del cluster.objects["StatefulSet", "m-g0"]
    await reconciler.guarded_tick(loop)
    assert loop.num_rejected_ticks == 1
    assert [name for kind, name in cluster.objects if kind == "StatefulSet"] == ["m-g1"]


async def test_deleted_resource_has_no_metrics() -> None:
    cluster = FakeCluster()
    reconciler = a_reconciler(cluster)
    await reconciler.tick(a_loop(cluster))
    reconciler.executor.metrics.decisions.labels(namespace="n", name="m", knob="none", reason="r", mode="Auto").inc()
    cluster.body = None
    await reconciler.run(KEY.namespace, KEY.name, KEY.uid)
    page = generate_latest(reconciler.executor.metrics.registry)
    assert b"trimtab_desired_replicas{" not in page
    assert b"trimtab_operator_decisions_total{" not in page


def test_recreated_resource_keeps_its_queue_entry() -> None:
    work_queue = WorkQueue()
    old = work_queue.register("models", "m")
    new = work_queue.register("models", "m")
    work_queue.forget("models", "m", old)
    work_queue.enqueue("models", "m")
    assert new.is_set()


class RecordingQueue(WorkQueue):
    """Work queue that records its events in order."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[asyncio.Event] = []

    def register(self, namespace: str, name: str) -> asyncio.Event:
        self.made.append(super().register(namespace, name))
        return self.made[-1]


async def first_status(cluster: FakeCluster) -> None:
    """Wait for the first status."""
    while not cluster.status:  # noqa: ASYNC110 - a cluster in memory rings no bell
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_late_loop_end_keeps_recreated_state(is_cancelled: bool) -> None:
    """The resource was deleted and recreated: the new loop starts before the old one ends."""
    cluster, work_queue = FakeCluster(), RecordingQueue()
    reconciler = replace(a_reconciler(cluster), work_queue=work_queue)
    old = asyncio.create_task(reconciler.run(KEY.namespace, KEY.name, KEY.uid))
    await first_status(cluster)
    cluster.body = a_resource()
    cluster.body["metadata"]["uid"] = "u-new"
    cluster.objects.clear()
    new = asyncio.create_task(reconciler.run(KEY.namespace, KEY.name, "u-new"))
    await first_status(cluster)
    work_queue.made[0].set()
    if is_cancelled:
        old.cancel()
    await asyncio.wait({old})
    assert not new.done()
    assert str(KEY) in reconciler.heartbeats._ticks
    assert b"trimtab_desired_replicas{" in generate_latest(reconciler.executor.metrics.registry)
    new.cancel()
    await asyncio.wait({new})


async def test_decision_is_emitted_after_state_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decides_once(_: object, state: TunerState, *__: object) -> TunerOutput:
        made = Decision("id", 1.0, Move(Reason.SATURATED, ReplicaCount(), 1, None), "Every knob is at its bound.")
        decisions = () if state.history else (made,)
        ok = Condition(True, Reason.SCRAPED, "")
        return TunerOutput(state if state.history else state.with_decision(made), ok, ok, decisions=decisions)

    cluster = RefusingCluster()
    cluster.refuses, cluster.error = ("ConfigMap",), OSError("no route")
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    monkeypatch.setattr("trimtab_operator.planning.choices.decide", decides_once)
    await reconciler.guarded_tick(loop)
    assert cluster.events == []
    assert [kind for kind, _ in cluster.objects] == ["ConfigMap"]  # what is not remembered is not acted upon
    cluster.refuses = ()
    for _ in range(3):
        await reconciler.guarded_tick(loop)
    assert cluster.events.count("Saturated") == 1


# --- groups that lack something ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [{"model": {"uri": "oci://a/b"}}, {"parallelism": {"tensor": 2, "gpusPerNode": 1}}])
async def test_running_pods_are_maintained_while_spec_is_invalid(bad: dict[str, Any]) -> None:
    """The spec violates its own rules or the model's (SmolLM2 has 9 heads): a failed leader restarts its worker."""
    cluster = FakeCluster(parallelism={"pipeline": 2, "gpusPerNode": 1})
    cluster.settle()
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    del cluster.objects["ConfigMap", "m-rollout"]
    cluster.edit(**bad)
    if "model" not in bad:
        cluster.learn_the_model()
        for stateful_set in [m for (kind, _), m in cluster.objects.items() if kind == "StatefulSet"]:
            stateful_set["metadata"]["labels"]["trimtab.dev/revision"] = "an older one"
    cluster.pods["m-g0-0"]["metadata"] |= {
        "deletionTimestamp": "2026-01-01T12:01:00Z",
        "deletionGracePeriodSeconds": 45,
    }
    await reconciler.tick(loop)
    assert cluster.status["phase"] == "InvalidSpec"
    assert list(cluster.pods) == ["m-g0-0"]
    assert "GroupRestarted" in cluster.events


async def test_quota_blocking_workers_backs_off_gang() -> None:
    cluster = FakeCluster(parallelism={"tensor": 3, "pipeline": 2, "gpusPerNode": 3})
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    quota = 'pods "m-g0-w-0" is forbidden: exceeded quota: few, requested: pods=1, used: pods=1, limited: pods=1'
    message = f"create Pod m-g0-w-0 in StatefulSet m-g0-w failed error: {quota}"
    cluster.creation_failures = [{"involvedObject": {"name": "m-g0-w"}, "message": message}]

    def replicas() -> list[int]:
        return [cluster.objects["StatefulSet", name]["spec"]["replicas"] for name in ("m-g0", "m-g0-w")]

    async def tick(after: float = TICK_SECONDS) -> tuple[str, str]:
        cluster.now += after
        await reconciler.tick(loop)
        cluster.controllers()
        cluster.pods.pop("m-g0-w-0", None)  # the quota
        cluster.kubelets()
        found = cluster.condition("ScalingLimited")
        return found["reason"], found["message"]

    for _ in range(4):
        limited = await tick(6)
    assert limited == ("FailedCreate", f"m-g0: 1 of 2 pods are not created yet: {quota}")
    assert replicas() == [1, 1]
    await tick(120)
    assert (replicas(), cluster.events.count("GangSchedulingBackoff")) == ([0, 0], 1)
    limited = await tick(1)
    assert (replicas(), quota in limited[1]) == ([0, 0], True)
    cluster.edit(replicas=1)
    await tick()
    assert (replicas(), cluster.events.count("GangSchedulingBackoff")) == ([1, 1], 1)


def test_fixture_model_has_nine_heads() -> None:
    assert MODEL_FACTS["num_attention_heads"] == 9


async def test_loop_waiting_for_slot_is_healthy() -> None:
    now = [0.0]
    heartbeats = Heartbeats(max_age_seconds=60.0, clock=lambda: now[0])
    cluster, line = FakeCluster(), PriorityLimiter(1, max_background_when_urgent=1)
    reconciler, loop = replace(a_reconciler(cluster), heartbeats=heartbeats, _tick_limiter=line), a_loop(cluster)
    async with line.acquire(Slot()):
        heartbeats.beat(str(loop.key))
        ticking = asyncio.create_task(reconciler.guarded_tick(loop))
        await asyncio.sleep(0)  # to the end of the line
        now[0] = 600.0
        assert heartbeats.problems() == []
    await ticking
    now[0] += 59.0
    assert heartbeats.problems() == []
    now[0] += 2.0
    assert heartbeats.problems() == [f"{loop.key} has not ticked for 61 s"]
