"""What is wrong with a spec is told in words that say what to write instead."""

from typing import Any

import pytest
from pydantic import ValidationError
from trimtab_operator.resource.schema_errors import schema_errors
from trimtab_operator.resource.spec import Spec


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
def test_what_yaml_made_of_a_text_without_quotes_is_told(spec: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError) as error:
        Spec.model_validate({"model": {"uri": "file:///models/x"}, **spec})
    assert told in "; ".join(f"{field}: {message}" for field, message in schema_errors(error.value, Spec))


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"engine": {"gpuMemoryUtilisation": "0.5"}}, "did you mean gpuMemoryUtilization?"),
        ({"engine": {"gpu_memory_utilization": "0.5"}}, "did you mean gpuMemoryUtilization?"),
        ({"maxNumSeqs": 8}, "spec.maxNumSeqs: there is no such field: did you mean spec.engine.maxNumSeqs?"),
        ({"engine": {"replicas": 2}}, "did you mean spec.replicas?"),
        ({"colour": "red"}, "spec.colour: there is no such field: `kubectl explain infd.spec --recursive` lists them"),
    ],
)
def test_a_misspelt_or_misplaced_field_is_told_what_it_was_meant_to_be(spec: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError) as error:
        Spec.model_validate({"model": {"uri": "file:///models/x"}, **spec}, by_alias=True, by_name=False)
    assert told in "; ".join(f"{field}: {message}" for field, message in schema_errors(error.value, Spec))
