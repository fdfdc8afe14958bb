"""The loop: it writes what differs, is still when nothing does, survives failures and ends with its resource."""

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
from operator_cluster import KEY, TICK_SECONDS, FakeCluster, FakeEngines, a_loop, a_reconciler
from prometheus_client import generate_latest
from trimtab_operator.engines import scrape
from trimtab_operator.engines.poller import Engines
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
from trimtab_operator.reconcile.executor import Done, Hands
from trimtab_operator.reconcile.health import Heartbeats
from trimtab_operator.reconcile.observer import Eyes, Key
from trimtab_operator.reconcile.priority_limiter import Lanes, Place
from trimtab_operator.reconcile.reconciler import (
    BUSY_TICK_SECONDS,
    MAX_TICKS_AT_ONCE,
    UNREAD_SECONDS,
    Loop,
    Reconciler,
    _rang,
)
from trimtab_operator.reconcile.wakeups import WakeUps
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import KIND, InferenceDeployment
from trimtab_operator.tuner.decide import Condition, TunerOutput
from trimtab_operator.tuner.moves import Decision, Move, Reason, ReplicaCount
from trimtab_operator.tuner.state import TunerState


async def test_the_first_tick_creates_and_when_all_runs_a_tick_writes_nothing() -> None:
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
    assert await reconciler.tick(loop) == reconciler.eyes.tick_seconds
    assert cluster.writes == written


async def test_a_promise_is_told_to_engines_that_serve_and_one_that_is_dead_holds_nothing() -> None:
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
    """A cluster whose API server gives copies: what was read may be another by now."""

    async def observe(self, _deployment: InferenceDeployment) -> ObservedChildren:
        return copy.deepcopy(self.children())

    async def are_current(self, manifests: Iterable[Manifest]) -> bool:
        return all(known in (*self.pods.values(), *self.objects.values(), self.body) for known in manifests)


async def test_who_was_read_without_a_cache_is_looked_at_once_more_before_another_goes() -> None:
    """Engines are asked, and a turn is taken, between what is read and what is done by it."""
    cluster = Copied(replicas=2, rollout={"maxSurge": 0, "bakeTime": "0s"})
    cluster.settle()
    old = cluster.pods["m-g0-0"]["metadata"]["uid"]
    cluster.edit(engine={"maxNumSeqs": 16})
    cluster.plan_reconcile()
    cluster.controllers()
    assert any(action.name == "m-g0-0" for action in cluster.decide().urgent_deletes)

    class Blinks(FakeEngines):
        async def look(self, *arguments: Any, **options: Any) -> dict[str, EngineObservation]:
            said = await super().look(*arguments, **options)
            cluster.set_ready("m-g1-0", ready=False)
            return said

    reconciler, loop = a_reconciler(cluster), Loop(KEY, cast("Engines", Blinks(cluster)))
    loop.state = cluster.state
    await reconciler.tick(loop)
    cluster.controllers()
    assert cluster.pods["m-g0-0"]["metadata"]["uid"] == old


class OlderSchema(FakeCluster):
    """A cluster whose CRD is of before queues had an order: its API server drops what that does not know."""

    def write_status(self, status: Mapping[str, Any]) -> None:
        tuning = {name: value for name, value in (status.get("tuning") or {}).items() if name != "schedulingPolicy"}
        super().write_status({**status, "tuning": tuning} if "tuning" in status else status)


async def test_an_operator_whose_crd_is_older_writes_nothing_at_rest_and_orders_queues() -> None:
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
    """How often it has written at the API server."""
    found = reconciler.hands.metrics.writes.collect()
    return sum(sample.value for metric in found for sample in metric.samples if sample.name.endswith("_total"))


