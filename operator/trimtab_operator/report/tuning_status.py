"""`status.tuning`: the promises in force, what is applied or recommended, and the latest decisions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from trimtab_operator.planning.scheduling_policy import queue_status
from trimtab_operator.planning.status_inputs import Findings
from trimtab_operator.resource.quantity import parse_seconds
from trimtab_operator.resource.spec import InferenceDeployment
from trimtab_operator.resource.time import timestamp
from trimtab_operator.tuner.decide import Outcome
from trimtab_operator.tuner.knobs import Value
from trimtab_operator.tuner.load import Forecast
from trimtab_operator.tuner.moves import Decision
from trimtab_operator.tuner.objectives import Itl, Ttft

SAME_DEFAULT = 1.25  # factor within which a default that is learned anew stays as it was told
NUM_DIGITS = 2  # of a default: it is a measure of three times something


def tuning_status(deployment: InferenceDeployment, findings: Findings) -> dict[str, Any]:
    """`status.tuning`; while nothing runs, what stood there before stays."""
    before: Mapping[str, Any] = deployment.status.get("tuning") or {}
    if findings.tuning is None:
        return dict(before)
    tuned = findings.tuning
    tuning: dict[str, Any] = {"mode": deployment.spec.tuning.mode}
    if findings.metrics_source is not None:
        tuning["source"] = findings.metrics_source
    objectives = objectives_status(deployment, tuned, before.get("objectives"))
    if objectives is not None:
        tuning["objectives"] = objectives
    if tuned.memory.applied:
        tuning["applied"] = {str(knob.value): show(value) for knob, value in sorted(tuned.memory.applied.items())}
    if queue := queue_status(findings.queue):
        tuning["queueOrder"] = queue
    if tuned.recommendation is not None:
        tuning["recommendation"] = decision_status(tuned.recommendation)
    if tuned.memory.forecast is not None:
        tuning["forecast"] = _forecast(tuned.memory.forecast)
    if tuned.memory.history:
        tuning["history"] = [decision_status(decision) for decision in reversed(tuned.memory.history)]
    return tuning


def decision_status(decision: Decision) -> dict[str, Any]:
    """One decision, as history and recommendation have it."""
    move = decision.move
    entry: dict[str, Any] = {
        "id": decision.id,
        "time": timestamp(datetime.fromtimestamp(decision.at, UTC)),
        "reason": decision.reason.value,
        "message": decision.sentence,
        "knob": move.target.value,
    }
    if move.before is not None:
        entry["from"] = show(move.before)
    if move.after is not None:
        entry["to"] = show(move.after)
    if decision.outcome:
        entry["outcome"] = decision.outcome
    return entry


# --- promises ---------------------------------------------------------------------------------------------------------


def objectives_status(
    deployment: InferenceDeployment, tuned: Outcome, before: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """The owner's promises as written, or the defaults once step times were measured; None until then.

    Defaults are learned anew with each look. They are told anew when they have changed by a quarter.
    """
    if deployment.spec.objectives is not None:
        written = deployment.spec.objectives.model_dump(mode="json", by_alias=True, exclude_none=True)
        return {"source": "Spec", **written}
    model, promised = tuned.memory.model, tuned.objectives
    if model is None or not model.is_fitted or promised.are_given:
        return None
    found = _defaults(promised.ttft, promised.itl)
    return dict(before) if before is not None and _is_about(before, found) else found


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
    return max(1, round(float(f"{number:.{NUM_DIGITS}g}")))


def _is_about(before: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether what was told before still tells the same defaults, nearly."""
    if before.get("source") != "Default":
        return False
    old, new = _times(before), _times(found)
    return old.keys() == new.keys() and all(
        max(old[name], new[name]) <= SAME_DEFAULT * min(old[name], new[name]) for name in new
    )


def _times(entry: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name in ("ttft", "itl"):
        for field in ("target", "perPromptToken"):
            text = (entry.get(name) or {}).get(field)
            if text is not None:
                found[f"{name}.{field}"] = parse_seconds(str(text))
    return found


# --- values -----------------------------------------------------------------------------------------------------------


def show(value: Value | None) -> str:
    """Ten significant digits are more than any knob has."""
    return "" if value is None else f"{value:.10g}"


def _forecast(forecast: Forecast) -> dict[str, Any]:
    """What becomes of the forecast. How far it is off changes all the time, and is told with decisions."""
    told = {"state": forecast.state.value}
    return told if forecast.since is None else {**told, "since": timestamp(datetime.fromtimestamp(forecast.since, UTC))}
