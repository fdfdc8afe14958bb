"""What a resource asks of the tuner, and what it remembers between two operators."""

from __future__ import annotations

from typing import Any

import pytest
from operator_builders import a_deployment
from operator_cluster import TOKEN, FakeCluster
from trimtab_operator.builders.config_map import tuning_config_map
from trimtab_operator.planning.objectives import objectives_of
from trimtab_operator.planning.tuning import remembered_text, settings_of, stored_memory
from trimtab_operator.tuner.engine_model import Allowance
from trimtab_operator.tuner.knobs import Knob
from trimtab_operator.tuner.objectives import Itl, ItlKind, Objectives, Ttft
from trimtab_operator.tuner.scaling.behavior import Behavior, Policy, Rules, Select, Unit
from trimtab_operator.tuner.settings import Bounds, Mode, Scaling, Seasonal
from trimtab_operator.tuner.state import Memory

TUNED = Memory(applied={Knob.MAX_NUM_SEQS: 16})


@pytest.mark.parametrize(
    ("written", "promised"),
    [
        (None, Objectives()),
        ({"ttft": {"target": "500ms"}}, Objectives(Ttft(0.5, 0.0, 0.95))),
        (
            {"ttft": {"target": "2s", "perPromptToken": "125us", "percentile": 99}},
            Objectives(Ttft(2.0, 0.000125, 0.99)),
        ),
        ({"itl": {"target": "50ms"}}, Objectives(itl=Itl(0.05, ItlKind.MEAN, 0.95))),
        (
            {"itl": {"target": "80ms", "kind": "Tokens", "percentile": 90}},
            Objectives(itl=Itl(0.08, ItlKind.TOKENS, 0.9)),
        ),
    ],
)
def test_promises_are_those_that_are_written(written: dict[str, Any] | None, promised: Objectives) -> None:
    assert objectives_of(a_deployment(objectives=written).spec.objectives) == promised


@pytest.mark.parametrize(
    ("mode", "policy", "ordered"),
    [("Auto", None, True), ("Auto", "fcfs", False), ("Recommend", None, False), ("Off", "deadline", True)],
)
def test_predictions_are_of_the_queue_that_engines_are_told(mode: str, policy: str | None, ordered: bool) -> None:
    engine = {} if policy is None else {"schedulingPolicy": policy}
    promised = {"ttft": {"target": "2s", "perPromptToken": "125us"}}
    spec = a_deployment(objectives=promised, tuning={"mode": mode}, engine=engine).spec
    allowance = settings_of(spec).objectives.allowance
    assert allowance == (Allowance(2.0, 125e-6) if ordered else None)


def test_bounds_and_starts_are_numbers_of_the_knobs_kind() -> None:
    engine = {"gpuMemoryUtilization": "0.80", "maxNumSeqs": 64}
    bounds = {"gpuMemoryUtilization": {"max": "0.9"}, "maxNumSeqs": {"min": 4}, "watermark": {"max": "0.05"}}
    settings = settings_of(a_deployment(engine=engine, tuning={"mode": "Auto", "bounds": bounds}).spec)
    assert settings.mode is Mode.AUTO
    assert settings.starts[Knob.GPU_MEMORY_UTILIZATION] == 0.8
    assert settings.starts[Knob.MAX_NUM_SEQS] == 64
    assert settings.bounds == {
        Knob.GPU_MEMORY_UTILIZATION: Bounds(None, 0.9),
        Knob.MAX_NUM_SEQS: Bounds(4, None),
        Knob.WATERMARK: Bounds(None, 0.05),
    }


def test_the_pace_of_scaling_is_what_autoscaling_calls_behavior() -> None:
    behavior = {
        "scaleUp": {"policies": [{"type": "Pods", "value": 2, "periodSeconds": 60}], "selectPolicy": "Min"},
        "scaleDown": {
            "stabilizationWindowSeconds": 0,
            "policies": [{"type": "Percent", "value": 50, "periodSeconds": 30}],
        },
    }
    scaling = {"minReplicas": 2, "maxReplicas": 6, "behavior": behavior}
    found = settings_of(a_deployment(scaling=scaling).spec).scaling
    assert found == Scaling(
        2,
        6,
        Behavior(
            Rules(None, Select.MIN, (Policy(Unit.PODS, 2, 60.0),)),
            Rules(0.0, Select.MAX, (Policy(Unit.PERCENT, 50, 30.0),)),
        ),
    )
    assert settings_of(a_deployment(scaling={"maxReplicas": 6}).spec).scaling == Scaling(1, 6)
    assert settings_of(a_deployment().spec).scaling is None


