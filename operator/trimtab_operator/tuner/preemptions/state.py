"""What the tuner remembers between ticks, and what its owner asks of it.

`TunerState` has two parts: what must outlive the operator (applied values, remembered bad values, the change under
watch, history) and goes to the ConfigMap NAME-tuning as JSON, and the window of samples, which is rebuilt within a
minute and is never written. So an idle resource causes no write.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from trimtab_operator.tuner.preemptions.observation import Knob, Value, Values, Window

STATE_VERSION = 1  # of the JSON in the ConfigMap; another version is not read but rebuilt
MAX_HISTORY = 10  # entries in status.tuning.history


class Mode(StrEnum):
    """`spec.tuning.mode`."""

    OFF = "Off"
    RECOMMEND = "Recommend"
    AUTO = "Auto"


class Reason(StrEnum):
    """Why a decision was taken; becomes the history's reason, the Event's reason and the metric's label."""

    KV_CACHE_TOO_SMALL = "KVCacheTooSmall"  # preemptions, and the device has headroom
    TOO_MANY_SEQS = "TooManySequences"  # preemptions, no headroom: fewer requests at once
    TOO_MANY_TOKENS = "TooManyBatchedTokens"  # the same, and the sequences are at their floor: smaller steps
    SATURATED = "Saturated"  # preemptions, and every knob is at its bound: only replicas help
    MADE_WORSE = "RolledBack"  # the last change raised the preemption rate at comparable load
    RESTARTED_AFTER = "RolledBackAfterRestart"  # an engine restarted shortly after its memory was raised
    BOUNDS_CHANGED = "BoundsChanged"  # the owner's bounds no longer hold the applied value


