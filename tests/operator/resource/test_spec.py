"""Errors of invalid specs, with their remedies."""

from typing import Any

import pytest
from pydantic import ValidationError
from trimtab_operator.errors import InvalidSpec
from trimtab_operator.planning.admission import validation_messages
from trimtab_operator.resource.limits import MAX_FINDINGS
from trimtab_operator.resource.schema_errors import schema_errors
from trimtab_operator.resource.spec import InferenceDeployment, Spec


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (
            {"tuning": {"mode": False}},
            "spec.tuning.mode: Input should be 'Off', 'Recommend' or 'Auto': YAML reads On, Off",
        ),
        ({"engine": {"gpuMemoryUtilization": 0.5}}, "YAML reads it as a number; write '0.5' in quotes"),
    ],
)
def test_unquoted_yaml_values_have_a_hint(spec: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError) as error:
        Spec.model_validate({"model": {"uri": "file:///models/x"}, **spec})
    assert told in "; ".join(f"{field}: {message}" for field, message in schema_errors(error.value, Spec))


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (
            {"model": "Qwen/Qwen3-8B"},
            "spec.model: Input should be an object: write an object with the fields uri, revision,",
        ),
        ({"objectives": {"ttft": "500ms"}}, "write an object with the fields percentile, target"),
        ({"tuning": "Auto"}, "write an object with the fields mode,"),
        ({"replicas": "2"}, "spec.replicas: Input should be a valid integer: write 2 without quotes"),
        ({"engine": {"maxModelLen": "8k"}}, "a valid integer: '8k' is a string; write an integer"),
        ({"runtime": {"args": "--seed 1"}}, "a valid array: write a list: ['--seed', '1']"),
        ({"tuning": {"bounds": {"maxNumSeqs": [1, 2]}}}, "write an object with the fields min, max"),
    ],
)
def test_a_value_of_another_kind_is_told_what_belongs_there(spec: dict[str, Any], told: str) -> None:
    body = {"model": {"uri": "file:///models/x"}, **spec}
    with pytest.raises(InvalidSpec) as error:
        InferenceDeployment.parse({"metadata": {"name": "m"}, "spec": body})
    (finding,) = error.value.findings
    assert told in finding


def test_each_finding_is_a_line_of_its_own_whatever_it_says() -> None:
    spec = {"model": {"uri": "file:///models/x"}, "engine": {"gpuMemoryUtilization": 0.9}, "replicas": "2"}
    lines = validation_messages({"metadata": {"name": "m"}, "spec": spec}, default_image="i")
    assert [line.partition(":")[0] for line in lines] == ["spec.engine.gpuMemoryUtilization", "spec.replicas"]


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"tensorParallelSize": 2}, "did you mean spec.parallelism.tensor?"),
        ({"parallelism": {"tensorParallelSize": 2}}, "did you mean spec.parallelism.tensor?"),
        ({"resources": {}}, "did you mean spec.template.spec.containers[0].resources?"),
        ({"nodeSelector": {}}, "did you mean spec.template.spec.nodeSelector?"),
        ({"engine": {"gpuMemoryUtilisation": "0.5"}}, "did you mean gpuMemoryUtilization?"),
        ({"engine": {"gpu_memory_utilization": "0.5"}}, "did you mean gpuMemoryUtilization?"),
        ({"maxNumSeqs": 8}, "spec.maxNumSeqs: unknown field: did you mean spec.engine.maxNumSeqs?"),
        ({"engine": {"replicas": 2}}, "did you mean spec.replicas?"),
        ({"colour": "red"}, "spec.colour: unknown field: `kubectl explain infd.spec --recursive` lists all fields"),
    ],
)
def test_a_misspelt_or_misplaced_field_is_told_what_it_was_meant_to_be(spec: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError) as error:
        Spec.model_validate({"model": {"uri": "file:///models/x"}, **spec}, by_alias=True, by_name=False)
    assert told in "; ".join(f"{field}: {message}" for field, message in schema_errors(error.value, Spec))


def test_schema_errors_are_capped() -> None:
    spec = {"model": {"uri": "file:///models/x"}, **{f"unknown{number}": "x" * 100_000 for number in range(100)}}
    with pytest.raises(InvalidSpec) as error:
        InferenceDeployment.parse({"spec": spec})
    assert len(error.value.findings) == MAX_FINDINGS + 1
    assert error.value.findings[-1] == "spec: 80 more errors are not listed"
    assert len(str(error.value)) < 32_768


def nested(depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for _ in range(depth):
        made = {"a": made}
    return made


@pytest.mark.parametrize("overlay", [{f"a{number}": 1 for number in range(30_000)}, {"a": [1] * 30_000}, nested(100)])
def test_spec_beyond_size_limit_is_rejected(overlay: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match=r"has more than 20,000 values|is nested more than 64 levels"):
        InferenceDeployment.parse({"spec": {"model": {"uri": "file:///models/x"}, "template": {"spec": overlay}}})