@pytest.mark.parametrize(
    ("written", "asked"),
    [
        (None, None),
        ({}, Seasonal(86_400.0, 96)),
        ({"seasonality": "Daily"}, Seasonal(86_400.0, 96)),
        ({"seasonality": "Weekly"}, Seasonal(604_800.0, 672)),
    ],
)
def test_a_forecast_is_learned_where_it_is_asked_for(written: dict[str, str] | None, asked: Seasonal | None) -> None:
    scaling = settings_of(a_deployment(scaling={"maxReplicas": 6, "forecast": written}).spec).scaling
    assert scaling is not None
    assert scaling.forecast == asked


@pytest.mark.parametrize("signed_with", [TOKEN, "former"])
def test_what_was_remembered_is_read_back_with_this_key_or_the_former_one(signed_with: str) -> None:
    deployment = a_deployment()
    kept = tuning_config_map(deployment, remembered_text(TUNED, key=signed_with))
    assert stored_memory(deployment, [kept], key=TOKEN, former_key="former").applied == TUNED.applied


def test_a_memory_that_nobody_signed_is_rebuilt_from_the_status() -> None:
    deployment = a_deployment(status={"tuning": {"applied": {"max_num_seqs": "24", "nonsense": "1"}}})
    kept = tuning_config_map(deployment, remembered_text(TUNED, key="a stranger's"))
    assert stored_memory(deployment, [kept], key=TOKEN, former_key="former").applied == {Knob.MAX_NUM_SEQS: 24}


def test_an_engine_that_forgot_its_tuned_values_is_brought_back_to_them_by_the_next_turn() -> None:
    cluster = FakeCluster(tuning={"mode": "Auto"})
    cluster.objects["ConfigMap", "m-tuning"] = tuning_config_map(cluster.deployment, remembered_text(TUNED, key=TOKEN))
    cluster.objects["ConfigMap", "m-tuning"]["metadata"] |= {"uid": "o-0", "creationTimestamp": "2026-01-01T12:00:00Z"}
    cluster.settle()
    assert [engine.values[Knob.MAX_NUM_SEQS] for engine in cluster.engines.values()][-1:] == [16]
    assert cluster.status["tuning"]["applied"] == {"max_num_seqs": "16"}
    assert cluster.condition("MetricsAvailable")["reason"] == "Scraped"
    assert cluster.condition("TuningActive")["reason"] == "Tuning"


def test_an_engine_that_runs_out_of_memory_above_its_start_goes_back_to_it_and_the_value_is_avoided() -> None:
    cluster = FakeCluster(engine={"gpuMemoryUtilization": "0.74"}, tuning={"mode": "Auto"})
    kept = remembered_text(Memory(applied={Knob.GPU_MEMORY_UTILIZATION: 0.9}), key=TOKEN)
    cluster.objects["ConfigMap", "m-tuning"] = tuning_config_map(cluster.deployment, kept)
    cluster.objects["ConfigMap", "m-tuning"]["metadata"] |= {"uid": "o-0", "creationTimestamp": "2026-01-01T12:00:00Z"}
    cluster.settle()
    leader = cluster.pods["m-g0-0"]
    assert cluster.engines[leader["metadata"]["uid"]].values[Knob.GPU_MEMORY_UTILIZATION] == 0.9
    statuses = leader["status"]["containerStatuses"]
    statuses[0] |= {"restartCount": 1, "lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}
    turned = cluster.turn()
    (decision,) = turned.decisions
    assert "an engine ran out of memory above the start values" in decision.sentence
    assert turned.memory.tuner is not None
    assert turned.memory.tuner.applied[Knob.GPU_MEMORY_UTILIZATION] == 0.74
    assert [(pin.knob, pin.limit) for pin in turned.memory.tuner.pins] == [(Knob.GPU_MEMORY_UTILIZATION, 0.74)]
    assert cluster.engines[leader["metadata"]["uid"]].values[Knob.GPU_MEMORY_UTILIZATION] == 0.74
