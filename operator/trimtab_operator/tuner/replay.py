"""Deciding again over a recording, and what of that differs from what was decided then. Pure.

A recording does not answer: what is decided now changes nothing of what was seen next. So after each decision the
memory is set to what the engines really ran. What is told is what this law would have done at each moment of what
happened, not what would have happened then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from trimtab_operator.tuner.decide import Outcome, decide
from trimtab_operator.tuner.knobs import Knob, Value, is_same
from trimtab_operator.tuner.learning import cold_start
from trimtab_operator.tuner.moves import Decision, ReplicaCount
from trimtab_operator.tuner.samples import Look, Phase
from trimtab_operator.tuner.samples.recorded import Tick
from trimtab_operator.tuner.settings import Settings
from trimtab_operator.tuner.state import Memory

REPLICAS = ReplicaCount().value
START_SECONDS = 300.0  # within which a replica that was asked for mostly serves
FOLLOWED_WITHIN = 4  # ticks: a decision that the engines of the recording do not run by then was not made then


@dataclass(frozen=True, slots=True)
class Made:
    """One decision: what was moved when, from what to what. `until`: how long it was wanted, where it was wanted again
    and again and nobody did it."""

    at: float
    target: str
    before: Value | None
    after: Value | None
    reason: str = ""
    sentence: str = ""
    until: float | None = None

    @property
    def direction(self) -> int:
        """Up, down, or neither."""
        if self.before is None or self.after is None:
            return 0
        return (self.after > self.before) - (self.after < self.before)


@dataclass(frozen=True, slots=True)
class Spell:
    """How long MetricsAvailable had one reason."""

    begin: float
    end: float
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of deciding again: what the recording shows to have been moved, what this law decided, and what it
    could believe."""

    ticks: int
    begin: float
    end: float
    replicas: int
    moved: tuple[Made, ...]
    decided: tuple[Made, ...]
    spells: tuple[Spell, ...]


