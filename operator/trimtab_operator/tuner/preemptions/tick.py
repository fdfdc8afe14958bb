"""One tick of the tuner: state, readings, settings and the time go in; a new state and what to do come out.

Pure: it reads no clock and calls nobody. The order of a tick:
owner's changes (bounds, starts, mode) → can the metrics be believed? → judge the last change → decide the next one
→ the values every engine must run, as patches for those that do not.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trimtab_operator.tuner.preemptions import decision as rules
from trimtab_operator.tuner.preemptions.diagnosis import (
    Situation,
    is_pressed,
    knob_ranges,
    made_worse,
    pressures,
    reported_values,
    worst_of,
)
from trimtab_operator.tuner.preemptions.explanation import explain, explain_bounds, explain_restart, explain_rollback
from trimtab_operator.tuner.preemptions.observation import (
    Doubt,
    FieldRange,
    GroupReading,
    Hold,
    Knob,
    Pressure,
    Value,
    Values,
    Window,
    has_restarted,
    hold,
    is_out_of_step,
)
from trimtab_operator.tuner.preemptions.state import BadValue, Decision, Mode, Reason, Settings, TunerState, Watch

SAME_VALUE = 1e-6  # utilisations closer than this are one value written twice


@dataclass(frozen=True, slots=True)
class EnginePatch:
    """Fields that the engine of one group must be PATCHed to."""

    group: str
    fields: Values


@dataclass(frozen=True, slots=True)
class Verdict:
    """A condition's status, reason and message; equal as long as its cause is."""

    ok: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class TickResult:
    """What a tick yields. Write `state` when its JSON changed; `decisions` are new in this tick (one Event each)."""

    state: TunerState
    metrics_available: Verdict
    tuning_active: Verdict
    patches: tuple[EnginePatch, ...] = ()
    decisions: tuple[Decision, ...] = ()
    recommendation: Decision | None = None

    @property
    def applied(self) -> Values:
        """`status.tuning.applied`."""
        return self.state.applied

    @property
    def history(self) -> tuple[Decision, ...]:
        """`status.tuning.history`, oldest first, at most ten."""
        return self.state.history


@dataclass(slots=True)
class _Turn:
    """The tick while it runs; nothing outside this module sees it."""

    state: TunerState
    readings: Sequence[GroupReading]
    settings: Settings
    now: float
    decisions: list[Decision] = field(default_factory=list)

    def record(
        self,
        reason: Reason,
        knob: Knob | None,
        change: tuple[Value | None, Value | None],
        sentence: str,
        evidence: Mapping[str, float],
    ) -> Decision:
        before, after = change
        made = Decision(_id(self.now, reason, knob, change), self.now, reason, knob, before, after, sentence, evidence)
        self.decisions.append(made)
        self.state = self.state.with_decision(made)
        return made

    def set_value(self, knob: Knob, value: Value) -> None:
        self.state = replace(
            self.state,
            applied={**self.state.applied, knob: value},
            changed_at={**self.state.changed_at, knob: self.now},
        )


def _id(now: float, reason: Reason, knob: Knob | None, change: tuple[Value | None, Value | None]) -> str:
    return hashlib.sha256(f"{now!r}|{reason}|{knob}|{change!r}".encode()).hexdigest()[:8]


def tick(state: TunerState, readings: Iterable[GroupReading], settings: Settings, now: float) -> TickResult:
    """Advance the tuner by one tick. `readings` holds one entry per replica group; `now` is Unix time."""
    now = float(now)
    seen = tuple(sorted(readings, key=lambda reading: reading.group))
    if settings.mode is Mode.OFF:
        return _off(state, seen, settings, now)
    is_down = _is_down_since_it_served(state, seen)
    turn = _Turn(_owner_changes(state, settings, now, is_down=is_down), seen, settings, now)
    if settings.mode is Mode.AUTO:
        _keep_bounds(turn)
        _watch_restarts(turn)
    _extend_windows(turn)
    held = hold(seen, now=now, max_age_seconds=settings.pace.max_age_seconds) or _hold_out_of_step(turn)
    behind = _groups_behind(turn)
    if held is None and not behind and not any(is_out_of_step(reading) for reading in seen if reading.ready):
        if not is_down:
            _judge(turn)
        if not turn.decisions:
            _act(turn)
    return TickResult(
        state=turn.state,
        metrics_available=_metrics_verdict(held),
        tuning_active=_tuning_verdict(turn, held, behind),
        patches=_patches(turn),
        decisions=tuple(turn.decisions),
        recommendation=turn.state.recommendation,
    )


