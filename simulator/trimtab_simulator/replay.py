"""One trace under one policy: arrivals, ticks and cold starts in order of time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from trimtab_operator.tuner.engine_model import Gaps
from trimtab_operator.tuner.engine_model import Sequence as Served
from trimtab_operator.tuner.parameters import Value
from trimtab_operator.tuner.samples import ReplicaSnapshot

from trimtab_simulator.plant.fleet import Fleet, FleetSettings
from trimtab_simulator.plant.pooled_blocks import PrefixPool
from trimtab_simulator.plant.routing import RouterKind, RouterSettings, router_of
from trimtab_simulator.plant.snapshots import GAP_EDGES
from trimtab_simulator.policies.policy import Policy, PolicyInput
from trimtab_simulator.trace.arrivals import Arrival, PrefixIds, Trace

REPLICAS = "replicas"

Schedule = Sequence[tuple[float, int]]
"""Replica targets by the time at which they are requested."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change made by a policy."""

    at: float
    target: str
    """A parameter's name, or `replicas`."""
    before: Value
    after: Value
    why: str = ""


@dataclass(slots=True)
class TimelinePoint:
    """State at one time, for plots."""

    at: float
    desired: int
    ready: int
    paid: int
    running: int
    waiting: int
    kv_usage: float
    parameters: dict[str, Value] = field(default_factory=dict)


