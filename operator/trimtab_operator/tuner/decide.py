"""The tuner: looks at all replicas, what is remembered, what the owner asks and the time go in; what to do comes out.

Pure: it reads no clock and calls nobody. In this order:

    owner's changes → what can be believed, and what it teaches → safety → the trial in flight → one hot knob
    → replicas → what only a restart could change → values that each engine must run
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from trimtab_operator.tuner.explanation import sentence_of
from trimtab_operator.tuner.knobs import Knob, Values
from trimtab_operator.tuner.learning import attained, objectives_of, with_foresight, with_observation
from trimtab_operator.tuner.load.arrivals import since
from trimtab_operator.tuner.moves import Decision, Move, Reason, ReplicaCount, Restart, decision_id
from trimtab_operator.tuner.objectives import Objectives
from trimtab_operator.tuner.observation import Interval, Observation, observe
from trimtab_operator.tuner.observation.track import Patience
from trimtab_operator.tuner.outcomes import with_outcomes
from trimtab_operator.tuner.rules import HOT
from trimtab_operator.tuner.rules.replicas import count_in_bounds, wanted_replicas
from trimtab_operator.tuner.rules.restart import restart_move
from trimtab_operator.tuner.safety import (
    crashed,
    engines_raised,
    is_budget_spent,
    memory_taken,
    out_of_bounds,
    possible,
    standing_pins,
)
from trimtab_operator.tuner.samples import Look, Phase
from trimtab_operator.tuner.settings import Mode, Settings
from trimtab_operator.tuner.situation import Situation, ranges_of
from trimtab_operator.tuner.state import Memory, Pin, Trial
from trimtab_operator.tuner.trial import SETTLE_SECONDS, Verdict, judged

FELT_SECONDS = 300.0  # over which it is judged whether promises are kept


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition's status, reason and message; equal as long as its cause is."""

    ok: bool
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one turn. `patches` are values that engines must be PATCHed to, by replica; `replicas` is the count
    to ask for, None where it is the owner's; `decisions` are new (one Event each)."""

    memory: Memory
    metrics_available: Condition
    tuning_active: Condition
    patches: Mapping[str, Values] = field(default_factory=dict)
    replicas: int | None = None
    decisions: tuple[Decision, ...] = ()
    objectives: Objectives = field(default_factory=Objectives)
    """In force: the owner's, or the defaults."""

    @property
    def recommendation(self) -> Decision | None:
        """What would be done, or what only the owner can do."""
        return self.memory.recommendation


def decide(looks: Iterable[Look], memory: Memory, settings: Settings, now: float) -> Outcome:
    """One turn. `now` is Unix time; `looks` holds one entry per replica."""
    now = float(now)
    patience = Patience.for_tick(max(settings.pace.tick_seconds, settings.pace.sample_seconds))
    observation, tracks = observe(memory.tracks, looks, now=now, patience=patience)
    memory = replace(_with_owners_word(memory, settings, observation, now), tracks=tracks)
    memory, told = _with_count_in_bounds(memory, settings, observation, now)
    if settings.mode is Mode.OFF:
        return _off(memory, observation, settings, told)
    memory = with_observation(memory, observation, settings)
    turn = _Turn(memory, observation, settings, now)
    turn.decisions.extend(told)
    turn.keep_safe()
    turn.note_what_is_missed()
    turn.tune()
    turn.scale()
    turn.say_what_only_a_restart_helps()
    return turn.outcome()


def _with_count_in_bounds(
    memory: Memory, settings: Settings, observation: Observation, now: float
) -> tuple[Memory, tuple[Decision, ...]]:
    """Hold the count within the owner's bounds, whatever the mode: they say how many there may be. Where none was asked
    for before, it begins with what is there, and nothing is decided."""
    if settings.scaling is None:
        return replace(memory, scaling=replace(memory.scaling, desired=None)), ()
    before, count = memory.scaling.desired, count_in_bounds(memory, observation, settings.scaling)
    memory = replace(memory, scaling=replace(memory.scaling, desired=count))
    if before is None or before == count:
        return memory, ()
    move = Move(Reason.BOUNDS_CHANGED, ReplicaCount(), before, count)
    decision = Decision(decision_id(now, move), now, move, sentence_of(move, settings.mode))
    moved = replace(memory, moved_at={**memory.moved_at, move.target.value: now})
    return moved.with_decision(decision), (decision,)


