"""Reconcile loop, one per resource: observe, plan, apply, then wait for a wake-up or the next tick.

Decisions are pure functions elsewhere. A failed tick is logged, retried with back-off, and reported in the status if it
keeps failing. It never ends the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import aiohttp

from trimtab_operator.board.recorder import Recorder
from trimtab_operator.engines.poller import EnginePoller
from trimtab_operator.engines.router_client import RouterPoller
from trimtab_operator.errors import Gone, NameTaken, NotLeading, NotYet
from trimtab_operator.kube.client import API_ERRORS
from trimtab_operator.kube.leader_election import CONNECTION_ERRORS
from trimtab_operator.planning.idle import IdleState, detect_idle, replay_idle_period
from trimtab_operator.planning.plan import ReconcilePlan, plan_reconcile, status_inputs_after_error
from trimtab_operator.planning.preconditions import preconditions_of
from trimtab_operator.planning.snapshot import ClusterSnapshot
from trimtab_operator.planning.state import ReconcilerState
from trimtab_operator.planning.status_inputs import StatusInputs
from trimtab_operator.reconcile.executor import Executor, format_error
from trimtab_operator.reconcile.health import Heartbeats
from trimtab_operator.reconcile.observer import ClusterObserver, Key
from trimtab_operator.reconcile.priority_limiter import PriorityLimiter, Slot
from trimtab_operator.reconcile.rejections import MIN_FAILURES_TO_REPORT, failure_reason, with_rejections
from trimtab_operator.reconcile.work_queue import WorkQueue
from trimtab_operator.report.conditions import Reason

logger = logging.getLogger(__name__)

BUSY_TICK_SECONDS = 5.0  # while progressing: load progress and readiness should be visible soon
TICK_DEADLINE_SECONDS = 120.0  # a longer tick is considered hung and is restarted
# Between observations of a healthy resource without tuning, whose children are watched.
IDLE_RECONCILE_SECONDS = 60.0
MAX_BACKOFF_SECONDS = 60.0  # between failing ticks
WAKEUP_BATCH_SECONDS = 0.2  # wake-ups arrive in bursts: one tick serves all
EDIT_BATCH_SECONDS = 0.05  # a user-initiated change is one write, or two
MAX_RESERVATION_ATTEMPTS = 5  # other resources may change the GPU claims while a plan is computed
MAX_CONCURRENT_TICKS = 32  # with a thousand concurrent ticks, all would be late
MAX_STATUS_DELAY_SECONDS = 20.0  # of a completed tick, while urgent ticks run
INLINE_PLAN_SECONDS = 0.02  # CPU time: a faster plan needs no thread
MAX_BACKGROUND_TICKS_WHEN_URGENT = 3  # with one urgent tick; fewer with more, but at least one
MAX_UNREAD_METRICS_SECONDS = 10.0  # of idle engines while crowded: half of STALE_STATUS_SECONDS
MAX_CONCURRENT_PLANS = 3  # a prediction may take a second; the event loop needs its share of the CPU


@dataclass(slots=True)
class ReconcileLoop:
    """State of one loop: its resource, engines, router pods, reconciler state and failure count."""

    key: Key
    engines: EnginePoller
    routers: RouterPoller
    state: ReconcilerState = field(default_factory=ReconcilerState)
    failures: int = 0
    """Consecutive failed ticks."""
    num_rejected_ticks: int = 0
    """Consecutive ticks in which the API server rejected an object."""
    plan: tuple[ClusterSnapshot, ReconcilePlan] | None = None
    """The snapshot and plan of the current tick. None before it was planned."""
    idle: IdleState | None = None
    """The idle state after the last tick. None if the resource is not idle."""
    generation: int | None = None
    """The last generation a tick was started for before a status observed it, even if the tick failed."""
    plan_seconds: float | None = None
    """CPU time of the last plan. None if there was none yet."""
    is_status_deferred: bool = False
    """True if the last tick left its status to this one."""
    slot: Slot = field(default_factory=Slot)
    """The limiter slot of this tick; urgent while it applies a user-initiated change."""


@dataclass(frozen=True, slots=True)
class Reconciler:
    """Parts shared by all loops."""

    observer: ClusterObserver
    executor: Executor
    http: aiohttp.ClientSession
    heartbeats: Heartbeats
    work_queue: WorkQueue
    recorder: Recorder = field(default_factory=Recorder)
    _tick_limiter: PriorityLimiter = field(
        default_factory=lambda: PriorityLimiter(
            MAX_CONCURRENT_TICKS, max_background_when_urgent=MAX_BACKGROUND_TICKS_WHEN_URGENT
        )
    )
    _plan_limiter: PriorityLimiter = field(
        default_factory=lambda: PriorityLimiter(MAX_CONCURRENT_PLANS, max_background_when_urgent=1, reserved=1)
    )

    def new_loop(self, key: Key) -> ReconcileLoop:
        """Return a loop that has not ticked yet."""
        engines = EnginePoller(
            self.http, self.observer.clock, prometheus=self.observer.prometheus, may_write=self.executor.is_leading
        )
        routers = RouterPoller(
            self.http,
            self.observer.clock,
            partial(self.work_queue.enqueue, key.namespace, key.name),
            may_write=self.executor.is_leading,
        )
        return ReconcileLoop(key, engines, routers)

    async def run(self, namespace: str, name: str, uid: str) -> None:
        """Reconcile one resource until it is deleted. State under its name is kept if a new resource with the same
        name uses it.
        """
        loop = self.new_loop(Key(namespace, name, uid))
        event = self.work_queue.register(namespace, name)
        is_enqueued, is_gone = True, False
        try:
            while True:
                event.clear()
                self.heartbeats.beat(str(loop.key))
                if is_enqueued or not await self.is_idle(loop):
                    delay = await self.guarded_tick(loop)
                if is_enqueued := await _wait_for_event(event, delay):
                    await asyncio.sleep(EDIT_BATCH_SECONDS if self._has_new_spec(loop) else WAKEUP_BATCH_SECONDS)
        except Gone:
            is_gone = True
            logger.info("resource was deleted; Kubernetes deletes its children", extra={"resource": str(loop.key)})
        finally:
            loop.engines.close()
            loop.routers.close()
            self.executor.forget(loop.key.uid)
            if self.work_queue.forget(namespace, name, event):
                self._forget(loop.key, is_gone=is_gone)

    def _forget(self, key: Key, *, is_gone: bool) -> None:
        """Drop the state of a resource that no loop serves any more; metrics and cached state only if it was
        deleted.
        """
        self.heartbeats.forget(str(key))
        if is_gone:
            self.executor.metrics.forget(key.namespace, key.name)
            self.recorder.forget(key.namespace, key.name)
            self.observer.forget(key)

    @property
    def has_urgent_work(self) -> bool:
        """Return True if a user-initiated change has not been applied yet."""
        return self._tick_limiter.num_urgent > 0

    async def is_idle(self, loop: ReconcileLoop) -> bool:
        """Return True if nothing changed since the last tick and the next observation can wait.

        While many urgent changes wait, the metrics of idle engines are not read as long as the next tick reads them in
        time.
        """
        idle, now = loop.idle, self.observer.clock()
        if idle is None or now >= idle.until:
            return False
        if (
            self._tick_limiter.is_crowded
            and 0 <= now + self.observer.tick_seconds - idle.seen_at <= MAX_UNREAD_METRICS_SECONDS
        ):
            return True
        if not await loop.engines.are_metrics_unchanged(idle.engines):
            return False
        loop.idle = idle.seen_again(self.observer.clock())
        return True

    async def tick(self, loop: ReconcileLoop) -> float:
        """Run one reconcile iteration. Return the seconds until the next one."""
        idle, loop.idle, is_urgent = loop.idle, None, loop.slot.urgent
        snapshot = await self.observer.observe(
            loop.key, loop.state, loop.engines, loop.routers, allow_stale_engine_status=is_urgent
        )
        for seen in snapshot.engines.values():
            if seen.ready and seen.problem is not None:
                self.executor.metrics.poll_failures.labels(reason=seen.problem_reason.value).inc()
        if idle is not None and idle.has_ended(snapshot):
            async with self._plan_limiter.acquire(Slot(loop.slot.urgent)):
                loop.state = await asyncio.to_thread(replay_idle_period, idle, loop.state)
        snapshot, plan = await self._revalidate(loop, snapshot, await self._plan(loop, snapshot))
        snapshot, plan = await self._reserve_gpus(loop, snapshot, plan)
        loop.plan = snapshot, plan
        result = await self.executor.persist_state(snapshot, plan)
        loop.state = plan.state  # only now: if the API server is unavailable, the state is planned again
        before = self.executor.last_status(snapshot.deployment)
        is_deferred = not loop.is_status_deferred and _should_defer_status(snapshot, plan)
        result = await self.executor.apply(snapshot, plan, loop.engines, result)
        loop.num_rejected_ticks = loop.num_rejected_ticks + 1 if result.rejections else 0
        plan = with_rejections(plan, result.rejections, num_ticks=loop.num_rejected_ticks)
        await self._yield_to_urgent(loop)
        status = await self.executor.update_status(snapshot, plan, result.done, is_status_due=not is_deferred)
        self.recorder.record(snapshot, plan, status)
        loop.is_status_deferred = is_deferred
        loop.state = replace(plan.state, repeated_applies=plan.repeated_applies)
        if loop.num_rejected_ticks > MIN_FAILURES_TO_REPORT:  # the rejected objects are written at each tick
            return self.observer.tick_seconds
        if not plan.is_idle or _is_progressing(status):
            return min(BUSY_TICK_SECONDS, self.observer.tick_seconds)
        if is_urgent:  # the engines were not polled
            return self.observer.tick_seconds
        if _can_reconcile_rarely(snapshot, status):
            return IDLE_RECONCILE_SECONDS
        loop.idle = detect_idle(snapshot, plan, status, before=before)
        return self.observer.tick_seconds

    async def _yield_to_urgent(self, loop: ReconcileLoop) -> None:
        """Let urgent ticks run before this one reports its result. Keep the slot if a new spec of this resource was
        written meanwhile.
        """
        if self._tick_limiter.should_yield(loop.slot) and not self._has_new_spec(loop):
            self.heartbeats.mark_waiting(str(loop.key))
            try:
                await self._tick_limiter.demote_and_requeue(loop.slot, MAX_STATUS_DELAY_SECONDS)
            finally:
                self.heartbeats.beat(str(loop.key))

    async def _revalidate(
        self, loop: ReconcileLoop, snapshot: ClusterSnapshot, plan: ReconcilePlan
    ) -> tuple[ClusterSnapshot, ReconcilePlan]:
        """Check the preconditions of the plan. If they changed, plan again with a current snapshot."""
        preconditions = preconditions_of(snapshot, plan)
        if not preconditions:
            return snapshot, plan
        seen = await self.observer.revalidate(loop.key, snapshot, preconditions)
        return (snapshot, plan) if seen is snapshot else (seen, await self._plan(loop, seen))

    async def _reserve_gpus(
        self, loop: ReconcileLoop, snapshot: ClusterSnapshot, plan: ReconcilePlan
    ) -> tuple[ClusterSnapshot, ReconcilePlan]:
        """Reserve the planned GPUs. If other resources reserved them meanwhile, plan again with the new claims.

        Raises:
            NotYet: All MAX_RESERVATION_ATTEMPTS attempts failed.
        """
        gpu_claims = self.observer.gpu_claims
        for _ in range(MAX_RESERVATION_ATTEMPTS):
            gpu_claim = plan.gpu_claim
            if gpu_claims is None or gpu_claim is None:
                return snapshot, plan
            if gpu_claims.reserve(gpu_claim, plan.claimed_replicas, beside=plan.num_surge, grows=plan.grows):
                return snapshot, plan
            snapshot = self.observer.with_gpu_claims(loop.key, snapshot)
            snapshot, plan = await self._revalidate(loop, snapshot, await self._plan(loop, snapshot))
        raise NotYet("the GPU claims of other resources keep changing; the reservation is retried")

    async def _plan(self, loop: ReconcileLoop, snapshot: ClusterSnapshot) -> ReconcilePlan:
        """Plan inline if the last plan was fast, else in a thread.

        A computing thread delays the event loop by milliseconds at each response (GIL), so a fast plan costs less
        inline.
        """
        if (
            loop.plan_seconds is not None
            and loop.plan_seconds <= INLINE_PLAN_SECONDS
            and _needs_no_prediction(snapshot)
        ):
            found, loop.plan_seconds = _timed_plan(snapshot, loop.state)
            return found
        async with self._plan_limiter.acquire(Slot(loop.slot.urgent)):
            found, loop.plan_seconds = await asyncio.to_thread(_timed_plan, snapshot, loop.state)
        return found

    async def guarded_tick(self, loop: ReconcileLoop) -> float:
        """Tick once when a slot is free. Return the seconds until the next tick. Handles all errors except Gone."""
        slot = Slot(self._has_new_spec(loop))

        def promote_if_edited() -> None:
            if not slot.urgent and self._has_new_spec(loop):
                self._tick_limiter.promote(slot)

        self.heartbeats.mark_waiting(str(loop.key))
        with self.work_queue.notify_on_enqueue(loop.key.namespace, loop.key.name, promote_if_edited):
            async with self._tick_limiter.acquire(slot):
                self.heartbeats.beat(str(loop.key))
                loop.slot, loop.generation = slot, self.observer.pending_generation(loop.key) or loop.generation
                return await self._guarded_tick(loop)

    def _has_new_spec(self, loop: ReconcileLoop) -> bool:
        """Return True if a spec was written that this loop has not reconciled yet."""
        return self.observer.pending_generation(loop.key) not in (None, loop.generation)

    async def _guarded_tick(self, loop: ReconcileLoop) -> float:
        loop.plan = None
        try:
            with self.executor.metrics.reconcile_seconds.time():
                async with asyncio.timeout(TICK_DEADLINE_SECONDS):
                    delay = await self.tick(loop)
            loop.failures, loop.plan = 0, None
        except Gone:
            raise
        except Exception as error:
            loop.failures += 1
            self.executor.metrics.reconcile_errors.labels(error=type(error).__name__).inc()
            is_expected = isinstance(error, (*CONNECTION_ERRORS, NameTaken, NotLeading, NotYet))
            logger.log(
                logging.WARNING if is_expected else logging.ERROR,
                "tick failed",
                extra={"resource": str(loop.key), "error": format_error(error), "failures": loop.failures},
                exc_info=None if is_expected else error,
            )
            await self._report_failure(loop, error)
            return float(min(MAX_BACKOFF_SECONDS, BUSY_TICK_SECONDS * 2 ** min(loop.failures - 1, 6)))
        return delay

    async def _report_failure(self, loop: ReconcileLoop, error: Exception) -> None:
        """Write the failure into the status: at once if a user must act, else after MIN_FAILURES_TO_REPORT failures."""
        reason = failure_reason(error)
        if reason is Reason.RECONCILE_ERROR and loop.failures < MIN_FAILURES_TO_REPORT:
            return
        problem = reason, format_error(error)
        try:
            async with asyncio.timeout(TICK_DEADLINE_SECONDS):
                try:
                    snapshot, status_inputs = await self._failure_status_inputs(loop, problem)
                except API_ERRORS:
                    await self.executor.write_error_status(await self.observer.get_deployment(loop.key), problem)
                else:
                    await self.executor.write_status(snapshot.deployment, status_inputs)
        except Exception as report_error:  # the same failure may occur here again; the loop must continue
            logger.warning(
                "the failure could not be written to the status",
                extra={"resource": str(loop.key), "error": format_error(report_error)},
            )

    async def _failure_status_inputs(
        self, loop: ReconcileLoop, problem: tuple[str, str]
    ) -> tuple[ClusterSnapshot, StatusInputs]:
        """Return the snapshot and status inputs for a failed tick: those of the tick if it got that far, else fresh
        ones.
        """
        if loop.plan is not None:
            snapshot, plan = loop.plan
            return snapshot, replace(plan.status_inputs, problem=problem)
        snapshot = await self.observer.read_resource(loop.key)
        return snapshot, status_inputs_after_error(snapshot, loop.state, problem)


def _timed_plan(snapshot: ClusterSnapshot, state: ReconcilerState) -> tuple[ReconcilePlan, float]:
    began = time.thread_time()
    return plan_reconcile(snapshot, state), time.thread_time() - began


def _needs_no_prediction(snapshot: ClusterSnapshot) -> bool:
    """Return True if the tuner has nothing to predict: no engine has requests, and replicas do not follow the load."""
    gauges = [seen.sample.gauges for seen in snapshot.engines.values() if seen.sample is not None]
    return snapshot.deployment.spec.scaling is None and not any(now.running or now.waiting for now in gauges)


def _should_defer_status(snapshot: ClusterSnapshot, plan: ReconcilePlan) -> bool:
    """Return True if the next iteration can write the status.

    Removed replicas trigger it at once through their watch. A generation that is not observed yet is reported now, and
    so are engine patches.
    """
    is_answered = snapshot.deployment.status.get("observedGeneration") == snapshot.deployment.generation
    is_quiet = is_answered and not plan.patches  # patches are visible at once
    return plan.removes_replicas and is_quiet and snapshot.cached_resource is not None


def _is_progressing(status: Mapping[str, Any]) -> bool:
    by_type = {c["type"]: c for c in status["conditions"]}
    return bool(by_type["Progressing"]["status"] == "True" or by_type["TuningActive"]["reason"] == "NotYetApplied")


def _can_reconcile_rarely(snapshot: ClusterSnapshot, status: Mapping[str, Any]) -> bool:
    """Return True if the engines need no polling: child changes enqueue the resource, and neither tuning nor scaling
    is active.
    """
    spec = snapshot.deployment.spec
    by_type = {c["type"]: c["status"] for c in status["conditions"]}
    is_well = by_type["Ready"] == "True" and by_type["Degraded"] == "False"
    return snapshot.cached_resource is not None and is_well and spec.tuning.mode == "Off" and spec.scaling is None


async def _wait_for_event(event: asyncio.Event, seconds: float) -> bool:
    """Return True if the event is set before the timeout."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return event.is_set()  # it may be set just at the timeout, and the caller clears it
    return True
