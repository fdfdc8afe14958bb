"""Output constraints of requests: at most one, of limited size."""

import json
from typing import Any

import pytest
from pydantic import ValidationError
from trimtab_engine.api.openai import constraints as structured
from trimtab_engine.api.openai.constraints import Constraint, StructuredFields

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
AS_TEXT = '{"type":"object","properties":{"a":{"type":"integer"}}}'
DEEP: Any = {}
for _ in range(120):
    DEEP = {"properties": {"a": DEEP}}


def constraint(**fields: Any) -> Constraint | None:
    return StructuredFields.model_validate(fields).constraint()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint("json", '{"type":"object"}')),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            Constraint("json", AS_TEXT),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, Constraint("json", AS_TEXT)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Constraint("json", AS_TEXT)),
        ({"structured_outputs": {"regex": "a+"}}, Constraint("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Constraint("choice", ("a", "b"))),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Constraint("grammar", 'start: "a"')),
        ({"structured_outputs": {"json_object": True}}, Constraint("json", '{"type":"object"}')),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            Constraint("json", AS_TEXT, any_whitespace=False),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
            Constraint("json", AS_TEXT[:-1] + ',"additionalProperties":false}'),
        ),
        ({"guided_json": SCHEMA}, Constraint("json", AS_TEXT)),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": "[ ]?"},
            Constraint("json", AS_TEXT, whitespace_pattern="[ ]?"),
        ),
        ({"guided_regex": "a+"}, Constraint("regex", "a+")),
        ({"guided_choice": ["a"]}, Constraint("choice", ("a",))),
        ({"guided_grammar": 'start: "a"'}, Constraint("grammar", 'start: "a"')),
    ],
)
def test_equivalent_fields_give_the_same_constraint(fields: dict[str, Any], expected: Constraint | None) -> None:
    assert constraint(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "structural_tag", "structures": []}}, "structural_tag is not supported yet"),
        ({"response_format": {"type": "yaml"}}, "type"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "schema"),
        ({"response_format": {"type": "json_object", "x": 1}}, "x"),
        ({"structured_outputs": {}}, "exactly one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "exactly one of"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag is not supported yet"),
        ({"structured_outputs": {"json": "[1]"}}, "not a JSON object"),
        ({"structured_outputs": {"json": "{"}}, "not JSON"),
        ({"structured_outputs": {"choice": []}}, "choice"),
        ({"structured_outputs": {"choice": [""]}}, "choice"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "has 2 constraints"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "has 2 constraints"),
        ({"guided_json": DEEP}, "nested deeper than 100"),
        ({"guided_json": {"enum": ["x" * structured.MAX_SCHEMA_CHARACTERS]}}, "at most 262144"),
        ({"guided_json": "[" * 50_000}, "not JSON"),
        ({"guided_regex": "a" * (structured.MAX_REGEX_CHARACTERS + 1)}, "the regex has 16385"),
        ({"guided_grammar": "a" * (structured.MAX_GRAMMAR_CHARACTERS + 1)}, "the grammar has 65537"),
        ({"guided_choice": ["a"] * (structured.MAX_CHOICES + 1)}, "guided_choice"),
        ({"guided_choice": ["a" * structured.MAX_CHOICE_CHARACTERS, "b"]}, "the list of choices has"),
        ({"response_format": {f"k{i}": 1 for i in range(100_000)}}, "100000 fields"),
    ],
)
def test_invalid_constraint_is_rejected_by_field(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError) as refused:
        constraint(**fields)
    assert named in str(refused.value)
    assert refused.value.error_count() < 5