# --- what the owner changed -------------------------------------------------------------------------------------------


def _off(state: TunerState, readings: Sequence[GroupReading], settings: Settings, now: float) -> TickResult:
    """Off: nothing is applied, watched or recommended; what was learned is kept for the day it is switched on."""
    kept = TunerState(starts=dict(settings.starts), bad_values=state.bad_values, history=state.history)
    held = hold(readings, now=now, max_age_seconds=settings.pace.max_age_seconds)
    return TickResult(kept, _metrics_verdict(held), Verdict(False, "Off", "spec.tuning.mode is Off"))


def _owner_changes(state: TunerState, settings: Settings, now: float, *, is_down: bool) -> TunerState:
    """A new start value is the owner's word: the tuned value of that knob is forgotten. Expired memories go too."""
    fresh = {knob for knob, start in settings.starts.items() if state.starts.get(knob, start) != start}
    in_auto = settings.mode is Mode.AUTO
    watch_seconds = settings.pace.bad_value_seconds if is_down else settings.pace.watch_seconds
    watch = state.watch if in_auto and state.watch is not None and state.watch.knob not in fresh else None
    return replace(
        state,
        starts=dict(settings.starts),
        applied={k: v for k, v in state.applied.items() if in_auto and k not in fresh},
        watch=watch if watch is not None and now - watch.at <= watch_seconds else None,
        bad_values=tuple(bad for bad in state.bad_values if bad.until > now and bad.knob not in fresh),
    )


def _keep_bounds(turn: _Turn) -> None:
    """Applied values that new bounds exclude are moved to the nearest allowed one."""
    for knob, value in turn.state.applied.items():
        bounds = turn.settings.bounds.get(knob)
        if bounds is None:
            continue
        inside = value
        if bounds.minimum is not None:
            inside = max(inside, bounds.minimum)
        if bounds.maximum is not None:
            inside = min(inside, bounds.maximum)
        if inside != value:
            turn.set_value(knob, inside)
            turn.state = replace(turn.state, watch=None)
            sentence = explain_bounds(knob, value, inside)
            turn.record(Reason.BOUNDS_CHANGED, knob, (value, inside), sentence, {})


# --- evidence ---------------------------------------------------------------------------------------------------------


def _watch_restarts(turn: _Turn) -> None:
    """An engine that restarts right after its memory was raised probably ran out of it: take the raise back."""
    watch = turn.state.watch
    if watch is None or watch.knob is not Knob.GPU_MEMORY_UTILIZATION or watch.after <= watch.before:
        return
    for reading in turn.readings:
        window = turn.state.windows.get(reading.group)
        if window is not None and window.instance == reading.instance and _restarted(reading, window):
            avoid = turn.settings.pace.bad_value_seconds
            sentence = explain_restart(watch, reading.group, after_seconds=turn.now - watch.at, avoid_seconds=avoid)
            _roll_back(turn, watch, Reason.RESTARTED_AFTER, sentence, {})
            return


def _is_down_since_it_served(state: TunerState, readings: Iterable[GroupReading]) -> bool:
    """Whether an engine that was measured before is away, or is just back from a restart.

    A large model loads for longer than a change is watched: until it is back, whether it crashed cannot be seen.
    """
    windows = ((reading, state.windows.get(reading.group)) for reading in readings)
    return any(
        window is not None
        and bool(window.samples)
        and window.instance == reading.instance
        and (not reading.ready or _restarted(reading, window))
        for reading, window in windows
    )


def _restarted(reading: GroupReading, window: Window) -> bool:
    if not window.samples:
        return False
    last = window.samples[-1]
    if reading.config is not None and reading.config.generation < last.config_generation:
        return True
    return reading.load is not None and has_restarted(last, reading.load)


def _extend_windows(turn: _Turn) -> None:
    """Add this tick's believable samples. A group that restarted, or that runs other values, begins anew."""
    pace = turn.settings.pace
    windows: dict[str, Window] = {}
    for reading in turn.readings:
        window = turn.state.windows.get(reading.group, Window())
        if window.instance != reading.instance or _restarted(reading, window) or _is_behind(reading, turn):
            window = Window(instance=reading.instance)
        elif is_out_of_step(reading):
            since = turn.now if window.out_of_step_since is None else window.out_of_step_since
            window = replace(window, out_of_step_since=since)
        elif hold((reading,), now=turn.now, max_age_seconds=pace.max_age_seconds) is None:
            assert reading.load is not None
            window = window.add(reading.load, keep_seconds=pace.window_seconds)
            window = replace(window, out_of_step_since=None)
        windows[reading.group] = window
    turn.state = replace(turn.state, windows=windows)