class Verdict(StrEnum):
    """How a decision then and one now compare."""

    SAME = "same"
    OTHER_VALUE = "other value"  # the same knob the same way, to another value
    ONLY_THEN = "only then"
    ONLY_NOW = "only now"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the comparison."""

    verdict: Verdict
    then: Made | None
    now: Made | None

    @property
    def at(self) -> float:
        """When it was decided first."""
        return min(made.at for made in (self.then, self.now) if made is not None)


def replay(ticks: Sequence[Tick], settings: Settings) -> Replayed:
    """Decide at each tick, from nothing learned. Raises ValueError without ticks."""
    if not ticks:
        raise ValueError("the recording holds no moment")
    memory, runs, served = Memory(), dict[Knob, Value](), None
    moved: list[Made] = []
    decided: list[Made] = []
    spells: list[Spell] = []
    for tick in ticks:
        now_runs = _running(tick.looks)
        seen = _moves(tick.at, runs, now_runs)
        moved += seen
        memory = _as_it_was(memory, seen, now_runs, settings, tick.at)
        serve = sum(look.phase is Phase.READY for look in tick.looks)
        if served is not None and serve != served:
            moved.append(Made(tick.at, REPLICAS, served, serve))
        memory = _with_replicas(memory, serve, settings, tick.at, is_change=serve != served)
        served = serve
        runs = {**runs, **now_runs}
        outcome = decide(tick.looks, memory, settings, tick.at)
        memory = outcome.memory
        spells = _with_spell(spells, tick.at, outcome)
        for decision in outcome.decisions:
            decided = _with_decision(decided, decision, moved)
    most = max(sum(look.sample is not None for look in tick.looks) for tick in ticks)
    return Replayed(len(ticks), ticks[0].at, ticks[-1].at, most, tuple(moved), tuple(decided), tuple(spells))


def _running(looks: Iterable[Look]) -> dict[Knob, Value]:
    """What the first replica runs that can be read: they are changed alike."""
    config = next((look.config for look in looks if look.config is not None), None)
    return {} if config is None else dict(config.applied)


def _moves(at: float, before: Mapping[Knob, Value], after: Mapping[Knob, Value]) -> list[Made]:
    return [
        Made(at, knob.value, before[knob], value)
        for knob, value in after.items()
        if knob in before and not is_same(before[knob], value)
    ]


def _as_it_was(
    memory: Memory, moved: Sequence[Made], runs: Mapping[Knob, Value], settings: Settings, at: float
) -> Memory:
    """The memory of who decided what was really done: what was moved then is applied, what was not is given up."""
    for made in moved:
        knob, after = Knob(made.target), made.after
        assert after is not None
        if not is_same(memory.applied.get(knob, float("nan")), after):
            memory = replace(memory.with_value(knob, after, at), trial=None)
    patience = FOLLOWED_WITHIN * settings.pace.tick_seconds
    kept = {
        knob: value
        for knob, value in memory.applied.items()
        if knob not in runs or is_same(runs[knob], value) or at - memory.moved_at.get(knob.value, at) < patience
    }
    if kept.keys() == memory.applied.keys():
        return memory
    trial = memory.trial if memory.trial is not None and memory.trial.knob in kept else None
    return replace(memory, applied=kept, trial=trial)


def _with_replicas(memory: Memory, serve: int, settings: Settings, at: float, *, is_change: bool) -> Memory:
    """As many replicas are asked for as there were: at once when their number changes, and after the time that they
    take to start when it does not."""
    if settings.scaling is None:
        return memory
    asked_at = memory.moved_at.get(REPLICAS, -math.inf)
    patience = cold_start(memory, settings) + FOLLOWED_WITHIN * settings.pace.tick_seconds
    if not is_change and at - asked_at < patience:
        return memory
    return replace(memory, scaling=replace(memory.scaling, desired=serve))


def _with_spell(spells: list[Spell], at: float, outcome: Outcome) -> list[Spell]:
    found = outcome.metrics_available
    if spells and (spells[-1].reason, spells[-1].message) == (str(found.reason), found.message):
        return [*spells[:-1], replace(spells[-1], end=at)]
    return [*spells, Spell(at, at, str(found.reason), found.message)]


def _with_decision(decided: list[Made], decision: Decision, moved: Sequence[Made]) -> list[Made]:
    """Add a decision. One that was made before, and that nobody did meanwhile, is wanted still."""
    new = made_of(decision)
    for index in range(len(decided) - 1, -1, -1):
        old = decided[index]
        if (old.target, old.reason) != (new.target, new.reason):
            continue
        was_done = any(made.target == new.target and made.at > old.at for made in moved)
        if was_done or old.direction != new.direction:
            break
        return [*decided[:index], replace(old, until=new.at), *decided[index + 1 :]]
    return [*decided, new]


def made_of(decision: Decision) -> Made:
    """One decision of ours, in short."""
    move = decision.move
    return Made(decision.at, move.target.value, move.before, move.after, decision.reason.value, decision.sentence)


def compared(then: Iterable[Made], now: Iterable[Made], *, within: float) -> tuple[Row, ...]:
    """Lay what was decided then beside what is decided now. Two belong together that move the same thing the same way
    within so many seconds, the nearest first."""
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
    rows += [Row(Verdict.ONLY_THEN, made, None) for i, made in enumerate(left) if i not in partners]
    rows += [Row(Verdict.ONLY_NOW, None, made) for j, made in enumerate(right) if j not in partners.values()]
    return tuple(sorted(rows, key=lambda row: row.at))


def _most(then: Made, within: float) -> float:
    """How far apart they may be. What is only seen of replicas (no reason is known) is when they served, not when they
    were asked for."""
    return within + START_SECONDS if then.target == REPLICAS and not then.reason else within


def _apart(then: Made, now: Made) -> float:
    """Seconds between one decision and the time in which the other was wanted."""
    until = now.at if now.until is None else now.until
    return max(0.0, now.at - then.at, then.at - until)


def _verdict(then: Made, now: Made) -> Verdict:
    if then.after is None or now.after is None:
        return Verdict.SAME if then.after is now.after else Verdict.OTHER_VALUE
    return Verdict.SAME if is_same(then.after, now.after) else Verdict.OTHER_VALUE
