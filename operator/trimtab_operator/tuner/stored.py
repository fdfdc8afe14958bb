"""The lasting part of the memory as JSON: for the ConfigMap NAME-tuning, checked entry by entry when it is read.

Equal memories give equal text, so an idle resource causes no write: what is learned anew within minutes is left out,
and the model of step times is rounded. How long replicas take to start is written down only where replicas are scaled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from trimtab_operator.tuner.knobs import Knob, Value, Values, typed
from trimtab_operator.tuner.load import Forecast
from trimtab_operator.tuner.load.season import MOST_BUCKETS, Bucket, Season
from trimtab_operator.tuner.moves import Decision, Expectation, Measure, Move, Reason, ReplicaCount, Restart, Target
from trimtab_operator.tuner.scaling.behavior import ScaleEvent
from trimtab_operator.tuner.scaling.law import ScalingMemory
from trimtab_operator.tuner.state import MAX_HISTORY, Memory, Pin, Trial

STORED_VERSION = 2  # another version is not read but rebuilt
MAX_TEXT = 400_000  # a ConfigMap holds 1 MiB
MAX_WORDS = 2000  # of a sentence
MAX_ENTRIES = 64


def to_json(memory: Memory) -> str:
    """The lasting part, with sorted keys."""
    scaling = memory.scaling
    return json.dumps(
        {
            "version": STORED_VERSION,
            "applied": _plain_values(memory.applied),
            "starts": _plain_values(memory.starts),
            "movedAt": dict(memory.moved_at),
            "trial": None if memory.trial is None else _plain_trial(memory.trial),
            "pins": [{"knob": p.knob.value, "value": p.value, "limit": p.limit, "until": p.until} for p in memory.pins],
            "crashes": list(memory.crashes),
            "raised": dict(memory.raised),
            "coldStarts": [round(seconds, 1) for seconds in memory.cold_starts if scaling.desired is not None],
            "scaling": {
                "desired": scaling.desired,
                "events": [[event.at, event.change] for event in scaling.events[-MAX_ENTRIES:]],
                "hold": scaling.hold_seconds,
                "lastIn": scaling.last_in_at,
                "lastInFrom": scaling.last_in_from,
                "regretted": scaling.regretted_at,
                "regrettedCount": scaling.regretted,
                "began": scaling.began_at,
                "burst": scaling.burst_at,
                "meant": scaling.meant,
            },
            "forecast": None if memory.forecast is None else _plain_season(memory.forecast.season),
            "recommendation": None if memory.recommendation is None else decision_to_json(memory.recommendation),
            "history": [decision_to_json(entry) for entry in memory.history],
        },
        sort_keys=True,
        separators=(",", ":"),
    )


def from_json(text: str) -> Memory | None:
    """Read what `to_json` wrote; None when it was damaged, is not a number somewhere, or another version wrote it."""
    if len(text) > MAX_TEXT:
        return None
    try:
        data = json.loads(text, parse_constant=_refuse)
        if data["version"] != STORED_VERSION:
            return None
        scaling = data["scaling"]
        return Memory(
            applied=_values(data["applied"]),
            starts=_values(data["starts"]),
            moved_at={str(name): _number(at) for name, at in data["movedAt"].items()},
            trial=None if data["trial"] is None else _trial(data["trial"]),
            pins=tuple(_pin(entry) for entry in data["pins"][:MAX_ENTRIES]),
            crashes=tuple(_number(at) for at in data["crashes"][:MAX_ENTRIES]),
            raised={str(name): _count(ends) for name, ends in data.get("raised", {}).items()},
            cold_starts=tuple(_number(seconds) for seconds in data.get("coldStarts", [])[:MAX_ENTRIES]),
            scaling=ScalingMemory(
                desired=_optional_count(scaling["desired"]),
                events=tuple(ScaleEvent(_number(at), int(_number(change))) for at, change in scaling["events"]),
                hold_seconds=_number(scaling["hold"]),
                last_in_at=_optional(scaling["lastIn"]),
                last_in_from=_optional_count(scaling.get("lastInFrom")),
                regretted_at=_optional(scaling["regretted"]),
                regretted=_optional_count(scaling.get("regrettedCount")),
                began_at=_optional(scaling["began"]),
                burst_at=_optional(scaling.get("burst")),
                meant=_optional_count(scaling.get("meant")),
            ),
            forecast=None if data.get("forecast") is None else Forecast(_season(data["forecast"])),
            recommendation=None if data["recommendation"] is None else decision_from_json(data["recommendation"]),
            history=tuple(decision_from_json(entry) for entry in data["history"][-MAX_HISTORY:]),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def rebuilt(applied: Mapping[str, Any], *, starts: Values) -> Memory:
    """The memory after its ConfigMap was lost: `status.tuning.applied` is kept, entries that are no values are not."""
    known: dict[Knob, Value] = {}
    for name, value in applied.items():
        try:
            known[Knob(name)] = typed(Knob(name), _number(value))
        except ValueError:
            continue
    return Memory(applied=known, starts=dict(starts))


def decision_to_json(decision: Decision) -> dict[str, Any]:
    """One decision, as history and status have it."""
    move = decision.move
    return {
        "id": decision.id,
        "at": decision.at,
        "reason": move.reason.value,
        "target": move.target.value,
        "from": move.before,
        "to": move.after,
        "sentence": decision.sentence,
        "evidence": dict(move.evidence),
        "expected": [_plain_expectation(entry) for entry in move.expected],
        "outcome": decision.outcome,
    }


def decision_from_json(data: Mapping[str, Any]) -> Decision:
    """Raises KeyError, TypeError or ValueError when the entry is not one of ours."""
    move = Move(
        Reason(data["reason"]),
        target_named(str(data["target"])),
        None if data["from"] is None else _number(data["from"]),
        None if data["to"] is None else _number(data["to"]),
        {str(name): _number(value) for name, value in data["evidence"].items()},
        tuple(_expectation(entry) for entry in data["expected"]),
    )
    return Decision(
        str(data["id"])[:40],
        _number(data["at"]),
        move,
        str(data["sentence"])[:MAX_WORDS],
        str(data["outcome"])[:MAX_WORDS],
    )


def target_named(name: str) -> Target:
    """What has this name in history and status."""
    if name == ReplicaCount().value:
        return ReplicaCount()
    return Knob(name) if name in set(Knob) else Restart(name[:100])


# --- parts ------------------------------------------------------------------------------------------------------------


def _plain_values(values: Values) -> dict[str, Value]:
    return {knob.value: value for knob, value in values.items()}


def _plain_expectation(entry: Expectation) -> dict[str, Any]:
    high = entry.high if math.isfinite(entry.high) else None
    return {
        "measure": entry.measure.value,
        "before": entry.before,
        "after": entry.after,
        "low": entry.low,
        "high": high,
    }


def _expectation(data: Mapping[str, Any]) -> Expectation:
    high = math.inf if data["high"] is None else _number(data["high"])
    before, after, low = (_number(data[name]) for name in ("before", "after", "low"))
    return Expectation(Measure(data["measure"]), before, after, low, high)


def _plain_trial(trial: Trial) -> dict[str, Any]:
    return {
        "decision": trial.decision,
        "knob": trial.knob.value,
        "before": trial.before,
        "after": trial.after,
        "at": trial.at,
        "expected": [_plain_expectation(entry) for entry in trial.expected],
        "attained": trial.attained,
        "recomputedShare": trial.recomputed_share,
        "rate": trial.rate,
    }


def _trial(data: Mapping[str, Any]) -> Trial:
    return Trial(
        decision=str(data["decision"])[:40],
        knob=Knob(data["knob"]),
        before=_number(data["before"]),
        after=_number(data["after"]),
        at=_number(data["at"]),
        expected=tuple(_expectation(entry) for entry in data["expected"]),
        attained=_optional(data["attained"]),
        recomputed_share=_number(data["recomputedShare"]),
        rate=_number(data["rate"]),
    )


def _pin(data: Mapping[str, Any]) -> Pin:
    return Pin(Knob(data["knob"]), _number(data["value"]), _number(data["limit"]), _number(data["until"]))


def _plain_season(season: Season) -> dict[str, Any]:
    """What has ended of it: the bucket that is being filled is left out, so that it is written once a bucket."""
    return {
        "period": season.period_seconds,
        "rates": list(season.rates),
        "periods": list(season.periods),
        "fresh": [[bucket.number, bucket.rate] for bucket in season.fresh],
    }


def _season(data: Mapping[str, Any]) -> Season:
    rates, periods, count = data["rates"], data["periods"], len(data["rates"])
    seconds, fresh = _number(data["period"]), data["fresh"]
    if not (0 < count <= MOST_BUCKETS and len(periods) == count and len(fresh) <= count and seconds > 0):
        raise ValueError("these are no buckets of a period")
    return Season(
        period_seconds=seconds,
        rates=tuple(None if rate is None else _rate(rate) for rate in rates),
        periods=tuple(_count(number) for number in periods),
        fresh=tuple(Bucket(int(_number(number)), _rate(rate)) for number, rate in fresh),
    )


def _rate(value: Any) -> float:
    number = _number(value)
    if number < 0:
        raise ValueError(f"{value!r} is no rate")
    return float(number)


def _values(data: Mapping[str, Any]) -> dict[Knob, Value]:
    return {Knob(name): typed(Knob(name), _number(value)) for name, value in data.items()}


def _number(value: Any) -> Value:
    """A finite number, whole ones as they are."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return value


def _optional(value: Any) -> float | None:
    return None if value is None else _number(value)


def _count(value: Any) -> int:
    number = _number(value)
    if not isinstance(number, int) or not 0 <= number <= 100_000:
        raise ValueError(f"{value!r} is no count")
    return number


def _optional_count(value: Any) -> int | None:
    return None if value is None else _count(value)


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no number")