def _off(memory: Memory, observation: Observation, settings: Settings, decisions: tuple[Decision, ...]) -> Outcome:
    """Off: nothing is applied, tried or recommended; what was learned is kept for the day it is switched on."""
    kept = replace(memory, applied={}, trial=None, recommendation=None)
    off = Condition(False, Reason.OFF, "spec.tuning.mode is Off")
    return Outcome(
        kept,
        metrics_condition(observation),
        off,
        replicas=kept.scaling.desired,
        decisions=decisions,
        objectives=settings.objectives,
    )


def _with_owners_word(memory: Memory, settings: Settings, observation: Observation, now: float) -> Memory:
    """A new start value is the owner's word: the tuned value of that knob, and crashes above the start before it, are
    forgotten. So is a tuned value whose start is not known any more. Expired pins go too."""
    known = dict(memory.starts)
    for seen in observation.trusted:
        assert seen.config is not None
        for knob, value in seen.config.applied.items():
            if knob not in memory.applied:
                known.setdefault(knob, value)  # where the engine itself began
    fresh = {knob for knob, start in settings.starts.items() if knob in known and known[knob] != start}
    in_auto = settings.mode is Mode.AUTO
    starts = {**known, **settings.starts}
    applied = {
        knob: value for knob, value in memory.applied.items() if in_auto and knob not in fresh and knob in starts
    }
    trial = memory.trial if memory.trial is not None and memory.trial.knob in applied else None
    return replace(
        memory,
        starts=starts,
        applied=applied,
        trial=trial,
        pins=tuple(pin for pin in memory.pins if pin.until > now and pin.knob not in fresh),
        crashes=() if fresh else memory.crashes,
    )


def metrics_condition(observation: Observation) -> Condition:
    """Whether there are numbers to act on, and what is wrong with those that cannot be believed."""
    findings = observation.findings
    if not observation.ready:
        return Condition(False, Reason.NO_READY_REPLICA, "no replica is ready; nothing is measured")
    if not findings:
        return Condition(True, Reason.SCRAPED, "the metrics of every ready replica are fresh and consistent")
    name, first = min(findings.items())
    said = f"{name}: {first.message}" if len(findings) == 1 else f"{', '.join(sorted(findings))}: {first.message}"
    if len(findings) < len(observation.ready):
        return Condition(
            False,
            Reason.METRICS_PARTIAL,
            f"metrics of {len(observation.trusted)} of {len(observation.ready)} replicas; {said}",
        )
    return Condition(False, first.fault, said)


