"""`status.tuning`: objectives, applied and recommended values, and the latest decisions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from trimtab_operator.planning.scheduling_policy import scheduling_status
from trimtab_operator.planning.status_inputs import StatusInputs
from trimtab_operator.resource.quantity import parse_seconds
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.resource.time import timestamp
from trimtab_operator.tuner.decide import TunerOutput
from trimtab_operator.tuner.load import Forecast
from trimtab_operator.tuner.moves import Decision
from trimtab_operator.tuner.objectives import Itl, Ttft
from trimtab_operator.tuner.parameters import Value

MAX_UNREPORTED_CHANGE = 1.25  # factor within which a relearned default is not updated in the status
SIGNIFICANT_DIGITS = 2  # significant digits of a default


def tuning_status(deployment: InferenceDeployment, inputs: StatusInputs) -> dict[str, Any]:
    """Return `status.tuning`; the previous one with the latest decisions while no replica runs."""
    before: Mapping[str, Any] = deployment.status.get("tuning") or {}
    if inputs.tuning is None and not inputs.history:
        return dict(before)
    if inputs.tuning is None:
        return {"mode": deployment.spec.tuning.mode, **before, "history": _history(inputs.history)}
    tuned = inputs.tuning
    tuning: dict[str, Any] = {"mode": deployment.spec.tuning.mode}
    if inputs.metrics_source is not None:
        tuning["source"] = inputs.metrics_source
    objectives = objectives_status(deployment, tuned, before.get("objectives"))
    if objectives is not None:
        tuning["objectives"] = objectives
    if tuned.state.applied:
        tuning["applied"] = {
            str(knob.value): format_number(value) for knob, value in sorted(tuned.state.applied.items())
        }
    if queue := scheduling_status(inputs.queue):
        tuning["schedulingPolicy"] = queue
    if tuned.recommendation is not None:
        tuning["recommendation"] = decision_status(tuned.recommendation)
    if tuned.state.forecast is not None:
        tuning["forecast"] = _forecast(tuned.state.forecast)
    if tuned.state.history:
        tuning["history"] = _history(tuned.state.history)
    return tuning


def _history(decisions: Iterable[Decision]) -> list[dict[str, Any]]:
    """Return the decisions, newest first."""
    return [decision_status(decision) for decision in reversed(tuple(decisions))]


def decision_status(decision: Decision) -> dict[str, Any]:
    """Return one decision as an entry of history or recommendation."""
    move = decision.move
    entry: dict[str, Any] = {
        "id": decision.id,
        "time": timestamp(datetime.fromtimestamp(decision.at, UTC)),
        "reason": decision.reason.value,
        "message": decision.sentence,
        "knob": move.target.value,
    }
    if move.before is not None:
        entry["from"] = format_number(move.before)
    if move.after is not None:
        entry["to"] = format_number(move.after)
    if decision.outcome:
        entry["outcome"] = decision.outcome
    return entry


# --- objectives -------------------------------------------------------------------------------------------------------


def objectives_status(
    deployment: InferenceDeployment, tuned: TunerOutput, before: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Return the objectives of the spec, or the defaults once step times were measured; None before.

    Defaults are relearned in each iteration; the status is updated when they change by a quarter.
    """
    if deployment.spec.objectives is not None:
        written = deployment.spec.objectives.model_dump(mode="json", by_alias=True, exclude_none=True)
        return {"source": "Spec", **written}
    model, objectives = tuned.state.model, tuned.objectives
    if model is None or not model.is_fitted or objectives.are_given:
        return None
    found = _defaults(objectives.ttft, objectives.itl)
    return dict(before) if before is not None and _is_similar(before, found) else found


def _defaults(ttft: Ttft | None, itl: Itl | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"source": "Default"}
    if ttft is not None:
        entry["ttft"] = {"percentile": round(ttft.share * 100), "target": _milliseconds(ttft.seconds)}
        if ttft.seconds_per_prompt_token:
            entry["ttft"]["perPromptToken"] = f"{_rounded(ttft.seconds_per_prompt_token * 1e6)}us"
    if itl is not None:
        kind = itl.kind.value.capitalize()
        entry["itl"] = {"percentile": round(itl.share * 100), "target": _milliseconds(itl.seconds), "kind": kind}
    return entry


def _milliseconds(seconds: float) -> str:
    return f"{_rounded(seconds * 1000)}ms"


def _rounded(number: float) -> int:
    return max(1, round(float(f"{number:.{SIGNIFICANT_DIGITS}g}")))


def _is_similar(before: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Return True if the previous defaults are nearly the same."""
    if before.get("source") != "Default":
        return False
    old, new = _durations(before), _durations(found)
    return old.keys() == new.keys() and all(
        max(old[name], new[name]) <= MAX_UNREPORTED_CHANGE * min(old[name], new[name]) for name in new
    )


def _durations(entry: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name in ("ttft", "itl"):
        for field in ("target", "perPromptToken"):
            text = (entry.get(name) or {}).get(field)
            if text is not None:
                found[f"{name}.{field}"] = parse_seconds(str(text))
    return found


# --- values -----------------------------------------------------------------------------------------------------------


def format_number(value: Value | None) -> str:
    """Return a number with up to ten significant digits."""
    return "" if value is None else f"{value:.10g}"


def _forecast(forecast: Forecast) -> dict[str, Any]:
    """Return the state of the forecast. Its error changes all the time and is only part of decisions."""
    entry = {"state": forecast.state.value}
    return (
        entry if forecast.since is None else {**entry, "since": timestamp(datetime.fromtimestamp(forecast.since, UTC))}
    )