@dataclass(frozen=True, slots=True)
class Bounds:
    """`spec.tuning.bounds.X`. A missing end is the engine's own; minimum = maximum pins the knob."""

    minimum: Value | None = None
    maximum: Value | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the tuner may move. Seconds, unless the name says otherwise."""

    window_seconds: float = 60.0  # evidence older than this says nothing about the load now
    max_age_seconds: float = 30.0  # two ticks of 15 s: an older sample is stale
    settle_seconds: float = 5.0  # samples this soon after a change still show the old configuration
    cool_down_seconds: Mapping[Knob, float] = field(
        default_factory=lambda: {
            Knob.GPU_MEMORY_UTILIZATION: 15.0,  # growing is quick and cheap
            Knob.MAX_NUM_SEQS: 30.0,  # running requests drain down first
            Knob.MAX_NUM_BATCHED_TOKENS: 30.0,
        }
    )
    judge_seconds: float = 20.0  # a change is judged on this much evidence, at least
    watch_seconds: float = 120.0  # and no longer than this after it was made
    min_preemptions: int = 3  # fewer in a window is chance, not pressure
    min_intervals: int = 2  # a single burst is not sustained …
    min_evidence_seconds: float = 8.0  # … however often one looks: ticks may follow each other closely
    bad_value_seconds: float = 1800.0  # how long a value that made things worse is avoided
    recommendation_seconds: float = 3600.0  # how long an unmet recommendation stands without new preemptions
    revise_seconds: float = 300.0  # a standing recommendation is not revised more often

    @classmethod
    def for_tick(cls, tick_seconds: float) -> Pace:
        """The pace for an operator that looks every so many seconds: a window holds five looks at least."""
        usual = cls()
        return cls(
            window_seconds=max(usual.window_seconds, 5 * tick_seconds),
            max_age_seconds=max(usual.max_age_seconds, 2 * tick_seconds),
            watch_seconds=max(usual.watch_seconds, 6 * tick_seconds),
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """What the owner asks: mode, bounds, the spec's start values (a knob left out starts at the engine's default)."""

    mode: Mode
    bounds: Mapping[Knob, Bounds] = field(default_factory=dict)
    starts: Values = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)


@dataclass(frozen=True, slots=True)
class Decision:
    """One move, complete with its grounds. `knob` is None when the finding is that no knob helps."""

    id: str
    at: float
    reason: Reason
    knob: Knob | None
    before: Value | None
    after: Value | None
    sentence: str
    evidence: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "at": self.at,
            "reason": self.reason.value,
            "knob": self.knob.value if self.knob else None,
            "from": self.before,
            "to": self.after,
            "sentence": self.sentence,
            "evidence": dict(self.evidence),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Decision:
        """Raises KeyError, TypeError or ValueError when the entry is not one of ours."""
        return cls(
            id=str(data["id"]),
            at=float(data["at"]),
            reason=Reason(data["reason"]),
            knob=Knob(data["knob"]) if data["knob"] else None,
            before=data["from"],
            after=data["to"],
            sentence=str(data["sentence"]),
            evidence={str(k): v for k, v in data.get("evidence", {}).items() if _is_number(v)},
        )


@dataclass(frozen=True, slots=True)
class BadValue:
    """A change that made things worse: until `until` the knob is not moved past `limit`, where it had been, that way.

    Not only `value` itself is avoided: trying ever closer ones would be an oscillation with a new name.
    """

    knob: Knob
    value: Value
    limit: Value
    until: float

    @property
    def is_upper(self) -> bool:
        """Whether the value had been reached by raising."""
        return self.value > self.limit


@dataclass(frozen=True, slots=True)
class Watch:
    """The last change, until it has been judged: what it was and how things stood before it."""

    knob: Knob
    before: Value
    after: Value
    at: float
    preemptions: int
    seconds: float
    generated_tokens: float
    demand: float


@dataclass(frozen=True, slots=True)
class TunerState:
    """Everything the tuner remembers about one resource."""

    applied: Values = field(default_factory=dict)
    starts: Values = field(default_factory=dict)  # the start values that `applied` was reached from
    changed_at: Mapping[Knob, float] = field(default_factory=dict)
    watch: Watch | None = None
    bad_values: tuple[BadValue, ...] = ()
    recommendation: Decision | None = None
    history: tuple[Decision, ...] = ()  # newest last
    windows: Mapping[str, Window] = field(default_factory=dict)  # by group; never written

    def with_decision(self, decision: Decision) -> TunerState:
        return replace(self, history=(*self.history, decision)[-MAX_HISTORY:])

    def to_json(self) -> str:
        """The lasting part, with sorted keys: equal states give equal text."""
        return json.dumps(
            {
                "version": STATE_VERSION,
                "applied": {k.value: v for k, v in self.applied.items()},
                "starts": {k.value: v for k, v in self.starts.items()},
                "changedAt": {k.value: v for k, v in self.changed_at.items()},
                "watch": _plain(self.watch),
                "badValues": [_plain(bad) for bad in self.bad_values],
                "recommendation": self.recommendation.to_json() if self.recommendation else None,
                "history": [entry.to_json() for entry in self.history],
            },
            sort_keys=True,
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> TunerState | None:
        """Read what `to_json` wrote; None when it was damaged or another version wrote it (then `rebuilt`)."""
        try:
            data = json.loads(text)
            if data["version"] != STATE_VERSION:
                return None
            watch = data["watch"]
            return cls(
                applied=_values(data["applied"]),
                starts=_values(data["starts"]),
                changed_at={Knob(k): float(v) for k, v in data["changedAt"].items()},
                watch=Watch(**{**watch, "knob": Knob(watch["knob"])}) if watch else None,
                bad_values=tuple(BadValue(**{**bad, "knob": Knob(bad["knob"])}) for bad in data["badValues"]),
                recommendation=Decision.from_json(data["recommendation"]) if data["recommendation"] else None,
                history=tuple(Decision.from_json(entry) for entry in data["history"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    @classmethod
    def rebuilt(cls, applied: Mapping[str, Any], *, starts: Values) -> TunerState:
        """The state after its ConfigMap was lost: `status.tuning.applied` is kept, unknown entries are dropped."""
        known = {str(knob.value) for knob in Knob}
        return cls(
            applied=_values({k: v for k, v in applied.items() if k in known and _is_number(v)}),
            starts=dict(starts),
        )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _values(data: Mapping[str, Any]) -> dict[Knob, Value]:
    for value in data.values():
        if not _is_number(value):
            raise ValueError(f"{value!r} is not a number")
    return {Knob(name): value for name, value in data.items()}


def _plain(entry: Watch | BadValue | None) -> dict[str, Any] | None:
    if entry is None:
        return None
    return {name: getattr(entry, name) for name in entry.__slots__}
