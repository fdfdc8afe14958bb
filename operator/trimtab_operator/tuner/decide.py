"""Entry point of the tuner: snapshots of all replicas, tuner state, settings and time in; decisions and patches out.

Pure: reads no clock and does no I/O. The steps, in order:

    spec changes → metrics validation and learning → safety → the trial in progress → one live parameter
    → replicas → restart-only recommendations → values that each engine must run
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from trimtab_operator.tuner.evidence import OBSERVED_SECONDS, Record
from trimtab_operator.tuner.evidence import judge as judge_share
from trimtab_operator.tuner.explanation import sentence_of
from trimtab_operator.tuner.learning import (
    compute_attainment,
    estimate_drain,
    objectives_of,
    update_predictor,
    with_observation,
)
from trimtab_operator.tuner.load.arrivals import since
from trimtab_operator.tuner.moves import Decision, Move, Reason, ReplicaCount, Restart, decision_id
from trimtab_operator.tuner.objectives import Objectives
from trimtab_operator.tuner.observation import Interval, Observation, observe
from trimtab_operator.tuner.observation.track import FaultTimeouts
from trimtab_operator.tuner.outcomes import with_outcomes
from trimtab_operator.tuner.parameters import Parameter, Values
from trimtab_operator.tuner.rules import LIVE_RULES
from trimtab_operator.tuner.rules.replicas import choose_replicas, count_in_bounds, level_at_bound
from trimtab_operator.tuner.rules.restart import restart_move
from trimtab_operator.tuner.safety import (
    active_pins,
    applicable_values,
    is_crash_budget_exhausted,
    move_into_bounds,
    raised_engines,
    roll_back_after_crash,
    yield_device_memory,
)
from trimtab_operator.tuner.samples import Phase, ReplicaSnapshot
from trimtab_operator.tuner.scaling.control_law import LEVEL_SECONDS
from trimtab_operator.tuner.settings import Mode, Settings
from trimtab_operator.tuner.situation import Situation, ranges_of
from trimtab_operator.tuner.state import KEEP_OUTCOMES_SECONDS, Pin, Trial, TunerState
from trimtab_operator.tuner.trial import SETTLE_SECONDS, Verdict, judge_trial

ATTAINMENT_WINDOW_SECONDS = 300.0
CONTRADICTED_SECONDS = 3600.0  # between two reports


@dataclass(frozen=True, slots=True)
class Condition:
    """Status, reason and message of a condition; equal as long as its cause is the same."""

    ok: bool
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class TunerOutput:
    """Result of one tuner step.

    `patches` are the values to PATCH, by replica; `replicas` is the count to request, None if `spec.replicas` sets it;
    `decisions` are new ones (one Event each).
    """

    state: TunerState
    metrics_available: Condition
    tuning_active: Condition
    patches: Mapping[str, Values] = field(default_factory=dict)
    replicas: int | None = None
    decisions: tuple[Decision, ...] = ()
    objectives: Objectives = field(default_factory=Objectives)
    """Objectives in force: from the spec, or the defaults."""

    @property
    def recommendation(self) -> Decision | None:
        """The change that would be made, or that requires a spec change."""
        return self.state.recommendation


def decide(snapshots: Iterable[ReplicaSnapshot], state: TunerState, settings: Settings, now: float) -> TunerOutput:
    """Run one tuner step. `now` is Unix time; `snapshots` has one entry per replica.

    Numbers of engines are bounded by `observation.faults`. If a calculation fails nevertheless, all values stay: the
    other work of the iteration (healing, rollouts) does not depend on the tuner.
    """
    try:
        return _decide(snapshots, state, settings, float(now))
    except (ArithmeticError, ValueError) as error:
        message = f"the reported numbers cannot be evaluated ({type(error).__name__}: {error}); all values stay"
        held = Condition(False, Reason.METRICS_INCONSISTENT, message)
        return TunerOutput(
            replace(state, tracks={}),
            held,
            Condition(False, Reason.METRICS_UNAVAILABLE, message),
            replicas=_held_count(state, settings),
            objectives=settings.objectives,
        )


def _held_count(state: TunerState, settings: Settings) -> int | None:
    """Return the requested count within the bounds of the spec; None if `spec.replicas` sets it."""
    scaling = settings.scaling
    if scaling is None:
        return None
    count = scaling.min_replicas if state.scaling.desired is None else state.scaling.desired
    return max(scaling.min_replicas, min(scaling.max_replicas, count))


def _decide(snapshots: Iterable[ReplicaSnapshot], state: TunerState, settings: Settings, now: float) -> TunerOutput:
    timeouts = FaultTimeouts.for_tick(settings.pace.sampling_seconds)
    observation, tracks = observe(state.tracks, snapshots, now=now, timeouts=timeouts)
    state = replace(_apply_spec_changes(state, settings, observation, now), tracks=tracks)
    state, bounds_decisions = _with_count_in_bounds(state, settings, observation, now)
    if settings.mode is Mode.OFF:
        return _off(state, observation, settings, bounds_decisions)
    state = with_observation(state, observation, settings)
    iteration = _Iteration(state, observation, settings, now)
    iteration.decisions.extend(bounds_decisions)
    iteration.apply_safety_rules()
    iteration.update_violated_since()
    iteration.record_evidence()
    iteration.tune()
    iteration.scale()
    iteration.recommend_restart_only_changes()
    return iteration.outcome()


def _with_count_in_bounds(
    state: TunerState, settings: Settings, observation: Observation, now: float
) -> tuple[TunerState, tuple[Decision, ...]]:
    """Keep the replica count within the bounds of the spec, in every mode. Without an earlier request the count starts
    at the present number of replicas, without a decision.
    """
    if settings.scaling is None:
        return replace(state, scaling=replace(state.scaling, desired=None)), ()
    before, count = state.scaling.desired, count_in_bounds(state, observation, settings.scaling)
    state = replace(state, scaling=replace(state.scaling, desired=count))
    if before is None or before == count:
        return state, ()
    move = Move(Reason.BOUNDS_CHANGED, ReplicaCount(), before, count)
    decision = Decision(decision_id(now, move), now, move, sentence_of(move, settings.mode))
    moved = replace(state, moved_at={**state.moved_at, move.target.value: now})
    return moved.with_decision(decision), (decision,)


def _off(
    state: TunerState, observation: Observation, settings: Settings, decisions: tuple[Decision, ...]
) -> TunerOutput:
    """Return the output in mode Off: nothing is applied, tried or recommended; learned state is kept."""
    kept = replace(state, applied={}, trial=None, recommendation=None)
    off = Condition(False, Reason.OFF, "spec.tuning.mode is Off")
    return TunerOutput(
        kept,
        metrics_condition(observation),
        off,
        replicas=kept.scaling.desired,
        decisions=decisions,
        objectives=settings.objectives,
    )


def _apply_spec_changes(state: TunerState, settings: Settings, observation: Observation, now: float) -> TunerState:
    """Apply changes of the spec to the state.

    A new start value, which running engines get as well, discards the tuned value of its parameter and earlier crashes
    above the old start, and counts as a change of the parameter. Tuned values whose start value is unknown and expired
    pins are removed too.
    """
    known = dict(state.starts)
    for seen in observation.trusted:
        assert seen.config is not None
        for parameter, value in seen.config.applied.items():
            if parameter not in state.applied:
                known.setdefault(parameter, value)  # the engine's own start value
    fresh = {
        parameter for parameter, start in settings.starts.items() if parameter in known and known[parameter] != start
    }
    in_auto = settings.mode is Mode.AUTO
    starts = {**known, **settings.starts}
    applied = {
        parameter: value
        for parameter, value in state.applied.items()
        if in_auto and parameter not in fresh and parameter in starts
    }
    trial = state.trial if state.trial is not None and state.trial.parameter in applied else None
    return replace(
        state,
        starts=starts,
        applied=applied,
        trial=trial,
        pins=tuple(pin for pin in state.pins if pin.until > now and pin.parameter not in fresh),
        crashes=() if fresh else state.crashes,
        moved_at={**state.moved_at, **{parameter.value: now for parameter in fresh}},
    )


def metrics_condition(observation: Observation) -> Condition:
    """Return the condition MetricsAvailable: whether valid metrics exist, and the first fault otherwise."""
    findings = observation.findings
    if not observation.ready:
        return Condition(False, Reason.NO_READY_REPLICA, "no replica is ready; nothing is measured")
    if not findings:
        return Condition(True, Reason.SCRAPED, "the metrics of every ready replica are fresh and consistent")
    name, first = min(findings.items())
    detail = f"{name}: {first.message}" if len(findings) == 1 else f"{', '.join(sorted(findings))}: {first.message}"
    if len(findings) < len(observation.ready):
        return Condition(
            False,
            Reason.METRICS_PARTIAL,
            f"metrics of {len(observation.trusted)} of {len(observation.ready)} ready replicas are valid; {detail}",
        )
    return Condition(False, first.fault, detail)


class _Iteration:
    """State of one tuner step; private to this module."""

    def __init__(self, state: TunerState, observation: Observation, settings: Settings, now: float) -> None:
        self.state = state
        self.observation = observation
        self.settings = settings
        self.now = now
        self.decisions: list[Decision] = []
        self.replicas: int | None = None
        self.objectives = objectives_of(state, settings)
        self.state = update_predictor(state, self.objectives, now=now, level=self.objectives.share)
        self._seen: tuple[TunerState, Situation | None] | None = None
        self._windows: dict[float | None, Interval | None] = {}
        """Total of the trusted replicas over the last minute, by the start of the window."""
        self._shares: dict[float, tuple[float | None, int]] = {}
        """Attainment and request count by start time; constant during a step."""
        self.found: Move | None = None
        """Change that a live-parameter rule wants but that may not be applied."""

    # --- steps -----------------------------------------------------------------------------------------

    def apply_safety_rules(self) -> None:
        """Apply bounds, crash roll-backs and device-memory releases immediately."""
        if self.settings.mode is not Mode.AUTO:
            return
        moves = move_into_bounds(self.state, self.settings, self.observation)
        for move in moves:
            self._apply_now(move)
        self.state, moves = roll_back_after_crash(
            self.state, self.observation, now=self.now, pin_seconds=self.settings.pace.pin_seconds
        )
        for move in moves or yield_device_memory(self.state, self.observation):
            self._apply_now(move)

    def update_violated_since(self) -> None:
        """Record since when the attainment has been below the objective. With too few requests, a violation ends when
        no replica has a queue.
        """
        share, _ = self._attained(self.now - ATTAINMENT_WINDOW_SECONDS)
        if share is None:
            if self.observation.is_complete and not any(
                seen.gauges is None or seen.gauges.waiting for seen in self.observation.ready
            ):
                self.state = replace(self.state, violated_since=None)
            return
        began = self.state.violated_since
        missed = share < self.objectives.share
        self.state = replace(self.state, violated_since=(self.now if began is None else began) if missed else None)

    def record_evidence(self) -> None:
        """Record the load of the last minutes if it was attained, or clearly not, with unchanged replicas and
        parameters. A contradicted prediction is reported.
        """
        situation, predictor = self.situation(), self.state.predictor
        if situation is None or predictor is None or self._unapplied_replicas() or not self.observation.is_complete:
            return
        until = self.now - estimate_drain(self.state)
        start = until - OBSERVED_SECONDS
        changed = max(self.observation.complete_since(self.now), self.state.last_live_move)
        if start < changed or self.now - start > KEEP_OUTCOMES_SECONDS or self.state.clients.are_closed_loop:
            return
        outcomes = [one for one in since(self.state.request_outcomes, start) if one.arrived_at <= until]
        share = sum(one.is_met for one in outcomes) / max(1, len(outcomes))
        is_attained = judge_share(share, self.objectives.share, len(outcomes))
        if is_attained is None or not (rate := self._evident_rate(until, is_attained=is_attained)):
            return
        record = Record(
            self.now, situation.candidate, rate, predictor.mean_work, predictor.typical_context, is_attained
        )
        if self.state.evidence.is_news(record):
            self.state = replace(self.state, evidence=self.state.evidence.with_record(record))
            self._report_contradiction(predictor.at(record.candidate, rate).attainment, share, is_attained)

    def _evident_rate(self, until: float, *, is_attained: bool) -> float:
        """Return the rate of the OBSERVED_SECONDS before `until`: their mean if it was attained, otherwise their
        highest minute, which may be the one that was not.
        """
        demand = self.state.demand
        if is_attained:
            return demand.rate(OBSERVED_SECONDS, until=until) or 0.0
        ends = [until - seconds for seconds in range(0, int(OBSERVED_SECONDS - LEVEL_SECONDS) + 1, 15)]
        return max(demand.rate(LEVEL_SECONDS, until=end) or 0.0 for end in ends)

    def _report_contradiction(self, predicted: float, observed: float, is_attained: bool) -> None:
        """Report that evidence contradicts the prediction for the same load, at most once per CONTRADICTED_SECONDS."""
        wanted = self.objectives.share
        is_contradicted = predicted < level_at_bound(wanted) if is_attained else predicted >= wanted
        last = self.state.contradicted_at
        if not is_contradicted or (last is not None and self.now - last < CONTRADICTED_SECONDS):
            return
        self.state = replace(self.state, contradicted_at=self.now)
        evidence = {"predicted": round(predicted, 4), "attained": round(observed, 4)}
        count = len(self.observation.ready)
        self._record(Move(Reason.PREDICTION_CONTRADICTED, ReplicaCount(), count, count, evidence))

    def tune(self) -> None:
        """Judge the trial in progress; without one, start a trial for the first rule that wants a change."""
        situation = self.situation()
        if situation is None or self._unapplied_replicas():
            return
        if self.state.trial is not None:
            self._judge(self.state.trial, situation)
        if self.state.trial is not None or any(isinstance(one.move.target, Parameter) for one in self.decisions):
            return
        self.found = next((move for rule in LIVE_RULES if (move := rule(situation)) is not None), None)
        if self.found is None or self.settings.mode is not Mode.AUTO:
            return
        if self.now - self.state.last_live_move >= self.settings.pace.cool_down_seconds:
            self._try(self.found, situation)
            self.found = None

    def scale(self) -> None:
        """Choose the replica count if `spec.scaling` is set. If it may only be recommended, the count stays."""
        if self.settings.scaling is None:
            return
        self.state = with_outcomes(self.state, self.observation, now=self.now)
        chosen = choose_replicas(
            self.state, self.observation, self.settings, self.objectives, self.situation(), now=self.now
        )
        if self.settings.mode is Mode.AUTO:
            self.state = replace(self.state, scaling=chosen.state)
            if chosen.move is not None:
                self.state = replace(self.state, moved_at={**self.state.moved_at, "replicas": self.now})
                self._record(chosen.move)
        else:
            seen = chosen.state
            sampled = replace(self.state.scaling, wanted=seen.wanted, began_at=seen.began_at)
            self.state = replace(self.state, scaling=sampled)
            self.found = self.found or chosen.move
        self.replicas = self.state.scaling.desired

    def recommend_restart_only_changes(self) -> None:
        """Update the recommendation: a change that may not be applied, or one that needs new engines."""
        situation = self.situation()
        move = self.found or restart_move(self.state, self.observation, self.settings, situation, now=self.now)
        standing = self.state.recommendation
        if move is None:
            self.state = replace(self.state, recommendation=None)
        elif standing is None or self._is_another(move, standing):
            decision = self._record(move)
            self.state = replace(self.state, recommendation=decision)

    def outcome(self) -> TunerOutput:
        """Return the output. Engines that get values above the start values are recorded before they get them."""
        patches = self._patches()
        raised = raised_engines(self.state, self.observation, patches)
        return TunerOutput(
            state=replace(self.state, raised=raised),
            metrics_available=metrics_condition(self.observation),
            tuning_active=self._tuning_condition(),
            patches=patches,
            replicas=self.replicas,
            decisions=tuple(self.decisions),
            objectives=self.objectives,
        )

    def _is_another(self, move: Move, standing: Decision) -> bool:
        """Return True if the move differs from the current recommendation. A changed replica count alone is reported at
        most once per ATTAINMENT_WINDOW_SECONDS.
        """
        if (standing.move.target, standing.reason) != (move.target, move.reason):
            return True
        is_old = self.now - standing.at >= ATTAINMENT_WINDOW_SECONDS
        return isinstance(move.target, ReplicaCount) and standing.move.after != move.after and is_old

    # --- helpers --------------------------------------------------------------------------------------------------

    def situation(self) -> Situation | None:
        """Return the input of the rules, cached until the state changes."""
        if self._seen is None or self._seen[0] is not self.state:
            self._seen = (self.state, self._situation())
        return self._seen[1]

    def _situation(self) -> Situation | None:
        """Return the input of the rules; None without trusted replicas or measurements since the last change."""
        trusted = self.observation.trusted
        pace = self.settings.pace
        settled = self.state.last_live_move + SETTLE_SECONDS
        window = self._window(settled if math.isfinite(settled) else None)
        model = self.state.model
        rate = self.state.demand.rate(pace.window_seconds)
        if not trusted or window is None or model is None or rate is None:
            return None
        ledgers = [seen.ledger for seen in trusted if seen.ledger is not None]
        applied = self.state.applied if self.settings.mode is Mode.AUTO else {}
        since_move = max(self.now - ATTAINMENT_WINDOW_SECONDS, self.state.last_live_move)
        return Situation(
            now=self.now,
            settings=self.settings,
            state=self.state,
            observation=self.observation,
            window=window,
            ranges=ranges_of(
                self.observation, self.settings, applied=applied, pins=active_pins(self.state, self.settings)
            ),
            ledger=min(ledgers, key=lambda ledger: ledger.kv_tokens),
            objectives=self.objectives,
            cost=model.cost,
            predictor=self.state.predictor,
            rate=rate,
            replicas=len(self.observation.ready),
            starting=sum(1 for seen in self.observation.starting if seen.phase is Phase.STARTING),
            attained=self._attained(since_move)[0],
        )

    def _window(self, settled: float | None) -> Interval | None:
        if settled not in self._windows:
            self._windows[settled] = self.observation.total(seconds=self.settings.pace.window_seconds, since=settled)
        return self._windows[settled]

    def _attained(self, start: float) -> tuple[float | None, int]:
        """Return the attainment of requests that arrived since `start`, and the number of finished ones."""
        if start not in self._shares:
            least = self.settings.pace.least_requests
            share = compute_attainment(self.state, self.objectives, now=self.now, start=start, least=least)
            self._shares[start] = share, len(since(self.state.request_outcomes, start))
        return self._shares[start]

    def _judge(self, trial: Trial, situation: Situation) -> None:
        start = trial.at + SETTLE_SECONDS
        complete = max(start, self.observation.complete_since(self.now) + SETTLE_SECONDS)
        share, count = self._attained(complete)
        is_starting = situation.starting > 0  # attainment then depends on the replica count
        verdict = judge_trial(
            trial,
            situation,
            attained=None if is_starting else share,
            requests=count,
            since=self.observation.total(since=start),
            is_awaited=is_starting or (complete > start and share is None),
        )
        if verdict.verdict is Verdict.KEPT:
            self.state = replace(self.state.with_outcome(trial.decision, f"kept: {verdict.seen}"), trial=None)
        elif verdict.verdict is Verdict.BAD:
            pin = Pin(trial.parameter, trial.after, trial.before, self.now + self.settings.pace.pin_seconds)
            self.state = replace(
                self.state.with_outcome(trial.decision, f"reverted: {verdict.seen}"),
                trial=None,
                pins=(*self.state.pins, pin),
            )
            self._apply_now(Move(Reason.ROLLED_BACK, trial.parameter, trial.after, trial.before), note=verdict.seen)
        elif verdict.verdict is Verdict.NOT_ACHIEVED:
            self._end_useless(trial, verdict.seen)

    def _end_useless(self, trial: Trial, seen: str) -> None:
        """End a trial without its predicted effect: return the value unless it costs nothing, and do not change it for
        that reason again until the request mix changes.
        """
        is_free = trial.parameter is Parameter.GPU_MEMORY_UTILIZATION and trial.after > trial.before
        kept = trial.after if is_free else trial.before
        limit = Pin(
            trial.parameter,
            trial.after + 1 if is_free else trial.after,
            kept,
            self.now + self.settings.pace.useless_seconds,
            is_for_mix=True,
        )
        self.state = replace(
            self.state.with_outcome(trial.decision, f"not achieved: {seen}"),
            trial=None,
            pins=(*self.state.pins, limit),
        )
        self._apply_now(Move(Reason.PREDICTION_NOT_ACHIEVED, trial.parameter, trial.after, kept), note=seen)

    def _try(self, move: Move, situation: Situation) -> None:
        assert isinstance(move.target, Parameter)
        assert move.before is not None
        assert move.after is not None
        share, _ = self._attained(self.now - ATTAINMENT_WINDOW_SECONDS)
        decision = self._record(move)
        trial = Trial(
            decision=decision.id,
            parameter=move.target,
            before=move.before,
            after=move.after,
            at=self.now,
            expected=move.expected,
            attained=share,
            recomputed_share=situation.window.recomputed_share,
            rate=situation.rate,
        )
        self.state = replace(self.state.with_value(move.target, move.after, self.now), trial=trial)

    def _apply_now(self, move: Move, *, note: str = "") -> None:
        """Apply a value immediately, without a trial."""
        assert isinstance(move.target, Parameter)
        assert move.after is not None
        trial = self.state.trial
        if trial is not None and trial.parameter is move.target:
            self.state = replace(self.state, trial=None)
        self.state = self.state.with_value(move.target, move.after, self.now)
        self._record(move, note=note)

    def _record(self, move: Move, *, note: str = "") -> Decision:
        sentence = sentence_of(move, self.settings.mode)
        decision = Decision(
            decision_id(self.now, move), self.now, move, f"{sentence[:-1]} ({note})." if note else sentence
        )
        self.decisions.append(decision)
        self.state = self.state.with_decision(decision)
        return decision

    def _unapplied_replicas(self) -> list[str]:
        """Return trusted replicas that do not run the applied values yet; their metrics belong to the old values."""
        return [
            seen.replica
            for seen in self.observation.trusted
            if seen.config is not None and applicable_values(seen.config, self.state.applied)
        ]

    def _patches(self) -> dict[str, Values]:
        """Return one patch per responding engine whose values differ from the applied ones, ready or not."""
        if self.settings.mode is not Mode.AUTO:
            return {}
        found = (
            (seen.replica, applicable_values(seen.config, self.state.applied))
            for seen in self.observation.replicas
            if seen.config is not None
        )
        return {replica: fields for replica, fields in found if fields}

    def _tuning_condition(self) -> Condition:
        if not self.observation.trusted:
            return Condition(
                False, Reason.METRICS_UNAVAILABLE, "no replica has valid metrics; all parameters keep their values"
            )
        behind = self._unapplied_replicas()
        if behind:
            return Condition(False, Reason.NOT_YET_APPLIED, f"{', '.join(behind)}: does not run the applied values yet")
        standing = self.state.recommendation
        if standing is not None and isinstance(standing.move.target, ReplicaCount | Restart):
            return Condition(True, standing.reason, "see the recommendation")
        if is_crash_budget_exhausted(self.state, self.settings):
            message = (
                f"engines crashed {len(self.state.crashes)} times above the start values; no parameter is raised above "
                "its start value until spec.engine changes it"
            )
            return Condition(True, Reason.CRASH_BUDGET_EXHAUSTED, message)
        if self.settings.mode is Mode.RECOMMEND:
            return Condition(
                True, Reason.RECOMMENDING, "recommendations are written to status; no parameter is changed"
            )
        return Condition(True, Reason.TUNING, "parameters change within their bounds if that improves attainment")
