"""JSON of the tuner's persistent state, for the ConfigMap NAME-tuning. Every entry is validated when it is read.

Equal states give equal text, so an idle resource causes no write: state that is learned within minutes is left out, and
so is the step-time model. Start-up times are stored only with `spec.scaling`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from trimtab_operator.tuner.evidence import Evidence, Record
from trimtab_operator.tuner.load import Forecast
from trimtab_operator.tuner.load.season import MOST_BUCKETS, Bucket, Season
from trimtab_operator.tuner.moves import Decision, Expectation, Measure, Move, Reason, ReplicaCount, Restart, Target
from trimtab_operator.tuner.parameters import Parameter, Value, Values, typed
from trimtab_operator.tuner.prediction import Candidate
from trimtab_operator.tuner.scaling.behavior import ScaleEvent
from trimtab_operator.tuner.scaling.control_law import ScalingState
from trimtab_operator.tuner.state import MAX_HISTORY, Pin, Trial, TunerState

STORED_VERSION = 4  # another version is not read; the state is rebuilt
MAX_TEXT = 400_000  # a ConfigMap holds 1 MiB
MAX_SENTENCE_CHARS = 2000
MAX_ENTRIES = 64
MAX_BLOCKS = 1 << 31


def to_json(state: TunerState) -> str:
    """Return the persistent state as JSON with sorted keys."""
    scaling = state.scaling
    return json.dumps(
        {
            "version": STORED_VERSION,
            "applied": _values_to_json(state.applied),
            "starts": _values_to_json(state.starts),
            "movedAt": dict(state.moved_at),
            "trial": None if state.trial is None else _trial_to_json(state.trial),
            "pins": [
                {
                    "parameter": p.parameter.value,
                    "value": p.value,
                    "limit": p.limit,
                    "until": p.until,
                    "forMix": p.is_for_mix,
                }
                for p in state.pins
            ],
            "crashes": list(state.crashes),
            "raised": dict(state.raised),
            "coldStarts": [round(seconds, 1) for seconds in state.cold_starts if scaling.desired is not None],
            "scaling": {
                "desired": scaling.desired,
                "events": [[event.at, event.change] for event in scaling.events[-MAX_ENTRIES:]],
                "began": scaling.began_at,
            },
            "evidence": [_record_to_json(record) for record in state.evidence.records],
            "forecast": None if state.forecast is None else _season_to_json(state.forecast.season),
            "recommendation": None if state.recommendation is None else decision_to_json(state.recommendation),
            "history": [decision_to_json(entry) for entry in state.history],
        },
        sort_keys=True,
        separators=(",", ":"),
    )


def from_json(text: str) -> TunerState | None:
    """Read the output of `to_json`; None if it is damaged, has a non-finite number, or another version."""
    if len(text) > MAX_TEXT:
        return None
    try:
        data = json.loads(text, parse_constant=_reject_constant)
        if data["version"] != STORED_VERSION:
            return None
        scaling = data["scaling"]
        return TunerState(
            applied=_values(data["applied"]),
            starts=_values(data["starts"]),
            moved_at={str(name): _number(at) for name, at in data["movedAt"].items()},
            trial=None if data["trial"] is None else _trial(data["trial"]),
            pins=tuple(_pin(entry) for entry in data["pins"][:MAX_ENTRIES]),
            crashes=tuple(_number(at) for at in data["crashes"][:MAX_ENTRIES]),
            raised={str(name): _count(ends) for name, ends in data.get("raised", {}).items()},
            cold_starts=tuple(_number(seconds) for seconds in data.get("coldStarts", [])[:MAX_ENTRIES]),
            scaling=ScalingState(
                desired=_optional_count(scaling["desired"]),
                events=tuple(ScaleEvent(_number(at), int(_number(change))) for at, change in scaling["events"]),
                began_at=_optional(scaling["began"]),
            ),
            evidence=Evidence(tuple(_record(entry) for entry in data["evidence"][:MAX_ENTRIES])),
            forecast=None if data.get("forecast") is None else Forecast(_season(data["forecast"])),
            recommendation=None if data["recommendation"] is None else decision_from_json(data["recommendation"]),
            history=tuple(decision_from_json(entry) for entry in data["history"][-MAX_HISTORY:]),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def rebuild_state(applied: Mapping[str, Any], *, starts: Values) -> TunerState:
    """Return the state after its ConfigMap was lost: valid entries of `status.tuning.applied` are kept."""
    known: dict[Parameter, Value] = {}
    for name, value in applied.items():
        try:
            known[Parameter(name)] = typed(Parameter(name), _number(value))
        except ValueError:
            continue
    return TunerState(applied=known, starts=dict(starts))


def decision_to_json(decision: Decision) -> dict[str, Any]:
    """Return one decision as in history and status."""
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
        "expected": [_expectation_to_json(entry) for entry in move.expected],
        "outcome": decision.outcome,
    }


def decision_from_json(data: Mapping[str, Any]) -> Decision:
    """Read one decision. Raise KeyError, TypeError or ValueError if the entry is invalid."""
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
        str(data["sentence"])[:MAX_SENTENCE_CHARS],
        str(data["outcome"])[:MAX_SENTENCE_CHARS],
    )


def target_named(name: str) -> Target:
    """Return the target with this name in history and status."""
    if name == ReplicaCount().value:
        return ReplicaCount()
    return Parameter(name) if name in set(Parameter) else Restart(name[:100])


# --- parts ------------------------------------------------------------------------------------------------------------


def _values_to_json(values: Values) -> dict[str, Value]:
    return {parameter.value: value for parameter, value in values.items()}


def _expectation_to_json(entry: Expectation) -> dict[str, Any]:
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


def _trial_to_json(trial: Trial) -> dict[str, Any]:
    return {
        "decision": trial.decision,
        "parameter": trial.parameter.value,
        "before": trial.before,
        "after": trial.after,
        "at": trial.at,
        "expected": [_expectation_to_json(entry) for entry in trial.expected],
        "attained": trial.attained,
        "recomputedShare": trial.recomputed_share,
        "rate": trial.rate,
    }


def _trial(data: Mapping[str, Any]) -> Trial:
    return Trial(
        decision=str(data["decision"])[:40],
        parameter=Parameter(data["parameter"]),
        before=_number(data["before"]),
        after=_number(data["after"]),
        at=_number(data["at"]),
        expected=tuple(_expectation(entry) for entry in data["expected"]),
        attained=_optional(data["attained"]),
        recomputed_share=_number(data["recomputedShare"]),
        rate=_number(data["rate"]),
    )


def _record_to_json(record: Record) -> dict[str, Any]:
    return {
        "at": record.at,
        "candidate": list(astuple(record.candidate)),
        "rate": record.rate,
        "work": record.work,
        "context": record.context,
        "attained": record.is_attained,
    }


def _record(data: Mapping[str, Any]) -> Record:
    replicas, slots, budget, blocks, size = (_count(value, MAX_BLOCKS) for value in data["candidate"][:-1])
    at, rate, work, context = (_number(data[name]) for name in ("at", "rate", "work", "context"))
    if min(replicas, rate, work, context) <= 0:
        raise ValueError("a record without load")
    candidate = Candidate(replicas, slots, budget, blocks, size, _number(data["candidate"][-1]))
    return Record(at, candidate, rate, work, context, data["attained"] is True)


def _pin(data: Mapping[str, Any]) -> Pin:
    value, limit, until = (_number(data[name]) for name in ("value", "limit", "until"))
    return Pin(Parameter(data["parameter"]), value, limit, until, data.get("forMix") is True)


def _season_to_json(season: Season) -> dict[str, Any]:
    """Return the completed buckets. The current bucket is left out, so that the state changes only once per bucket."""
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
        raise ValueError("the buckets do not form a period")
    return Season(
        period_seconds=seconds,
        rates=tuple(None if rate is None else _rate(rate) for rate in rates),
        periods=tuple(_count(number) for number in periods),
        fresh=tuple(Bucket(int(_number(number)), _rate(rate)) for number, rate in fresh),
    )


def _rate(value: Any) -> float:
    number = _number(value)
    if number < 0:
        raise ValueError(f"{value!r} is not a rate")
    return float(number)


def _values(data: Mapping[str, Any]) -> dict[Parameter, Value]:
    return {Parameter(name): typed(Parameter(name), _number(value)) for name, value in data.items()}


def _number(value: Any) -> Value:
    """Return a finite number; integers stay integers."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    return value


def _optional(value: Any) -> float | None:
    return None if value is None else _number(value)


def _count(value: Any, most: int = 100_000) -> int:
    number = _number(value)
    if not isinstance(number, int) or not 0 <= number <= most:
        raise ValueError(f"{value!r} is not a count")
    return number


def _optional_count(value: Any) -> int | None:
    return None if value is None else _count(value)


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")
