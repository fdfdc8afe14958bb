"""Replays the tuner on a recording and compares its decisions with the recorded ones. Pure.

A recording does not respond to decisions: after each step the state is set to the values that the engines really ran.
The result is what this control law would have decided at each recorded moment, not what would have happened then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from trimtab_operator.tuner.decide import TunerOutput, decide
from trimtab_operator.tuner.learning import estimate_cold_start
from trimtab_operator.tuner.moves import Decision, ReplicaCount
from trimtab_operator.tuner.parameters import Parameter, Value, is_same
from trimtab_operator.tuner.samples import Phase, ReplicaSnapshot
from trimtab_operator.tuner.samples.recorded import Tick
from trimtab_operator.tuner.settings import Settings
from trimtab_operator.tuner.state import TunerState

REPLICAS = ReplicaCount().value
START_SECONDS = 300.0  # within which a requested replica mostly serves
FOLLOWED_WITHIN = 4  # ticks after which a decision that the recorded engines do not run is dropped


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """One decision: target, time, and values before and after. `until`: how long it was wanted if it was repeated and
    never applied.
    """

    at: float
    target: str
    before: Value | None
    after: Value | None
    reason: str = ""
    sentence: str = ""
    until: float | None = None

    @property
    def direction(self) -> int:
        """1 for a raise, -1 for a reduction, 0 for neither."""
        if self.before is None or self.after is None:
            return 0
        return (self.after > self.before) - (self.after < self.before)


@dataclass(frozen=True, slots=True)
class ConditionPeriod:
    """Period in which MetricsAvailable had one reason."""

    begin: float
    end: float
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Result of a replay: recorded changes, replayed decisions, and the validity of the metrics."""

    ticks: int
    begin: float
    end: float
    replicas: int
    moved: tuple[DecisionRecord, ...]
    decided: tuple[DecisionRecord, ...]
    periods: tuple[ConditionPeriod, ...]