class _Turn:
    """One turn while it runs; nothing outside this module sees it."""

    def __init__(self, memory: Memory, observation: Observation, settings: Settings, now: float) -> None:
        self.memory = memory
        self.observation = observation
        self.settings = settings
        self.now = now
        self.decisions: list[Decision] = []
        self.replicas: int | None = None
        self.objectives = objectives_of(memory, settings)
        self.memory = with_foresight(memory, self.objectives, now=now, level=self.objectives.share)
        self._seen: tuple[Memory, Situation | None] | None = None
        self._windows: dict[float | None, Interval | None] = {}
        """What the believed replicas did in the last minute, by the change since when it counts."""
        self._shares: dict[float, tuple[float | None, int]] = {}
        """What is known of promises kept, by since when: nothing that a turn does changes it."""
        self.found: Move | None = None
        """What the hot rules want where it may not be done."""

    # --- steps of the turn ----------------------------------------------------------------------------------------

    def keep_safe(self) -> None:
        """Bounds, crashes and memory that others took, at once."""
        if self.settings.mode is not Mode.AUTO:
            return
        moves = out_of_bounds(self.memory, self.settings, self.observation)
        for move in moves:
            self._apply_safely(move)
        self.memory, moves = crashed(
            self.memory, self.observation, now=self.now, pin_seconds=self.settings.pace.pin_seconds
        )
        for move in moves or memory_taken(self.memory, self.observation):
            self._apply_safely(move)

    def note_what_is_missed(self) -> None:
        """Since when fewer requests than promised have kept their promises. Too few to say is no change."""
        share, _ = self._attained(self.now - FELT_SECONDS)
        if share is None:
            return
        began = self.memory.missed_since
        missed = share < self.objectives.share
        self.memory = replace(self.memory, missed_since=(self.now if began is None else began) if missed else None)

    def tune(self) -> None:
        """Judge the trial in flight; when none is, let the first rule that wants something start one."""
        situation = self.situation()
        if situation is None or self._behind():
            return
        if self.memory.trial is not None:
            self._judge(self.memory.trial, situation)
        if self.memory.trial is not None or self.decisions:
            return
        self.found = next((move for rule in HOT if (move := rule(situation)) is not None), None)
        if self.found is None or self.settings.mode is not Mode.AUTO:
            return
        if self.now - self.memory.last_hot_move >= self.settings.pace.cool_down_seconds:
            self._try(self.found, situation)
            self.found = None

    def scale(self) -> None:
        """Choose the replica count, where it is ours. Where it may only be recommended it stays as it is."""
        if self.settings.scaling is None:
            return
        self.memory = with_outcomes(self.memory, self.observation, now=self.now)
        chosen = wanted_replicas(
            self.memory, self.observation, self.settings, self.objectives, self.situation(), now=self.now
        )
        if self.settings.mode is Mode.AUTO:
            self.memory = replace(self.memory, scaling=chosen.memory)
            if chosen.move is not None:
                self.memory = replace(self.memory, moved_at={**self.memory.moved_at, "replicas": self.now})
                self._record(chosen.move)
        else:
            seen = chosen.memory
            looked = replace(self.memory.scaling, wanted=seen.wanted, began_at=seen.began_at, meant=seen.meant)
            self.memory = replace(self.memory, scaling=looked)
            self.found = self.found or chosen.move
        self.replicas = self.memory.scaling.desired

    def say_what_only_a_restart_helps(self) -> None:
        """Keep the standing recommendation true: what may not be done, or what only the owner can do."""
        situation = self.situation()
        move = self.found or restart_move(self.memory, self.observation, self.settings, situation, now=self.now)
        standing = self.memory.recommendation
        if move is None:
            self.memory = replace(self.memory, recommendation=None)
        elif standing is None or self._is_another(move, standing):
            decision = self._record(move)
            self.memory = replace(self.memory, recommendation=decision)

    def outcome(self) -> Outcome:
        """What is to be done. Which engines get values above the start ones is remembered before they do."""
        patches = self._patches()
        raised = engines_raised(self.memory, self.observation, patches)
        return Outcome(
            memory=replace(self.memory, raised=raised),
            metrics_available=metrics_condition(self.observation),
            tuning_active=self._tuning_condition(),
            patches=patches,
            replicas=self.replicas,
            decisions=tuple(self.decisions),
            objectives=self.objectives,
        )

    def _is_another(self, move: Move, standing: Decision) -> bool:
        """Whether it says something new. How many replicas would be needed moves all the time: told once a while."""
        if (standing.move.target, standing.reason) != (move.target, move.reason):
            return True
        is_old = self.now - standing.at >= FELT_SECONDS
        return isinstance(move.target, ReplicaCount) and standing.move.after != move.after and is_old

    # --- parts ----------------------------------------------------------------------------------------------------

    def situation(self) -> Situation | None:
        """What the rules see, as long as nothing more is remembered than when it was last asked for."""
        if self._seen is None or self._seen[0] is not self.memory:
            self._seen = (self.memory, self._situation())
        return self._seen[1]

    def _situation(self) -> Situation | None:
        """What the rules see; None where nothing can be believed, or nothing was measured since the last change."""
        trusted = self.observation.trusted
        pace = self.settings.pace
        settled = self.memory.last_hot_move + SETTLE_SECONDS
        window = self._window(settled if math.isfinite(settled) else None)
        model = self.memory.model
        rate = self.memory.demand.rate(pace.window_seconds)
        if not trusted or window is None or model is None or rate is None:
            return None
        ledgers = [seen.ledger for seen in trusted if seen.ledger is not None]
        applied = self.memory.applied if self.settings.mode is Mode.AUTO else {}
        since_move = max(self.now - FELT_SECONDS, self.memory.last_hot_move)
        return Situation(
            now=self.now,
            settings=self.settings,
            memory=self.memory,
            observation=self.observation,
            window=window,
            ranges=ranges_of(
                self.observation, self.settings, applied=applied, pins=standing_pins(self.memory, self.settings)
            ),
            ledger=min(ledgers, key=lambda ledger: ledger.kv_tokens),
            objectives=self.objectives,
            cost=model.cost,
            foresight=self.memory.foresight,
            rate=rate,
            replicas=len(self.observation.ready),
            coming=sum(1 for seen in self.observation.coming if seen.phase is Phase.STARTING),
            attained=self._attained(since_move)[0],
        )

    def _window(self, settled: float | None) -> Interval | None:
        if settled not in self._windows:
            self._windows[settled] = self.observation.total(seconds=self.settings.pace.window_seconds, since=settled)
        return self._windows[settled]

    def _attained(self, start: float) -> tuple[float | None, int]:
        """The share of those that came since then and kept their promises, and how many have ended."""
        if start not in self._shares:
            least = self.settings.pace.least_requests
            share = attained(self.memory, self.objectives, now=self.now, start=start, least=least)
            self._shares[start] = share, len(since(self.memory.felt, start))
        return self._shares[start]

    def _judge(self, trial: Trial, situation: Situation) -> None:
        start = trial.at + SETTLE_SECONDS
        complete = max(start, self.observation.complete_since(self.now) + SETTLE_SECONDS)
        share, count = self._attained(complete)
        is_coming = situation.coming > 0  # and then what is felt is a matter of how many serve
        verdict = judged(
            trial,
            situation,
            attained=None if is_coming else share,
            requests=count,
            since=self.observation.total(since=start),
            is_awaited=is_coming or (complete > start and share is None),
        )
        if verdict.verdict is Verdict.KEPT:
            self.memory = replace(self.memory.with_outcome(trial.decision, f"kept: {verdict.seen}"), trial=None)
        elif verdict.verdict is Verdict.BAD:
            pin = Pin(trial.knob, trial.after, trial.before, self.now + self.settings.pace.pin_seconds)
            self.memory = replace(
                self.memory.with_outcome(trial.decision, f"undone: {verdict.seen}"),
                trial=None,
                pins=(*self.memory.pins, pin),
            )
            self._apply_safely(Move(Reason.MADE_WORSE, trial.knob, trial.after, trial.before), said=verdict.seen)

    def _try(self, move: Move, situation: Situation) -> None:
        assert isinstance(move.target, Knob)
        assert move.before is not None
        assert move.after is not None
        share, _ = self._attained(self.now - FELT_SECONDS)
        decision = self._record(move)
        trial = Trial(
            decision=decision.id,
            knob=move.target,
            before=move.before,
            after=move.after,
            at=self.now,
            expected=move.expected,
            attained=share,
            recomputed_share=situation.window.recomputed_share,
            rate=situation.rate,
        )
        self.memory = replace(self.memory.with_value(move.target, move.after, self.now), trial=trial)

    def _apply_safely(self, move: Move, *, said: str = "") -> None:
        """Do it now; nothing is tried or judged."""
        assert isinstance(move.target, Knob)
        assert move.after is not None
        trial = self.memory.trial
        if trial is not None and trial.knob is move.target:
            self.memory = replace(self.memory, trial=None)
        self.memory = self.memory.with_value(move.target, move.after, self.now)
        self._record(move, said=said)

    def _record(self, move: Move, *, said: str = "") -> Decision:
        sentence = sentence_of(move, self.settings.mode)
        decision = Decision(
            decision_id(self.now, move), self.now, move, f"{sentence[:-1]} ({said})." if said else sentence
        )
        self.decisions.append(decision)
        self.memory = self.memory.with_decision(decision)
        return decision

    def _behind(self) -> list[str]:
        """Believed replicas that do not run the applied values yet: what they measure is of the old ones."""
        return [
            seen.replica
            for seen in self.observation.trusted
            if seen.config is not None and possible(seen.config, self.memory.applied)
        ]

    def _patches(self) -> dict[str, Values]:
        """One patch for each engine that answers and runs other values than the applied ones; ready or not."""
        if self.settings.mode is not Mode.AUTO:
            return {}
        found = (
            (seen.replica, possible(seen.config, self.memory.applied))
            for seen in self.observation.replicas
            if seen.config is not None
        )
        return {replica: fields for replica, fields in found if fields}

    def _tuning_condition(self) -> Condition:
        if not self.observation.trusted:
            return Condition(
                False, Reason.METRICS_UNAVAILABLE, "every knob is held: no replica's numbers can be believed"
            )
        behind = self._behind()
        if behind:
            return Condition(False, Reason.NOT_YET_APPLIED, f"{', '.join(behind)}: does not run the applied values yet")
        standing = self.memory.recommendation
        if standing is not None and isinstance(standing.move.target, ReplicaCount | Restart):
            return Condition(True, standing.reason, "see the recommendation")
        if is_budget_spent(self.memory, self.settings):
            said = f"engines crashed {len(self.memory.crashes)} times above the start values: no knob is raised above "
            return Condition(True, Reason.CRASH_BUDGET_SPENT, said + "its start until spec.engine has another one")
        if self.settings.mode is Mode.RECOMMEND:
            return Condition(True, Reason.RECOMMENDING, "recommendations are written to status; nothing is changed")
        return Condition(True, Reason.TUNING, "knobs move within their bounds where that keeps more promises")
