"""What is wrong with a spec is told in words that say what to write instead."""

from typing import Any

import pytest
from pydantic import ValidationError
from trimtab_operator.resource.spec import Spec, schema_errors


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
    assert told in "; ".join(f"{field}: {message}" for field, message in schema_errors(error.value))