class Verdict(StrEnum):
    """How a recorded and a replayed decision compare."""

    SAME = "same"
    DIFFERENT_VALUE = "different value"  # the same parameter in the same direction
    ONLY_RECORDED = "only recorded"
    ONLY_REPLAYED = "only replayed"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the comparison."""

    verdict: Verdict
    then: DecisionRecord | None
    now: DecisionRecord | None

    @property
    def at(self) -> float:
        """Time of the earlier decision."""
        return min(made.at for made in (self.then, self.now) if made is not None)


def replay(ticks: Sequence[Tick], settings: Settings) -> ReplayReport:
    """Run the tuner at each tick, without earlier state. Raise ValueError without ticks."""
    if not ticks:
        raise ValueError("the recording has no samples")
    state, runs, served = TunerState(), dict[Parameter, Value](), None
    moved: list[DecisionRecord] = []
    decided: list[DecisionRecord] = []
    periods: list[ConditionPeriod] = []
    for tick in ticks:
        now_runs = _running(tick.snapshots)
        seen = _moves(tick.at, runs, now_runs)
        moved += seen
        state = _with_recorded_values(state, seen, now_runs, settings, tick.at)
        serve = sum(snapshot.phase is Phase.READY for snapshot in tick.snapshots)
        if served is not None and serve != served:
            moved.append(DecisionRecord(tick.at, REPLICAS, served, serve))
        state = _with_replicas(state, serve, settings, tick.at, is_change=serve != served)
        served = serve
        runs = {**runs, **now_runs}
        outcome = decide(tick.snapshots, state, settings, tick.at)
        state = outcome.state
        periods = _with_period(periods, tick.at, outcome)
        for decision in outcome.decisions:
            decided = _with_decision(decided, decision, moved)
    most = max(sum(snapshot.sample is not None for snapshot in tick.snapshots) for tick in ticks)
    return ReplayReport(len(ticks), ticks[0].at, ticks[-1].at, most, tuple(moved), tuple(decided), tuple(periods))


def _running(snapshots: Iterable[ReplicaSnapshot]) -> dict[Parameter, Value]:
    """Return the values of the first readable replica: all replicas are changed alike."""
    config = next((snapshot.config for snapshot in snapshots if snapshot.config is not None), None)
    return {} if config is None else dict(config.applied)


def _moves(at: float, before: Mapping[Parameter, Value], after: Mapping[Parameter, Value]) -> list[DecisionRecord]:
    return [
        DecisionRecord(at, parameter.value, before[parameter], value)
        for parameter, value in after.items()
        if parameter in before and not is_same(before[parameter], value)
    ]


def _with_recorded_values(
    state: TunerState, moved: Sequence[DecisionRecord], runs: Mapping[Parameter, Value], settings: Settings, at: float
) -> TunerState:
    """Return the state with the recorded changes applied and unapplied decisions dropped."""
    for made in moved:
        parameter, after = Parameter(made.target), made.after
        assert after is not None
        if not is_same(state.applied.get(parameter, float("nan")), after):
            state = replace(state.with_value(parameter, after, at), trial=None)
    timeout_seconds = FOLLOWED_WITHIN * settings.pace.tick_seconds
    kept = {
        parameter: value
        for parameter, value in state.applied.items()
        if parameter not in runs
        or is_same(runs[parameter], value)
        or at - state.moved_at.get(parameter.value, at) < timeout_seconds
    }
    if kept.keys() == state.applied.keys():
        return state
    trial = state.trial if state.trial is not None and state.trial.parameter in kept else None
    return replace(state, applied=kept, trial=trial)


def _with_replicas(state: TunerState, serve: int, settings: Settings, at: float, *, is_change: bool) -> TunerState:
    """Request as many replicas as were recorded: at once when their number changes, otherwise after their start-up
    time.
    """
    if settings.scaling is None:
        return state
    requested_at = state.moved_at.get(REPLICAS, -math.inf)
    timeout_seconds = estimate_cold_start(state, settings) + FOLLOWED_WITHIN * settings.pace.tick_seconds
    if not is_change and at - requested_at < timeout_seconds:
        return state
    return replace(state, scaling=replace(state.scaling, desired=serve))


def _with_period(periods: list[ConditionPeriod], at: float, outcome: TunerOutput) -> list[ConditionPeriod]:
    found = outcome.metrics_available
    if periods and (periods[-1].reason, periods[-1].message) == (str(found.reason), found.message):
        return [*periods[:-1], replace(periods[-1], end=at)]
    return [*periods, ConditionPeriod(at, at, str(found.reason), found.message)]


def _with_decision(
    decided: list[DecisionRecord], decision: Decision, moved: Sequence[DecisionRecord]
) -> list[DecisionRecord]:
    """Add a decision. A repeated one that was never applied extends its earlier record."""
    new = record_of(decision)
    for index in range(len(decided) - 1, -1, -1):
        old = decided[index]
        if (old.target, old.reason) != (new.target, new.reason):
            continue
        was_done = any(made.target == new.target and made.at > old.at for made in moved)
        if was_done or old.direction != new.direction:
            break
        return [*decided[:index], replace(old, until=new.at), *decided[index + 1 :]]
    return [*decided, new]


def record_of(decision: Decision) -> DecisionRecord:
    """Return one decision of the tuner as a record."""
    move = decision.move
    return DecisionRecord(
        decision.at, move.target.value, move.before, move.after, decision.reason.value, decision.sentence
    )


def compare_decisions(
    then: Iterable[DecisionRecord], now: Iterable[DecisionRecord], *, within: float
) -> tuple[Row, ...]:
    """Match recorded with replayed decisions. A pair changes the same target in the same direction within that many
    seconds; the nearest first.
    """
    left, right = list(then), list(now)
    pairs = sorted(
        (_apart(one, other), i, j)
        for i, one in enumerate(left)
        for j, other in enumerate(right)
        if one.target == other.target and one.direction == other.direction and _apart(one, other) <= _most(one, within)
    )
    partners: dict[int, int] = {}
    for _, i, j in pairs:
        if i not in partners and j not in partners.values():
            partners[i] = j
    rows = [Row(_verdict(left[i], right[j]), left[i], right[j]) for i, j in partners.items()]
    rows += [Row(Verdict.ONLY_RECORDED, made, None) for i, made in enumerate(left) if i not in partners]
    rows += [Row(Verdict.ONLY_REPLAYED, None, made) for j, made in enumerate(right) if j not in partners.values()]
    return tuple(sorted(rows, key=lambda row: row.at))


def _most(then: DecisionRecord, within: float) -> float:
    """Return the maximum distance of a pair. Recorded replicas without a reason are dated by when they served, not when
    they were requested.
    """
    return within + START_SECONDS if then.target == REPLICAS and not then.reason else within


def _apart(then: DecisionRecord, now: DecisionRecord) -> float:
    """Return the seconds between one decision and the time in which the other was wanted."""
    until = now.at if now.until is None else now.until
    return max(0.0, now.at - then.at, then.at - until)


def _verdict(then: DecisionRecord, now: DecisionRecord) -> Verdict:
    if then.after is None or now.after is None:
        return Verdict.SAME if then.after is now.after else Verdict.DIFFERENT_VALUE
    return Verdict.SAME if is_same(then.after, now.after) else Verdict.DIFFERENT_VALUE