@dataclass(slots=True)
class SimulationResult:
    """Result of a replay. Times are seconds from its start."""

    served: list[Served]
    rejected: int
    """Requests that no replica can hold."""
    seconds: float
    gpu_seconds: float
    changes: list[Change]
    timeline: list[TimelinePoint]
    most_replicas: int
    computed_tokens: int
    recomputed_tokens: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens in the prefix caches."""
    gaps: Gaps
    ended_at: float
    """Time when the last request finished."""
    most_running: int = 0
    """Maximum number of running requests of one replica."""
    final_parameters: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """Router, seed and sampling of a replay. `delay_seconds` is the age of a snapshot when a policy sees it."""

    router: RouterSettings = field(default_factory=RouterSettings)
    seed: int = 0
    delay_seconds: float = 0.0
    timeline_interval_seconds: float = 15.0
    """Interval of timeline points for plots; infinity for none."""


def replay(
    trace: Trace,
    policy: Policy,
    settings: FleetSettings,
    loop: ReplaySettings,
    *,
    schedule: Schedule = (),
    progress: Callable[[float], None] | None = None,
) -> SimulationResult:
    """Serve the whole trace. `schedule` are replica targets known beforehand, in addition to the policy's.

    Requests left at the end of the trace are served without further ticks and without cost: GPU-hours count the trace's
    time.
    """
    return _Replay(trace, policy, settings, loop, schedule, progress).run()


class _Replay:
    def __init__(
        self,
        trace: Trace,
        policy: Policy,
        settings: FleetSettings,
        loop: ReplaySettings,
        schedule: Schedule,
        progress: Callable[[float], None] | None,
    ) -> None:
        self._trace = trace
        self._policy = policy
        self._loop = loop
        self._progress = progress
        if loop.router.kind is RouterKind.SHARED_CACHE_ORACLE:
            settings = replace(settings, make_blocks=PrefixPool().make_blocks)
        self._fleet = Fleet(settings, router_of(loop.router, loop.seed))
        self._prefix_ids = PrefixIds()
        self._max_tokens = settings.machine.max_model_len
        self._schedule = list(schedule)
        self._next_tick = policy.tick_seconds
        self._next_timeline_point = 0.0 if loop.timeline_interval_seconds < math.inf else math.inf
        self._looks: list[tuple[float, tuple[ReplicaSnapshot, ...]]] = []
        self._changes: list[Change] = []
        self._timeline: list[TimelinePoint] = []
        self._rejected = 0

    def run(self) -> SimulationResult:
        fleet = self._fleet
        due = self._due()
        for arrival in self._trace.arrivals:
            while due <= arrival.at:
                self._do(due)
                due = self._due()
            self._send(arrival)
        while due < self._trace.seconds:
            self._do(due)
            due = self._due()
        end = self._trace.seconds
        fleet.remove_drained(end)
        gpu_seconds = fleet.gpu_seconds(end)
        fleet.drain()
        return self._outcome(gpu_seconds)

    def _send(self, arrival: Arrival) -> None:
        if arrival.prompt + arrival.output > self._max_tokens:
            self._rejected += 1
            return
        prefix = self._prefix_ids.ids_of(arrival.prefix)
        self._fleet.send(Served(arrival.at, arrival.prompt, arrival.output, prefix), arrival.at)

    def _due(self) -> float:
        scheduled = self._schedule[0][0] if self._schedule else math.inf
        return min(self._next_tick, self._next_timeline_point, self._fleet.next_ready, scheduled)

    def _do(self, now: float) -> None:
        """Process everything due at `now`: a start that completes precedes a tick that could observe it."""
        fleet = self._fleet
        if fleet.next_ready <= now:
            fleet.become_ready(now)
        while self._schedule and self._schedule[0][0] <= now:
            self._scale(self._schedule.pop(0)[1], now, "scheduled")
        if self._next_tick <= now:
            self._tick(now)
            self._next_tick += self._policy.tick_seconds
        if self._next_timeline_point <= now:
            self._add_timeline_point(now)
            self._next_timeline_point += self._loop.timeline_interval_seconds
            if self._progress is not None:
                self._progress(now)

    def _tick(self, now: float) -> None:
        fleet = self._fleet
        fleet.remove_drained(now)
        self._looks.append((now, fleet.snapshot(now, with_requests=self._policy.reads_requests)))
        while len(self._looks) > 1 and self._looks[1][0] <= now - self._loop.delay_seconds:
            self._looks.pop(0)
        seen_at, snapshots = self._looks[0]
        if seen_at > now - self._loop.delay_seconds:
            return
        moves = self._policy.decide(PolicyInput(now, fleet.desired, dict(fleet.parameters), snapshots))
        if moves.allowance is not None:
            fleet.order_queues(moves.allowance, now)
        for parameter, (before, after) in fleet.patch(moves.parameters, now).items():
            self._changes.append(Change(now, parameter.value, before, after, moves.why))
        if moves.replicas is not None:
            self._scale(moves.replicas, now, moves.why)

    def _scale(self, target: int, now: float, why: str) -> None:
        before = self._fleet.desired
        self._fleet.scale(target, now)
        if self._fleet.desired != before:
            self._changes.append(Change(now, REPLICAS, before, self._fleet.desired, why))

    def _add_timeline_point(self, now: float) -> None:
        fleet = self._fleet
        for replica in fleet.ready:
            replica.engine.run_until(now)
        engines = [replica.engine for replica in fleet.ready]
        usage = [1 - e.blocks.free / e.blocks.total for e in engines]
        self._timeline.append(
            TimelinePoint(
                at=now,
                desired=fleet.desired,
                ready=len(engines),
                paid=len(fleet.billed),
                running=sum(e.num_running for e in engines),
                waiting=sum(e.num_waiting for e in engines),
                kv_usage=sum(usage) / len(usage) if usage else 0.0,
                parameters={parameter.value: value for parameter, value in fleet.parameters.items()},
            )
        )

    def _outcome(self, gpu_seconds: float) -> SimulationResult:
        fleet = self._fleet
        gaps = Gaps(GAP_EDGES)
        for replica in fleet.all:
            if replica.engine.gaps is not None:
                gaps.merge(replica.engine.gaps)
        counters = [replica.engine.counters for replica in fleet.all]
        served = fleet.finished()
        return SimulationResult(
            served=served,
            rejected=self._rejected,
            seconds=self._trace.seconds,
            gpu_seconds=gpu_seconds,
            changes=self._changes,
            timeline=self._timeline,
            most_replicas=fleet.most,
            computed_tokens=sum(sums.tokens for c in counters for sums in c.sums.values()),
            recomputed_tokens=sum(c.recomputed_tokens for c in counters),
            preemptions=sum(sum(c.preempted.values()) for c in counters),
            prompt_tokens=sum(s.num_prompt for s in served),
            cached_tokens=sum(s.num_cached for s in served),
            gaps=gaps,
            ended_at=max((s.finished_at or 0.0 for s in served), default=0.0),
            most_running=max((replica.engine.most_running for replica in fleet.all), default=0),
            final_parameters={parameter.value: value for parameter, value in fleet.parameters.items()},
        )