def _hold_out_of_step(turn: _Turn) -> Hold | None:
    """Metrics trail the configuration for a step after each change; for longer than a sample's age they lie."""
    limit = turn.settings.pace.max_age_seconds
    for reading in turn.readings:
        since = turn.state.windows[reading.group].out_of_step_since
        if reading.ready and since is not None and turn.now - since > limit:
            message = f"metrics and configuration of {reading.group} are of different generations for over {limit:g} s"
            return Hold(Doubt.INCONSISTENT, message)
    return None


def _evidence(turn: _Turn) -> list[Pressure]:
    """Pressure on each group since the last change settled, however many knobs there are."""
    changed = max(turn.state.changed_at.values(), default=-math.inf)
    since = max(turn.now - turn.settings.pace.window_seconds, changed + turn.settings.pace.settle_seconds)
    return pressures(turn.readings, turn.state.windows, since=since)


# --- judge and act ----------------------------------------------------------------------------------------------------


def _judge(turn: _Turn) -> None:
    """Look at the last change once there is evidence enough: keep it, or roll it back and remember."""
    watch = turn.state.watch
    worst = worst_of(_evidence(turn))
    if watch is None or worst is None or worst.seconds < turn.settings.pace.judge_seconds:
        return
    if not made_worse(watch, worst):
        turn.state = replace(turn.state, watch=None)
        return
    sentence = explain_rollback(watch, worst, avoid_seconds=turn.settings.pace.bad_value_seconds)
    evidence = {"preemptions": worst.preemptions, "seconds": round(worst.seconds, 1)}
    _roll_back(turn, watch, Reason.MADE_WORSE, sentence, evidence)


def _roll_back(turn: _Turn, watch: Watch, reason: Reason, sentence: str, evidence: Mapping[str, float]) -> None:
    until = turn.now + turn.settings.pace.bad_value_seconds
    bad = BadValue(watch.knob, watch.after, watch.before, until)
    turn.set_value(watch.knob, watch.before)
    turn.state = replace(turn.state, watch=None, bad_values=(*turn.state.bad_values, bad))
    turn.record(reason, watch.knob, (watch.after, watch.before), sentence, evidence)


def _act(turn: _Turn) -> None:
    """Decide the next move, if the pressure is sustained and nothing is under watch."""
    worst = worst_of(_evidence(turn))
    current = _current(turn, worst)
    _settle_recommendation(turn, worst, current)
    if worst is None or turn.state.watch is not None or not is_pressed(worst, turn.settings.pace):
        return
    if _is_draining_down(turn, current):
        return
    configs = [r.config for r in turn.readings if r.ready and r.config is not None]
    worst_config = next(r.config for r in turn.readings if r.group == worst.group)
    assert worst_config is not None
    ranges = knob_ranges(configs, turn.settings, current=current, bad_values=turn.state.bad_values)
    situation = Situation(worst, ranges, worst_config.max_model_len)
    move = rules.decide(situation)
    if move.knob is None or turn.settings.mode is Mode.RECOMMEND:
        _recommend(turn, move, situation)
    elif turn.now - turn.state.changed_at.get(move.knob, -math.inf) >= turn.settings.pace.cool_down_seconds[move.knob]:
        _apply(turn, move, situation)


def _is_draining_down(turn: _Turn, current: Values) -> bool:
    """Whether more requests run than max_num_seqs allows: a lowered value is not in force before they have ended."""
    seats = current.get(Knob.MAX_NUM_SEQS)
    loads = (reading.load for reading in turn.readings if reading.ready)
    return seats is not None and any(load is not None and load.running > seats for load in loads)


def _current(turn: _Turn, worst: Pressure | None) -> dict[Knob, Value]:
    reported = reported_values(turn.readings, prefer=worst.group if worst else None)
    return {**reported, **turn.state.applied}


def _apply(turn: _Turn, move: rules.Move, situation: Situation) -> None:
    assert move.knob is not None
    assert move.before is not None
    assert move.after is not None
    seen = situation.worst
    turn.set_value(move.knob, move.after)
    watch = Watch(
        move.knob, move.before, move.after, turn.now, seen.preemptions, seen.seconds, seen.generated_tokens, seen.demand
    )
    turn.state = replace(turn.state, watch=watch, recommendation=None)
    sentence = explain(move, situation, turn.settings.mode)
    turn.record(move.reason, move.knob, (move.before, move.after), sentence, move.evidence)


