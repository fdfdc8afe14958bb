"""Settings of the tuner, and its state across operator restarts."""

from __future__ import annotations

from typing import Any

import pytest
from operator_builders import a_deployment
from operator_cluster import TOKEN, FakeCluster
from trimtab_operator.builders.config_map import tuning_config_map
from trimtab_operator.planning.objectives import objectives_of
from trimtab_operator.planning.tuning import (
    DEFAULT_SCALE_UP,
    dump_tuner_state,
    load_tuner_state,
    scaling_of,
    settings_of,
)
from trimtab_operator.tuner.engine_model import Allowance
from trimtab_operator.tuner.objectives import Itl, ItlKind, Objectives, Ttft
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.scaling.behavior import Behavior, Policy, Rules, Select, Unit, limit_change
from trimtab_operator.tuner.settings import Bounds, Mode, Scaling, Seasonal
from trimtab_operator.tuner.state import TunerState

TUNED = TunerState(applied={Parameter.MAX_NUM_SEQS: 16})


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
def test_objectives_match_spec(written: dict[str, Any] | None, promised: Objectives) -> None:
    assert objectives_of(a_deployment(objectives=written).spec.objectives) == promised


@pytest.mark.parametrize(
    ("mode", "policy", "ordered"),
    [("Auto", None, True), ("Auto", "fcfs", False), ("Recommend", None, False), ("Off", "deadline", True)],
)
def test_predictions_use_scheduling_policy_of_engines(mode: str, policy: str | None, ordered: bool) -> None:
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
    assert settings.starts[Parameter.GPU_MEMORY_UTILIZATION] == 0.8
    assert settings.starts[Parameter.MAX_NUM_SEQS] == 64
    assert settings.bounds == {
        Parameter.GPU_MEMORY_UTILIZATION: Bounds(None, 0.9),
        Parameter.MAX_NUM_SEQS: Bounds(4, None),
        Parameter.WATERMARK: Bounds(None, 0.05),
    }


def test_scaling_behavior_maps_to_rules() -> None:
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
    assert settings_of(a_deployment(scaling={"maxReplicas": 6}).spec).scaling == Scaling(
        1, 6, Behavior(Rules(policies=DEFAULT_SCALE_UP))
    )
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
def test_forecast_is_learned_if_enabled(written: dict[str, str] | None, asked: Seasonal | None) -> None:
    scaling = settings_of(a_deployment(scaling={"maxReplicas": 6, "forecast": written}).spec).scaling
    assert scaling is not None
    assert scaling.forecast == asked


@pytest.mark.parametrize("signed_with", [TOKEN, "former"])
def test_tuner_state_is_read_with_present_or_former_key(signed_with: str) -> None:
    deployment = a_deployment()
    kept = tuning_config_map(deployment, dump_tuner_state(TUNED, key=signed_with))
    assert load_tuner_state(deployment, [kept], key=TOKEN, former_key="former").applied == TUNED.applied


def test_unsigned_tuner_state_is_rebuilt_from_status() -> None:
    deployment = a_deployment(status={"tuning": {"applied": {"max_num_seqs": "24", "nonsense": "1"}}})
    kept = tuning_config_map(deployment, dump_tuner_state(TUNED, key="a stranger's"))
    assert load_tuner_state(deployment, [kept], key=TOKEN, former_key="former").applied == {Parameter.MAX_NUM_SEQS: 24}


def test_restarted_engine_gets_tuned_values_again() -> None:
    cluster = FakeCluster(tuning={"mode": "Auto"})
    cluster.objects["ConfigMap", "m-tuning"] = tuning_config_map(cluster.deployment, dump_tuner_state(TUNED, key=TOKEN))
    cluster.objects["ConfigMap", "m-tuning"]["metadata"] |= {"uid": "o-0", "creationTimestamp": "2026-01-01T12:00:00Z"}
    cluster.settle()
    assert [engine.values[Parameter.MAX_NUM_SEQS] for engine in cluster.engines.values()][-1:] == [16]
    assert cluster.status["tuning"]["applied"] == {"max_num_seqs": "16"}
    assert cluster.condition("MetricsAvailable")["reason"] == "Scraped"
    assert cluster.condition("TuningActive")["reason"] == "Tuning"


def test_oom_above_start_value_resets_and_pins_it() -> None:
    cluster = FakeCluster(engine={"gpuMemoryUtilization": "0.74"}, tuning={"mode": "Auto"})
    kept = dump_tuner_state(TunerState(applied={Parameter.GPU_MEMORY_UTILIZATION: 0.9}), key=TOKEN)
    cluster.objects["ConfigMap", "m-tuning"] = tuning_config_map(cluster.deployment, kept)
    cluster.objects["ConfigMap", "m-tuning"]["metadata"] |= {"uid": "o-0", "creationTimestamp": "2026-01-01T12:00:00Z"}
    cluster.settle()
    leader = cluster.pods["m-g0-0"]
    assert cluster.engines[leader["metadata"]["uid"]].values[Parameter.GPU_MEMORY_UTILIZATION] == 0.9
    statuses = leader["status"]["containerStatuses"]
    statuses[0] |= {"restartCount": 1, "lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}
    turned = cluster.plan_reconcile()
    (decision,) = turned.decisions
    assert "an engine ran out of memory above the start values" in decision.sentence
    assert turned.state.tuner is not None
    assert turned.state.tuner.applied[Parameter.GPU_MEMORY_UTILIZATION] == 0.74
    assert [(pin.parameter, pin.limit) for pin in turned.state.tuner.pins] == [(Parameter.GPU_MEMORY_UTILIZATION, 0.74)]
    assert cluster.engines[leader["metadata"]["uid"]].values[Parameter.GPU_MEMORY_UTILIZATION] == 0.74


@pytest.mark.parametrize(
    ("written", "first"),
    [
        (None, 5),  # four more
        ({"scaleUp": {"stabilizationWindowSeconds": 30}}, 5),
        ({"scaleUp": {"policies": [{"type": "Pods", "value": 9, "periodSeconds": 60}]}}, 10),
    ],
)
def test_scale_up_is_limited_by_default(written: dict[str, Any] | None, first: int) -> None:
    spec = a_deployment(scaling={"minReplicas": 1, "maxReplicas": 40, "behavior": written}).spec
    found = scaling_of(spec.scaling)
    assert found is not None
    assert limit_change(found.behavior, 1, 40, [], now=0.0) == first
    assert limit_change(found.behavior, 40, 1, [], now=0.0) == 1