async def test_what_the_api_server_does_not_keep_is_said_again_when_the_status_changes() -> None:
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
async def test_engines_at_rest_that_are_late_now_and_then_cause_no_write(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = FakeCluster(tuning={"mode": mode})
    cluster.settle()
    is_late = iter([False, True, False, False, True, True, False, True, False])

    async def answers(target: EngineTarget, **_: Any) -> EngineObservation:
        if next(is_late):
            await asyncio.sleep(0.1)
        return cluster.said(target)

    monkeypatch.setattr(scrape, "ask", answers)
    engines = Engines(cast("aiohttp.ClientSession", None), lambda: cluster.now, patience_seconds=0.02)
    reconciler, loop = a_reconciler(cluster), Loop(KEY, engines)
    await reconciler.tick(loop)
    written = cluster.writes
    for _ in range(8):
        cluster.now += 5.0
        await reconciler.tick(loop)
        await asyncio.sleep(0.1)  # what was late has come before the next look
    assert cluster.writes == written


async def test_no_engine_exists_before_the_model_was_read_and_the_tick_that_learns_it_starts_one() -> None:
    cluster = FakeCluster(knows_the_model=False)
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    assert await reconciler.tick(loop) == BUSY_TICK_SECONDS
    assert [kind for kind, _ in cluster.objects if kind in ("Job", "StatefulSet")] == ["Job"]
    assert cluster.status["phase"] == "ReadingModel"
    cluster.controllers()
    await reconciler.tick(loop)
    assert {kind for kind, _ in cluster.objects} == {"ConfigMap", "Service", "ServiceAccount", "StatefulSet"}


async def test_a_model_that_cannot_be_read_starts_nothing_and_shows_the_last_words() -> None:
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


async def test_a_refused_spec_creates_nothing_and_says_so() -> None:
    cluster = FakeCluster(knows_the_model=False, model={"uri": "oci://a/b"})
    await a_reconciler(cluster).tick(a_loop(cluster))
    assert cluster.objects == {}
    assert cluster.status["phase"] == "InvalidSpec"
    assert "oci://" in cluster.condition("Ready")["message"]


async def test_a_spec_that_cannot_be_read_is_told_field_by_field() -> None:
    cluster = FakeCluster(knows_the_model=False, replicas="many")
    await a_reconciler(cluster).tick(a_loop(cluster))
    assert "spec.replicas" in cluster.condition("Ready")["message"]


@pytest.mark.parametrize("change", ["deleted", "deleting", "namesake"])
async def test_the_loop_ends_with_its_resource(change: str) -> None:
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
    """What all loops share, when a tick does nothing but let others go on."""

    __slots__ = ()
    ticking: ClassVar[list[int]] = [0, 0]

    async def tick(self, loop: Loop) -> float:
        self.ticking[0] += 1
        self.ticking[1] = max(self.ticking)
        for _ in range(3):
            await asyncio.sleep(0)
        self.ticking[0] -= 1
        return 1.0


async def test_a_bounded_number_of_loops_ticks_at_once() -> None:
    cluster = FakeCluster()
    plain = a_reconciler(cluster)
    counted = Counted(plain.eyes, plain.hands, plain.http, plain.heartbeats, plain.wake_ups)
    assert await asyncio.gather(*(counted.guarded_tick(a_loop(cluster)) for _ in range(300))) == [1.0] * 300
    assert counted.ticking == [0, MAX_TICKS_AT_ONCE]


class Pages(FakeEngines):
    """Engines of which it is known whether they say the same as before."""

    same = True

    async def say_the_same(self, _known: object) -> bool:
        return self.same


class Ordered(Reconciler):
    """Loops whose ticks do nothing but take some steps."""

    order: ClassVar[list[str]]

    async def _guarded_tick(self, loop: Loop) -> float:
        self.order.append(loop.key.name)
        for _ in range(3):
            await asyncio.sleep(0)
        return 1.0


def a_body(name: str, generation: int, *, version: int) -> dict[str, Any]:
    """A resource whose status speaks of its first spec."""
    metadata = {"namespace": "n", "name": name, "uid": name, "resourceVersion": str(version), "generation": generation}
    return {"kind": KIND, "metadata": metadata, "status": {"observedGeneration": 1}}


async def test_what_was_just_asked_for_is_brought_about_before_what_follows_from_others() -> None:
    """Of a line in which one resource has been edited, and another one is while it stands there."""
    names = ["a", "b", "c", "d", "e"]
    store, wake_ups = Store(KIND), WakeUps()
    cache = Cache([store], wake_ups.ring)
    cache.listed(store, [a_body(name, 2 if name == "d" else 1, version=1) for name in names], 1)
    like = a_reconciler(FakeCluster())
    Ordered.order = []
    eyes = replace(like.eyes, cache=cache)
    reconciler = Ordered(eyes, like.hands, like.http, like.heartbeats, wake_ups, _ticking=Lanes(1, beside=1))
    loops = {name: Loop(Key("n", name, name), cast("Engines", None)) for name in names}
    ticks = [asyncio.create_task(reconciler.guarded_tick(loop)) for loop in loops.values()]
    await asyncio.sleep(0)
    cache.changed(store, "MODIFIED", a_body("e", 2, version=2))
    await asyncio.gather(*ticks)
    assert reconciler.order == ["a", "d", "e", "b", "c"]
    assert [loop.place.urgent for loop in loops.values()] == [False, False, False, True, True]
    await reconciler.guarded_tick(loops["d"])  # once: what follows, and what keeps failing, stands in line with others
    assert not loops["d"].place.urgent


async def test_who_has_done_what_it_was_asked_for_tells_of_it_when_others_have_too() -> None:
    cluster, lanes = FakeCluster(), Lanes(3, beside=1)
    reconciler, loop, other = replace(a_reconciler(cluster), _ticking=lanes), a_loop(cluster), Place(urgent=True)
    doors = {name: asyncio.Event() for name in ("other", "follower")}

    async def stay(place: Place, name: str) -> None:
        async with lanes.entered(place):
            await doors[name].wait()

    async def ticked() -> float:
        async with lanes.entered(loop.place):
            return await reconciler.tick(loop)

    loop.place.urgent = True
    crowd = [asyncio.create_task(stay(other, "other")), asyncio.create_task(stay(Place(), "follower"))]
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


async def test_who_is_edited_again_while_it_acts_waits_for_nobody() -> None:
    """The next tick brings the second edit about, and begins when this one has told of the first."""
    cluster, lanes, wake_ups = FakeCluster(), Lanes(2, beside=0), WakeUps()
    store, like = Store(KIND), a_reconciler(cluster)
    cache = Cache([store], wake_ups.ring)
    cache.listed(store, [a_body(KEY.name, 2, version=1)], 1)
    loop, door = a_loop(cluster), asyncio.Event()

    class EditedMeanwhile(Hands):
        async def act(self, snapshot: ClusterSnapshot, plan: ReconcilePlan, engines: Engines) -> Done:
            cache.changed(store, "MODIFIED", a_body(KEY.name, 3, version=2))
            return await like.hands.act(snapshot, plan, engines)

        async def persist_state(self, snapshot: ClusterSnapshot, plan: ReconcilePlan) -> None:
            await like.hands.persist_state(snapshot, plan)

    class Sees(Eyes):
        def unanswered(self, key: Key) -> int | None:
            return replace(like.eyes, cache=cache).unanswered(Key(key.namespace, key.name, key.uid))

    hands = EditedMeanwhile(like.hands.cluster, like.hands.metrics, like.hands.clock)
    eyes = Sees(**{each.name: getattr(like.eyes, each.name) for each in fields(Eyes) if each.init})
    reconciler = replace(like, eyes=eyes, hands=hands, wake_ups=wake_ups, _ticking=lanes)

    async def stay() -> None:
        async with lanes.entered(Place(urgent=True)):
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
        (None, 0.0, None, False),  # how long its turns take is not known yet
        (0.003, 0.0, None, True),
        (0.3, 0.0, None, False),
        (0.003, 2.0, None, False),  # a load may have to be predicted
        (0.003, 0.0, {"minReplicas": 1, "maxReplicas": 2}, False),
    ],
)
async def test_a_turn_that_foresees_nothing_is_taken_at_once_and_any_other_beside_the_loop(
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
    snapshot = await reconciler.eyes.look(KEY, cluster.state, loop.engines)
    ((name, said),) = snapshot.engines.items()
    assert said.sample is not None
    gauges = replace(said.sample.gauges, running=running, waiting=0.0)
    snapshot = replace(snapshot, engines={name: replace(said, sample=replace(said.sample, gauges=gauges))})
    threads = []

    def noted(seen: ClusterSnapshot, state: state_module.ReconcilerState) -> ReconcilePlan:
        threads.append(threading.current_thread())
        return plan_reconcile(seen, state)

    monkeypatch.setattr(reconciler_module, "plan_reconcile", noted)
    loop.state, loop.turn_seconds = cluster.state, last_seconds
    decided = await reconciler._decided(loop, snapshot)
    assert [thread is threading.current_thread() for thread in threads] == [is_here]
    assert decided == plan_reconcile(snapshot, cluster.state)
    assert loop.turn_seconds is not None


class RingsLate(asyncio.Event):
    """An alarm that rings just as who waits for it is told that time is up."""

    async def wait(self) -> Literal[True]:
        try:
            return await super().wait()
        except asyncio.CancelledError:
            self.set()
            raise


async def test_an_alarm_that_rings_just_as_time_is_up_is_heard() -> None:
    """Who has waited clears it next: what it rang for would be looked at a tick later, or a rest later."""
    assert await _rang(RingsLate(), 0.0) is True
    assert await _rang(asyncio.Event(), 0.0) is False


async def test_at_rest_a_tick_compares_pages_alone_until_a_look_is_due() -> None:
    cluster = FakeCluster()
    reconciler, pages = a_reconciler(cluster), Pages(cluster)
    loop = Loop(KEY, cast("Engines", pages))
    assert not await reconciler.rests(loop)  # before the first look
    loop.rest = IdleState(cluster.look(), (), cluster.now)
    cluster.now += IDLE_RECONCILE_SECONDS / 2
    assert await reconciler.rests(loop)
    assert loop.rest.seen_at == cluster.now
    pages.same = False
    assert not await reconciler.rests(loop)
    pages.same = True
    cluster.now += IDLE_RECONCILE_SECONDS / 2
    assert not await reconciler.rests(loop)


@pytest.mark.parametrize(("tick_seconds", "unread"), [(3.0, 2), (5.0, 1), (6.0, 0), (15.0, 0)])
async def test_while_many_wait_for_edits_a_page_goes_unread_that_the_next_tick_reads_in_time(
    tick_seconds: float, unread: int
) -> None:
    cluster = FakeCluster()
    reconciler, pages = a_reconciler(cluster), Pages(cluster)
    reconciler = replace(reconciler, eyes=replace(reconciler.eyes, tick_seconds=tick_seconds))
    loop = Loop(KEY, cast("Engines", pages))
    loop.rest = IdleState(cluster.look(), (), cluster.now)
    pages.same = False
    lanes = reconciler._ticking
    async with lanes.entered(Place(urgent=True)), lanes.entered(Place(urgent=True)):
        cluster.now += tick_seconds
        assert not await reconciler.rests(loop), "two are not many"
        async with lanes.entered(Place(urgent=True)):
            for _ in range(unread):
                assert await reconciler.rests(loop)
                cluster.now += tick_seconds
            assert not await reconciler.rests(loop)
            assert cluster.now - loop.rest.seen_at <= max(tick_seconds, UNREAD_SECONDS)


@pytest.mark.parametrize("urgent", [True, False])
async def test_who_was_just_edited_is_not_kept_by_engines_that_have_just_spoken(urgent: bool) -> None:
    cluster = FakeCluster()
    engines = FakeEngines(cluster)
    loop = Loop(KEY, cast("Engines", engines))
    loop.place.urgent = urgent
    cluster.settle()
    loop.state = cluster.state
    reconciler = a_reconciler(cluster)
    await reconciler.tick(loop)
    loop.place.urgent = urgent
    assert await reconciler.tick(loop) == reconciler.eyes.tick_seconds
    assert engines.believed == [urgent, urgent]


async def test_a_failing_tick_is_tried_again_and_shown_when_it_keeps_failing() -> None:
    cluster = FakeCluster(start_seconds=60.0)
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    cluster.failures = [OSError("no route")] * 3
    delays = [await reconciler.guarded_tick(loop) for _ in range(3)]
    assert delays == [5.0, 10.0, 20.0]
    assert cluster.status["phase"] == "ReconcileError"
    await reconciler.guarded_tick(loop)
    assert loop.failures == 0
    assert cluster.status["phase"] == "Pending"


async def test_a_failure_that_cannot_even_be_shown_does_not_end_the_loop() -> None:
    cluster = FakeCluster()
    cluster.failures = [KeyError("a bug")] * 6
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    delays = [await reconciler.guarded_tick(loop) for _ in range(3)]
    assert delays == [5.0, 10.0, 20.0]


class RefusingCluster(FakeCluster):
    """An API server that refuses to write some kinds."""

    refuses: tuple[str, ...] = ()
    error: Exception = ApiException(status=403, reason="exceeded quota")

    def apply_now(self, action: Apply) -> None:
        if action.manifest["kind"] in self.refuses:
            raise self.error
        super().apply_now(action)


async def test_a_child_that_keeps_being_refused_is_told_once_and_the_status_does_not_flap() -> None:
    cluster = RefusingCluster()
    cluster.refuses = ("StatefulSet",)
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    for _ in range(4):
        await reconciler.guarded_tick(loop)
    assert cluster.status["phase"] == "ReconcileError"
    written = cluster.writes
    await reconciler.guarded_tick(loop)
    assert cluster.writes == written


async def test_a_name_that_somebody_else_has_is_told_at_once() -> None:
    cluster = RefusingCluster()
    cluster.refuses, cluster.error = ("Service",), NameTaken("Service m exists and belongs to somebody else")
    await a_reconciler(cluster).guarded_tick(a_loop(cluster))
    assert cluster.status["phase"] == "NameConflict"


async def test_engines_that_run_wait_for_no_reader_of_another_model() -> None:
    """A quota refuses the Job that reads it; a replica that is lost comes back all the same."""
    cluster = RefusingCluster()
    reconciler, loop = a_reconciler(cluster), a_loop(cluster)
    for _ in range(3):
        await reconciler.tick(loop)
        cluster.controllers()
    cluster.edit(model={"uri": "file:///models/other"})
    cluster.refuses = ("Job",)
    del cluster.objects["StatefulSet", "m-g0"]
    await reconciler.guarded_tick(loop)
    assert loop.failures == 1
    assert [name for kind, name in cluster.objects if kind == "StatefulSet"] == ["m-g1"]


async def test_a_resource_that_is_gone_is_no_longer_counted() -> None:
    cluster = FakeCluster()
    reconciler = a_reconciler(cluster)
    await reconciler.tick(a_loop(cluster))
    reconciler.hands.metrics.decisions.labels(namespace="n", name="m", knob="none", reason="r", mode="Auto").inc()
    cluster.body = None
    await reconciler.run(KEY.namespace, KEY.name, KEY.uid)
    page = generate_latest(reconciler.hands.metrics.registry)
    assert b"trimtab_desired_replicas{" not in page
    assert b"trimtab_operator_decisions_total{" not in page


def test_a_namesake_keeps_its_alarm_when_the_old_loop_ends() -> None:
    wake_ups = WakeUps()
    old = wake_ups.of("models", "m")
    new = wake_ups.of("models", "m")
    wake_ups.forget("models", "m", old)
    wake_ups.ring("models", "m")
    assert new.is_set()


class NotedWakeUps(WakeUps):
    """Alarms, in the order in which they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[asyncio.Event] = []

    def of(self, namespace: str, name: str) -> asyncio.Event:
        self.made.append(super().of(namespace, name))
        return self.made[-1]


async def first_status(cluster: FakeCluster) -> None:
    """Wait until a loop has looked at the resource and said so."""
    while not cluster.status:  # noqa: ASYNC110 - a cluster in memory rings no bell
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_loop_that_ends_late_leaves_its_namesake_what_is_known_of_it(is_cancelled: bool) -> None:
    """Deleted and created again at once: the loop of the new one has begun before that of the old one ends."""
    cluster, wake_ups = FakeCluster(), NotedWakeUps()
    reconciler = replace(a_reconciler(cluster), wake_ups=wake_ups)
    old = asyncio.create_task(reconciler.run(KEY.namespace, KEY.name, KEY.uid))
    await first_status(cluster)
    cluster.body = a_resource()
    cluster.body["metadata"]["uid"] = "u-new"
    cluster.objects.clear()
    new = asyncio.create_task(reconciler.run(KEY.namespace, KEY.name, "u-new"))
    await first_status(cluster)
    wake_ups.made[0].set()
    if is_cancelled:
        old.cancel()
    await asyncio.wait({old})
    assert not new.done()
    assert str(KEY) in reconciler.heartbeats._ticks
    assert b"trimtab_desired_replicas{" in generate_latest(reconciler.hands.metrics.registry)
    new.cancel()
    await asyncio.wait({new})


async def test_a_decision_whose_memory_could_not_be_written_is_told_on_the_next_tick(
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
    monkeypatch.setattr("trimtab_operator.planning.plan.decide", decides_once)
    await reconciler.guarded_tick(loop)
    assert cluster.events == []
    assert [kind for kind, _ in cluster.objects] == ["ConfigMap"]  # what is not remembered is not acted upon
    cluster.refuses = ()
    for _ in range(3):
        await reconciler.guarded_tick(loop)
    assert cluster.events.count("Saturated") == 1


# --- groups that lack something ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [{"model": {"uri": "oci://a/b"}}, {"parallelism": {"tensor": 2, "gpusPerNode": 1}}])
async def test_what_runs_is_cared_for_while_its_spec_is_refused(bad: dict[str, Any]) -> None:
    """Refused by its own rules or by the model's (SmolLM2 has 9 heads): a leader that ends takes its worker along."""
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


async def test_a_group_that_a_quota_lets_have_only_its_leader_names_the_quota_and_gives_back_until_an_edit() -> None:
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


def test_the_facts_of_these_tests_are_of_a_model_with_nine_heads() -> None:
    assert MODEL_FACTS["num_attention_heads"] == 9


async def test_a_loop_that_waits_for_room_for_its_tick_is_no_loop_that_hangs() -> None:
    now = [0.0]
    heartbeats = Heartbeats(max_age_seconds=60.0, clock=lambda: now[0])
    cluster, line = FakeCluster(), Lanes(1, beside=1)
    reconciler, loop = replace(a_reconciler(cluster), heartbeats=heartbeats, _ticking=line), a_loop(cluster)
    async with line.entered(Place()):
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