def _recommend(turn: _Turn, move: rules.Move, situation: Situation) -> None:
    """Say it once: the same finding stands until it is met or the load is gone, and is not revised all the time."""
    standing = turn.state.recommendation
    if standing is not None and standing.knob is move.knob and standing.reason is move.reason:
        is_due = turn.now - standing.at >= turn.settings.pace.revise_seconds
        if move.knob is None or standing.after == move.after or not is_due:
            return
    sentence = explain(move, situation, turn.settings.mode)
    made = turn.record(move.reason, move.knob, (move.before, move.after), sentence, move.evidence)
    turn.state = replace(turn.state, recommendation=made)


def _settle_recommendation(turn: _Turn, worst: Pressure | None, current: Values) -> None:
    """Drop a recommendation that was met, that no longer fits the mode, or whose load has gone."""
    standing = turn.state.recommendation
    if standing is None:
        return
    pace = turn.settings.pace
    if standing.knob is None:
        calm_for = pace.window_seconds if turn.settings.mode is Mode.AUTO else pace.recommendation_seconds
        is_gone = worst is not None and worst.preemptions == 0 and turn.now - standing.at >= calm_for
    else:
        is_gone = turn.settings.mode is Mode.AUTO or _is_met(standing, current.get(standing.knob))
        is_gone = is_gone or (
            worst is not None and worst.preemptions == 0 and turn.now - standing.at >= pace.recommendation_seconds
        )
    if is_gone:
        turn.state = replace(turn.state, recommendation=None)


def _is_met(standing: Decision, value: Value | None) -> bool:
    if value is None or standing.before is None or standing.after is None:
        return False
    return value >= standing.after if standing.after > standing.before else value <= standing.after


# --- what the engines must run ----------------------------------------------------------------------------------------


def _patches(turn: _Turn) -> tuple[EnginePatch, ...]:
    """One patch per engine that answers and runs other values than the applied ones; ready or not."""
    if turn.settings.mode is not Mode.AUTO:
        return ()
    found = ((reading.group, _differences(reading, turn.state.applied)) for reading in turn.readings)
    return tuple(EnginePatch(group, fields) for group, fields in found if fields)


def _differences(reading: GroupReading, applied: Values) -> dict[Knob, Value]:
    if reading.config is None:
        return {}
    runs, fields = reading.config.applied, reading.config.fields
    wanted = {k: _possible(k, v, fields[k]) for k, v in applied.items() if k in runs and k in fields and fields[k].live}
    return {knob: value for knob, value in wanted.items() if abs(runs[knob] - value) > SAME_VALUE}


def _possible(knob: Knob, value: Value, limits: FieldRange) -> Value:
    """The nearest utilisation that this engine can take: what one request needs differs a little from start to start.

    The bounds of the counts depend on each other; they are judged by the engine when all fields arrive together.
    """
    return min(max(value, limits.minimum), limits.maximum) if knob is Knob.GPU_MEMORY_UTILIZATION else value


def _is_behind(reading: GroupReading, turn: _Turn) -> bool:
    return turn.settings.mode is Mode.AUTO and bool(_differences(reading, turn.state.applied))


def _groups_behind(turn: _Turn) -> list[str]:
    return [reading.group for reading in turn.readings if reading.ready and _is_behind(reading, turn)]


# --- verdicts ---------------------------------------------------------------------------------------------------------


def _metrics_verdict(held: Hold | None) -> Verdict:
    if held is not None:
        return Verdict(False, held.doubt.value, held.message)
    return Verdict(True, "Scraped", "the metrics of every ready replica are fresh and consistent")


def _tuning_verdict(turn: _Turn, held: Hold | None, behind: Sequence[str]) -> Verdict:
    if held is not None:
        return Verdict(False, "MetricsUnavailable", f"every knob is held: {held.message}")
    if behind:
        return Verdict(False, "NotYetApplied", f"{', '.join(behind)}: does not run the applied values yet")
    standing = turn.state.recommendation
    if standing is not None and standing.reason is Reason.SATURATED:
        return Verdict(True, Reason.SATURATED.value, "every knob is at its bound; see the recommendation")
    if turn.settings.mode is Mode.RECOMMEND:
        return Verdict(True, "Recommending", "recommendations are written to status; nothing is changed")
    return Verdict(True, "Tuning", "knobs move within their bounds when requests are preempted")
