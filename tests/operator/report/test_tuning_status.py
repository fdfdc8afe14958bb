"""`status.tuning`: decisions with numbers, objectives in force, and no changes without a cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from operator_builders import NOW, a_deployment
from trimtab_operator.planning.status_inputs import StatusInputs
from trimtab_operator.report.tuning_status import tuning_status
from trimtab_operator.tuner.decide import Condition, TunerOutput
from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.model import StepTime
from trimtab_operator.tuner.moves import Decision, Move, Reason, ReplicaCount
from trimtab_operator.tuner.objectives import Itl, Objectives, Ttft
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.samples import Work
from trimtab_operator.tuner.state import TunerState

OK = Condition(True, Reason.TUNING, "")
COST = StepCost(0.008, 6e-5, 3e-5, 4e-9)


def a_fitted_model() -> StepTime:
    model = StepTime.of(COST)
    for _ in range(30):
        decode = Work(10, 160, 160, 16_000, 16_000, 10 * COST.seconds(16, 16, 1600, 1600))
        prefill = Work(10, 5000, 20, 5000, 50_000, 10 * COST.seconds(500, 2, 500, 5000))
        model = model.with_intervals([(decode, prefill)])
    assert model.is_fitted
    return model


def told(
    memory: TunerState, promised: Objectives, *, status: dict[str, Any] | None = None, **spec: Any
) -> dict[str, Any]:
    outcome = TunerOutput(memory, OK, OK, objectives=promised)
    deployment = a_deployment(status={"tuning": status} if status else None, **spec)
    return tuning_status(deployment, StatusInputs(1, tuning=outcome))


def test_decision_has_values_and_later_outcome() -> None:
    move = Move(Reason.KV_CACHE_TOO_SMALL, Parameter.GPU_MEMORY_UTILIZATION, 0.77, 0.87)
    memory = TunerState(applied={Parameter.GPU_MEMORY_UTILIZATION: 0.87}).with_decision(
        Decision("id", NOW, move, "Raised it.")
    )
    status = told(memory, Objectives())
    assert status["applied"] == {"gpu_memory_utilization": "0.87"}
    assert status["history"] == [
        {
            "id": "id",
            "time": "2026-01-01T12:00:00Z",
            "reason": "KVCacheTooSmall",
            "message": "Raised it.",
            "knob": "gpu_memory_utilization",
            "from": "0.77",
            "to": "0.87",
        }
    ]
    assert told(memory.with_outcome("id", "kept"), Objectives())["history"][0]["outcome"] == "kept"


def test_restart_recommendation_has_no_values() -> None:
    made = Decision("id", NOW, Move(Reason.SATURATED, ReplicaCount(), None, None), "Saturated.")
    entry = told(replace(TunerState(), recommendation=made), Objectives())["recommendation"]
    assert (entry["knob"], "from" in entry, "to" in entry) == ("replicas", False, False)


def test_objectives_are_reported_as_written() -> None:
    written = {"ttft": {"target": "1234ms", "perPromptToken": "125us"}}
    status = told(TunerState(), Objectives(), objectives=written)
    assert status["objectives"] == {"source": "Spec", "ttft": {"percentile": 95, **written["ttft"]}}


def test_defaults_are_reported_after_step_times_are_measured() -> None:
    defaults = Objectives(Ttft(0.0246, 0.0002), Itl(0.0247), are_given=False)
    assert "objectives" not in told(TunerState(), defaults)
    assert told(TunerState(model=a_fitted_model()), defaults)["objectives"] == {
        "source": "Default",
        "ttft": {"percentile": 95, "target": "25ms", "perPromptToken": "200us"},
        "itl": {"percentile": 95, "target": "25ms", "kind": "Mean"},
    }


@pytest.mark.parametrize(("factor", "is_told_anew"), [(1.1, False), (0.9, False), (2.0, True)])
def test_relearned_defaults_are_updated_after_large_change(factor: float, is_told_anew: bool) -> None:
    memory = TunerState(model=a_fitted_model())
    before = told(memory, Objectives(Ttft(0.1, 0.0002), Itl(0.1), are_given=False))
    update_incarnations = Objectives(Ttft(0.1 * factor, 0.0002), Itl(0.1 * factor), are_given=False)
    assert (told(memory, update_incarnations, status=before) != before) is is_told_anew


def test_no_replicas_keep_previous_tuning_status() -> None:
    deployment = a_deployment(status={"tuning": {"mode": "Auto"}})
    assert tuning_status(deployment, StatusInputs(1)) == {"mode": "Auto"}


def test_metrics_source_is_reported() -> None:
    tuned = TunerOutput(TunerState(), Condition(True, Reason.SCRAPED, ""), Condition(True, Reason.TUNING, ""))
    found = StatusInputs(1, tuning=tuned, metrics_source="Prometheus")
    assert tuning_status(a_deployment(), found)["source"] == "Prometheus"
    assert "source" not in tuning_status(a_deployment(), StatusInputs(1, tuning=tuned))
