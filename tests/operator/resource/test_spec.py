"""Errors of invalid specs, with their remedies."""

from typing import Any

import pytest
from pydantic import ValidationError
from trimtab_operator.errors import InvalidSpec
from trimtab_operator.planning.admission import validation_messages
from trimtab_operator.resource.limits import MAX_FINDINGS
from trimtab_operator.resource.schema_errors import schema_errors
from trimtab_operator.resource.spec import InferenceDeployment, Spec

DURATION = "write a duration such as 90s"
ADVICE: list[tuple[dict[str, Any], str]] = [
    ({"tuning": {"mode": False}}, "tuning.mode: is false: YAML reads Off without quotes as a boolean; write 'Off'"),
    ({"tuning": {"mode": "auto"}}, 'tuning.mode: is "auto"; write Off, Recommend or Auto; did you mean Auto?'),
    ({"engine": {"gpuMemoryUtilization": 0.5}}, "is 0.5: YAML reads it as a number; write '0.5' in quotes"),
    ({"engine": {"gpuMemoryUtilization": 90}}, "'90' is not valid; write a share from 0 to 1"),
    ({"objectives": {"ttft": {"target": 500}}}, "ttft.target: '500' has no unit; did you mean 500s or 500ms?"),
    ({"objectives": {"ttft": {"target": "500"}}}, "'500' has no unit; did you mean 500s or 500ms?"),
    ({"objectives": {"ttft": {"target": "0.5s"}}}, DURATION),
    ({"objectives": {"ttft": {"target": "1s", "percentile": 99.9}}}, "is 99.9; write an integer from 1 to 99"),
    ({"rollout": {"drainTimeout": 30}}, "rollout.drainTimeout: '30' has no unit; did you mean 30s or 30ms?"),
    ({"engine": {"blockSize": 12}}, "engine.blockSize: is 12; write 8, 16, 32, 64, 128 or 256"),
    ({"engine": {"swapSpace": 4294967296}}, "is 4294967296: YAML reads it as a number; write '4294967296' in quotes"),
    ({"template": {"spec": {"nodeSelector": {"gpu": True}}}}, "YAML reads it as a boolean; write 'true' in quotes"),
    ({"template": {"spec": {"containers": [{"name": "a"}, {"name": "b"}]}}}, "has 2 items; write at most 1"),
    ({"model": "Qwen/Qwen3-8B"}, 'spec.model: is "Qwen/Qwen3-8B"; write an object with the fields uri, revision,'),
    ({"objectives": {"ttft": "500ms"}}, "write an object with the fields percentile, target"),
    ({"tuning": "Auto"}, "write an object with the fields mode,"),
    ({"model": {"uri": "file:///m", "servedName": "my model"}}, "'my model' is not valid; write a name without spaces"),
    ({"model": {"url": "hf://a/b"}}, "spec.model.url: unknown field: did you mean uri?"),
    ({"model": {}}, "spec.model.uri: is required; write a model's URI: hf://ORG/NAME"),
    ({"replicas": "2"}, 'spec.replicas: is "2"; write 2 without quotes'),
    ({"replicas": -1}, "spec.replicas: is -1; write an integer from 0 to"),
    ({"replicas": None}, "spec.replicas: is empty; write an integer"),
    ({"engine": {"maxModelLen": "8k"}}, 'is "8k"; write an integer'),
    ({"runtime": {"args": "--seed 1"}}, 'is "--seed 1"; write a list: ["--seed", "1"]'),
    ({"tuning": {"bounds": {"maxNumSeqs": [1, 2]}}}, "write an object with the fields min, max"),
]


@pytest.mark.parametrize(("spec", "advice"), ADVICE)
def test_wrong_value_is_reported_with_what_to_write(spec: dict[str, Any], advice: str) -> None:
    body = {"model": {"uri": "file:///models/x"}, **spec}
    with pytest.raises(InvalidSpec) as error:
        InferenceDeployment.parse({"metadata": {"name": "m"}, "spec": body})
    (finding,) = error.value.findings
    assert advice in finding


def test_validation_messages_are_one_line_per_finding() -> None:
    spec = {"model": {"uri": "file:///models/x"}, "engine": {"gpuMemoryUtilization": 0.9}, "replicas": "2"}
    lines = validation_messages({"metadata": {"name": "m"}, "spec": spec}, default_image="i")
    assert [line.partition(":")[0] for line in lines] == ["spec.engine.gpuMemoryUtilization", "spec.replicas"]


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"tensorParallelSize": 2}, "did you mean spec.parallelism.tensor?"),
        ({"parallelism": {"tensorParallelSize": 2}}, "did you mean tensor?"),
        ({"scaling": {"max": 3}}, "did you mean maxReplicas?"),
        ({"objectives": {"tpot": {"target": "50ms"}}}, "did you mean itl?"),
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
