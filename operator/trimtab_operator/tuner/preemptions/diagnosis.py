"""From readings to a diagnosis: which group is under pressure, and how far each knob could still move."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trimtab_operator.tuner.preemptions.observation import (
    KV_USED_AT_LEAST,
    EngineConfig,
    GroupReading,
    Knob,
    Pressure,
    Value,
    Values,
    Window,
    pressure,
)
from trimtab_operator.tuner.preemptions.state import BadValue, Bounds, Pace, Settings, Watch

WORSE_FACTOR = 1.5  # a change made things worse when preemptions grew by half for the same work …
WORSE_DEVIATIONS = 3.0  # … and by more than chance: three deviations of a Poisson count
COMPARABLE_DEMAND = 1.25  # loads within this factor of each other are comparable


@dataclass(frozen=True, slots=True)
class KnobRange:
    """Where a knob stands and how far it may go: bounds, envelope and remembered bad values together."""

    current: Value
    lowest: Value
    highest: Value
    is_live: bool

    @property
    def can_rise(self) -> float:
        return max(0.0, self.highest - self.current) if self.is_live else 0.0

    @property
    def can_fall(self) -> float:
        return max(0.0, self.current - self.lowest) if self.is_live else 0.0


@dataclass(frozen=True, slots=True)
class Situation:
    """What the rules decide on: the worst group's pressure and every knob's range."""

    worst: Pressure
    ranges: Mapping[Knob, KnobRange]
    max_model_len: int | None


def knob_ranges(
    configs: Iterable[EngineConfig], settings: Settings, *, current: Values, bad_values: Iterable[BadValue]
) -> dict[Knob, KnobRange]:
    """Intersect the owner's bounds with what every engine allows now, less what is remembered as bad."""
    engines = list(configs)
    bad = list(bad_values)
    ranges = {}
    for knob in Knob:
        fields = [engine.fields[knob] for engine in engines if knob in engine.fields]
        if knob not in current or len(fields) < len(engines):
            continue
        bounds = settings.bounds.get(knob, Bounds())
        lowest = max([f.minimum for f in fields] + ([] if bounds.minimum is None else [bounds.minimum]))
        highest = min([f.maximum for f in fields] + ([] if bounds.maximum is None else [bounds.maximum]))
        for entry in bad:
            if entry.knob is not knob:
                continue
            if entry.is_upper:
                highest = min(highest, entry.limit)
            else:
                lowest = max(lowest, entry.limit)
        ranges[knob] = KnobRange(
            current[knob], _typed(knob, lowest), _typed(knob, highest), all(f.live for f in fields)
        )
    return ranges


def _typed(knob: Knob, value: float) -> Value:
    return round(value, 4) if knob is Knob.GPU_MEMORY_UTILIZATION else int(value)


def pressures(readings: Iterable[GroupReading], windows: Mapping[str, Window], *, since: float) -> list[Pressure]:
    """The pressure on each ready group since `since`, where there are samples enough to tell."""
    found = []
    for reading in readings:
        window = windows.get(reading.group)
        if reading.ready and window is not None:
            summary = pressure(reading.group, window.since(since))
            if summary is not None:
                found.append(summary)
    return found


def worst_of(found: Iterable[Pressure]) -> Pressure | None:
    """The group that preempts most; equal ones by demand, then by name, so that the choice is stable."""
    return max(found, key=lambda p: (p.preemption_rate, p.demand, p.group), default=None)


def is_pressed(seen: Pressure, pace: Pace) -> bool:
    """Whether preemptions are sustained, recent, and come from a KV cache that was really used."""
    return (
        seen.preemptions >= pace.min_preemptions
        and seen.intervals_with_preemption >= pace.min_intervals
        and seen.seconds >= pace.min_evidence_seconds
        and seen.is_recent
        and seen.kv_usage_peak >= KV_USED_AT_LEAST
    )


def made_worse(watch: Watch, seen: Pressure) -> bool:
    """Whether preemptions are clearly more frequent than before the change, at comparable load.

    Counted per generated token: a change that lets more requests run makes more of everything in a second.
    """
    if not is_comparable(watch, seen) or watch.generated_tokens <= 0:
        return False
    expected = watch.preemptions * seen.generated_tokens / watch.generated_tokens
    return seen.preemptions > WORSE_FACTOR * expected + WORSE_DEVIATIONS * math.sqrt(max(expected, 1.0))


def is_comparable(watch: Watch, seen: Pressure) -> bool:
    low, high = sorted((watch.demand, seen.demand))
    return low > 0 and high <= COMPARABLE_DEMAND * low


def reported_values(readings: Iterable[GroupReading], *, prefer: str | None = None) -> dict[Knob, Value]:
    """What the ready engines say they run; where they differ, the one of group `prefer` or the first by name."""
    ready = sorted(
        (r for r in readings if r.ready and r.config is not None), key=lambda r: (r.group != prefer, r.group)
    )
    values: dict[Knob, Value] = {}
    for reading in ready:
        assert reading.config is not None
        for knob, value in reading.config.applied.items():
            values.setdefault(knob, value)
    return values
