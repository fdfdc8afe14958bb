"""One loop per resource: look → turn → act, then wait for a wake-up or the next tick.

The decisions are elsewhere and pure. A tick that fails is logged, shown in the status when it keeps failing, and tried
again; it never ends the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from trimtab_operator.engines.poller import Engines
from trimtab_operator.errors import Gone, NameTaken, NotLeading, NotYet
from trimtab_operator.kube.client import API_ERRORS
from trimtab_operator.kube.leader_election import CONNECTION_ERRORS
from trimtab_operator.kube.rbac import missing_right
from trimtab_operator.planning.idle import IdleState, detect_idle, replay_idle_period
from trimtab_operator.planning.plan import ReconcilePlan, plan_reconcile, status_inputs_after_error
from trimtab_operator.planning.preconditions import preconditions_of
from trimtab_operator.planning.snapshot import ClusterSnapshot
from trimtab_operator.planning.state import ReconcilerState
from trimtab_operator.planning.status_inputs import StatusInputs
from trimtab_operator.reconcile.executor import Hands, one_line
from trimtab_operator.reconcile.health import Heartbeats
from trimtab_operator.reconcile.observer import Eyes, Key
from trimtab_operator.reconcile.priority_limiter import Lanes, Place
from trimtab_operator.reconcile.wakeups import WakeUps
from trimtab_operator.report.conditions import Reason

logger = logging.getLogger(__name__)

BUSY_TICK_SECONDS = 5.0  # while something moves: load progress and readiness should show soon
TICK_DEADLINE_SECONDS = 120.0  # a tick that takes longer hangs; it is abandoned and begun anew
RESTING_SECONDS = 60.0  # between looks at a resource that is well, whose engines nobody tunes and whose children ring
MAX_BACKOFF_SECONDS = 60.0  # between ticks that fail
FAILURES_TO_SHOW = 3  # in a row, before the status says so: one lost connection is no news
GATHER_SECONDS = 0.2  # wake-ups come in bursts: one tick serves all
GATHER_EDITS_SECONDS = 0.05  # what somebody waits for is one write, or two
STAKES_TRIED = 5  # times that others may take a part of the GPU budget while a turn is taken
MAX_TICKS_AT_ONCE = 32  # a thousand at once would all be late
TOLD_SECONDS = 20.0  # for which what a tick has done may go untold while others do what they were asked for
BRIEF_SECONDS = 0.02  # of processor time: a turn that took no longer needs no thread of its own
MAX_BESIDE_EDITS = 3  # of the ticks that nobody waits for, beside one that somebody waits for; beside many, one
UNREAD_SECONDS = 10.0  # for which pages of engines at rest may go unread then: half of what their last word stands for
MAX_TURNS_AT_ONCE = 3  # a turn may predict for a second: it is taken beside the event loop, which must get its share


@dataclass(slots=True)
class Loop:
    """What one loop has: its resource, its engines, what it remembers, and how it fares."""

    key: Key
    engines: Engines
    state: ReconcilerState = field(default_factory=ReconcilerState)
    failures: int = 0
    """Ticks that failed, in a row."""
    decided: tuple[ClusterSnapshot, ReconcilePlan] | None = None
    """What this tick saw and decided, as far as it has come."""
    rest: IdleState | None = None
    """What the last tick left behind, where nothing happens."""
    generation: int | None = None
    """Of the spec by which it ticked last of those that no status spoke of, whatever came of it."""
    turn_seconds: float | None = None
    """Processor time of the last turn; None: none was taken yet."""
    owes_status: bool = False
    """Whether the last tick left its status to this one."""
    place: Place = field(default_factory=Place)
    """Of this tick, in the line of all; urgent while it brings about what somebody has just asked for."""


@dataclass(frozen=True, slots=True)
class Reconciler:
    """What all loops share."""

    eyes: Eyes
    hands: Hands
    http: aiohttp.ClientSession
    heartbeats: Heartbeats
    wake_ups: WakeUps
    _ticking: Lanes = field(default_factory=lambda: Lanes(MAX_TICKS_AT_ONCE, beside=MAX_BESIDE_EDITS))
    _thinking: Lanes = field(default_factory=lambda: Lanes(MAX_TURNS_AT_ONCE, beside=1, kept=1))

    def loop_of(self, key: Key) -> Loop:
        """A loop that has not ticked yet."""
        engines = Engines(self.http, self.eyes.clock, prometheus=self.eyes.prometheus, may_write=self.hands.is_leading)
        return Loop(key, engines)

    async def run(self, namespace: str, name: str, uid: str) -> None:
        """Serve one resource until it is gone. What is known under its name stays where a namesake has it by now."""
        loop = self.loop_of(Key(namespace, name, uid))
        alarm = self.wake_ups.of(namespace, name)
        rang, is_gone = True, False
        try:
            while True:
                alarm.clear()
                self.heartbeats.beat(str(loop.key))
                if rang or not await self.rests(loop):
                    delay = await self.guarded_tick(loop)
                if rang := await _rang(alarm, delay):
                    await asyncio.sleep(GATHER_EDITS_SECONDS if self._is_asked_anew(loop) else GATHER_SECONDS)
        except Gone:
            is_gone = True
            logger.info("resource is gone; its children follow by ownership", extra={"resource": str(loop.key)})
        finally:
            loop.engines.close()
            self.hands.forget(loop.key.uid)
            if self.wake_ups.forget(namespace, name, alarm):
                self._forget(loop.key, is_gone=is_gone)

    def _forget(self, key: Key, *, is_gone: bool) -> None:
        """Drop what is known of a resource that no loop serves any more, all of it where it is gone."""
        self.heartbeats.forget(str(key))
        if is_gone:
            self.hands.metrics.forget(key.namespace, key.name)
            self.eyes.forget(key)

    @property
    def is_waited_for(self) -> bool:
        """Whether something that somebody asked for is still to be brought about."""
        return self._ticking.num_urgent > 0

    async def rests(self, loop: Loop) -> bool:
        """Whether nothing has happened since the last tick that nobody rang for, and the next look can wait. While
        many wait for what they asked for, a page may go unread if it is read in time by the next tick."""
        rest, now = loop.rest, self.eyes.clock()
        if rest is None or now >= rest.until:
            return False
        if self._ticking.is_crowded and 0 <= now + self.eyes.tick_seconds - rest.seen_at <= UNREAD_SECONDS:
            return True
        if not await loop.engines.say_the_same(rest.engines):
            return False
        loop.rest = rest.seen_again(self.eyes.clock())
        return True

    async def tick(self, loop: Loop) -> float:
        """Bring the resource one step nearer to what is wanted; seconds until the next tick."""
        rest, loop.rest, is_hurried = loop.rest, None, loop.place.urgent
        snapshot = await self.eyes.look(loop.key, loop.state, loop.engines, believes_last_words=is_hurried)
        if rest is not None and rest.has_ended(snapshot):
            async with self._thinking.entered(Place(loop.place.urgent)):
                loop.state = await asyncio.to_thread(replay_idle_period, rest, loop.state)
        snapshot, decided = await self._confirmed(loop, snapshot, await self._decided(loop, snapshot))
        snapshot, decided = await self._staked(loop, snapshot, decided)
        loop.decided = snapshot, decided
        await self.hands.persist_state(snapshot, decided)
        loop.state = decided.state  # only now: what could not be written is decided again
        before = self.hands.said(snapshot.deployment)
        leaves_it = not loop.owes_status and _is_soon_said_better(snapshot, decided)
        done = await self.hands.act(snapshot, decided, loop.engines)
        await self._let_others_act(loop)
        status = await self.hands.report(snapshot, decided, done, is_status_due=not leaves_it)
        loop.owes_status = leaves_it
        loop.state = replace(decided.state, repeated_applies=decided.repeated_applies)
        if not decided.is_idle or _is_moving(status):
            return min(BUSY_TICK_SECONDS, self.eyes.tick_seconds)
        if is_hurried:  # the engines were not asked
            return self.eyes.tick_seconds
        if _may_rest(snapshot, status):
            return RESTING_SECONDS
        loop.rest = detect_idle(snapshot, decided, status, before=before)
        return self.eyes.tick_seconds

    async def _let_others_act(self, loop: Loop) -> None:
        """What was asked for is done: telling of it waits while what others have asked for is not. Who is asked anew by
        now stays in front, to be done with this tick."""
        if self._ticking.is_waited_for(loop.place) and not self._is_asked_anew(loop):
            self.heartbeats.wait_in_line(str(loop.key))
            try:
                await self._ticking.step_back(loop.place, TOLD_SECONDS)
            finally:
                self.heartbeats.beat(str(loop.key))

    async def _confirmed(
        self, loop: Loop, snapshot: ClusterSnapshot, decided: ReconcilePlan
    ) -> tuple[ClusterSnapshot, ReconcilePlan]:
        """Make sure of what a turn rests on; where the cache lagged, decide again by what is so now."""
        grounds = preconditions_of(snapshot, decided)
        if not grounds:
            return snapshot, decided
        seen = await self.eyes.confirmed(loop.key, snapshot, grounds)
        return (snapshot, decided) if seen is snapshot else (seen, await self._decided(loop, seen))

    async def _staked(
        self, loop: Loop, snapshot: ClusterSnapshot, decided: ReconcilePlan
    ) -> tuple[ClusterSnapshot, ReconcilePlan]:
        """Take what was decided out of the GPU budget; where others took it meanwhile, decide again beside them."""
        gpu_claims = self.eyes.gpu_claims
        for _ in range(STAKES_TRIED):
            gpu_claim = decided.gpu_claim
            if gpu_claims is None or gpu_claim is None:
                return snapshot, decided
            if gpu_claims.put(gpu_claim, decided.claimed_replicas, beside=decided.num_surge, grows=decided.grows):
                return snapshot, decided
            snapshot = self.eyes.with_stakes(loop.key, snapshot)
            snapshot, decided = await self._confirmed(loop, snapshot, await self._decided(loop, snapshot))
        raise NotYet("the GPU budget is being shared out anew; it is looked at again in a moment")

    async def _decided(self, loop: Loop, snapshot: ClusterSnapshot) -> ReconcilePlan:
        """Take a turn: here, where it is brief, else beside the event loop. A thread that computes keeps the loop from
        each answer for milliseconds: what is brief costs all others less when it is taken in one go."""
        if loop.turn_seconds is not None and loop.turn_seconds <= BRIEF_SECONDS and _foresees_nothing(snapshot):
            found, loop.turn_seconds = _timed_turn(snapshot, loop.state)
            return found
        async with self._thinking.entered(Place(loop.place.urgent)):
            found, loop.turn_seconds = await asyncio.to_thread(_timed_turn, snapshot, loop.state)
        return found

    async def guarded_tick(self, loop: Loop) -> float:
        """Tick once, when it is its turn; seconds until the next. Errors end here, except that the resource is gone."""
        place = Place(self._is_asked_anew(loop))

        def listen() -> None:
            if not place.urgent and self._is_asked_anew(loop):
                self._ticking.hurry(place)

        self.heartbeats.wait_in_line(str(loop.key))
        with self.wake_ups.listening(loop.key.namespace, loop.key.name, listen):
            async with self._ticking.entered(place):
                self.heartbeats.beat(str(loop.key))
                loop.place, loop.generation = place, self.eyes.unanswered(loop.key) or loop.generation
                return await self._guarded_tick(loop)

    def _is_asked_anew(self, loop: Loop) -> bool:
        """Whether a spec was written by which this loop has not ticked yet."""
        return self.eyes.unanswered(loop.key) not in (None, loop.generation)

    async def _guarded_tick(self, loop: Loop) -> float:
        loop.decided = None
        try:
            with self.hands.metrics.reconcile_seconds.time():
                async with asyncio.timeout(TICK_DEADLINE_SECONDS):
                    delay = await self.tick(loop)
            loop.failures, loop.decided = 0, None
        except Gone:
            raise
        except Exception as error:
            loop.failures += 1
            self.hands.metrics.reconcile_errors.labels(error=type(error).__name__).inc()
            is_expected = isinstance(error, (*CONNECTION_ERRORS, NameTaken, NotLeading, NotYet))
            logger.log(
                logging.WARNING if is_expected else logging.ERROR,
                "tick failed",
                extra={"resource": str(loop.key), "error": one_line(error), "failures": loop.failures},
                exc_info=None if is_expected else error,
            )
            await self._show(loop, error)
            return float(min(MAX_BACKOFF_SECONDS, BUSY_TICK_SECONDS * 2 ** min(loop.failures - 1, 6)))
        return delay

    async def _show(self, loop: Loop, error: Exception) -> None:
        """Say in the status why nothing moves: at once when the user must act, else when it keeps failing."""
        reason = _reason_of(error)
        if reason is Reason.RECONCILE_ERROR and loop.failures < FAILURES_TO_SHOW:
            return
        problem = reason, one_line(error)
        try:
            async with asyncio.timeout(TICK_DEADLINE_SECONDS):
                try:
                    snapshot, status_inputs = await self._findings(loop, problem)
                except API_ERRORS:
                    await self.hands.write_in_the_dark(await self.eyes.resource(loop.key), problem)
                else:
                    await self.hands.write_status(snapshot.deployment, status_inputs)
        except Exception as second:  # whatever failed once may fail here again; the loop must go on
            logger.warning(
                "the failure could not be shown", extra={"resource": str(loop.key), "error": one_line(second)}
            )

    async def _findings(self, loop: Loop, problem: tuple[str, str]) -> tuple[ClusterSnapshot, StatusInputs]:
        """What is known beside the problem: what the tick found, or what can be seen at a glance."""
        if loop.decided is not None:
            snapshot, decided = loop.decided
            return snapshot, replace(decided.status_inputs, problem=problem)
        snapshot = await self.eyes.glance(loop.key)
        return snapshot, status_inputs_after_error(snapshot, loop.state, problem)


def _timed_turn(snapshot: ClusterSnapshot, state: ReconcilerState) -> tuple[ReconcilePlan, float]:
    began = time.thread_time()
    return plan_reconcile(snapshot, state), time.thread_time() - began


def _foresees_nothing(snapshot: ClusterSnapshot) -> bool:
    """Whether the tuner has no reason to predict anything: nobody is served, and replicas do not follow a load."""
    gauges = [said.sample.gauges for said in snapshot.engines.values() if said.sample is not None]
    return snapshot.deployment.spec.scaling is None and not any(now.running or now.waiting for now in gauges)


def _reason_of(error: Exception) -> Reason:
    """Why nothing moves. What only its owner or an administrator can mend is told at once."""
    if isinstance(error, NameTaken):
        return Reason.NAME_CONFLICT
    return Reason.RECONCILE_ERROR if missing_right(error) is None else Reason.FORBIDDEN


def _is_soon_said_better(snapshot: ClusterSnapshot, decided: ReconcilePlan) -> bool:
    """Whether the status can be left to the next look, which watches ring for at once: replicas that are removed here
    are not there any more then. A spec that no status speaks of yet is answered now."""
    is_answered = snapshot.deployment.status.get("observedGeneration") == snapshot.deployment.generation
    is_quiet = is_answered and not decided.patches  # what engines are told shows at once
    return decided.removes_replicas and is_quiet and snapshot.cached_resource is not None


def _is_moving(status: Mapping[str, Any]) -> bool:
    by_type = {c["type"]: c for c in status["conditions"]}
    return bool(by_type["Progressing"]["status"] == "True" or by_type["TuningActive"]["reason"] == "NotYetApplied")


def _may_rest(snapshot: ClusterSnapshot, status: Mapping[str, Any]) -> bool:
    """Whether nothing is missed by looking seldom: what happens to the children rings, and nobody watches engines."""
    spec = snapshot.deployment.spec
    by_type = {c["type"]: c["status"] for c in status["conditions"]}
    is_well = by_type["Ready"] == "True" and by_type["Degraded"] == "False"
    return snapshot.cached_resource is not None and is_well and spec.tuning.mode == "Off" and spec.scaling is None


async def _rang(alarm: asyncio.Event, seconds: float) -> bool:
    """Wait until the alarm rings or time is up; whether it rang."""
    try:
        async with asyncio.timeout(seconds):
            await alarm.wait()
    except TimeoutError:
        return alarm.is_set()  # it may have rung just as time was up, and whoever clears it must look
    return True
