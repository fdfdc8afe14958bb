"""Output constraints of requests: OpenAI's response_format, vLLM's structured_outputs and guided_*.

Only sizes are checked here, before deeper parsing. Grammars are validated in grammar_trials.py.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_SCHEMA_CHARACTERS = 1 << 18  # as JSON; three times the largest schema in llguidance's collection
MAX_SCHEMA_DEPTH = 100  # of nested objects and arrays; llguidance supports 127
MAX_REGEX_CHARACTERS = 1 << 14
MAX_GRAMMAR_CHARACTERS = 1 << 16
MAX_CHOICES = 4096
MAX_CHOICE_CHARACTERS = 1 << 18  # total of all choices
MAX_NAME_CHARACTERS = 64  # of a schema; OpenAI's limit
MAX_FIELDS = 32  # of one JSON object outside a schema; every unknown field is reported

Kind = Literal["json", "regex", "choice", "grammar", "llguidance"]
Schema = dict[str, Any]
Choice = Annotated[str, Field(min_length=1)]
Choices = Annotated[list[Choice], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


@dataclass(frozen=True, slots=True)
class Constraint:
    """One checked constraint. `value` is text (JSON for a schema) or the list of choices.

    `any_whitespace` and `whitespace_pattern` apply to JSON: whether whitespace is allowed between its tokens, and
    which.
    """

    kind: Kind
    value: str | tuple[str, ...]
    any_whitespace: bool = True
    whitespace_pattern: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "value": self.value,
            "any_whitespace": self.any_whitespace,
            "whitespace_pattern": self.whitespace_pattern,
        }


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise ValueError(f"a JSON object has {len(data)} fields; at most {MAX_FIELDS} are allowed")
        return data


class JsonSchemaFormat(_StrictModel):
    """OpenAI's json_schema format. `strict` has no effect: the schema is always enforced."""

    name: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)] = ""
    description: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(_StrictModel):
    """OpenAI's response_format. structural_tag is rejected as not supported."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, data: Any) -> Any:
        if isinstance(data, str):
            raise ValueError(
                'must be an object (got a string); use {"type": "json_object"}, or json_schema with a schema'
            )
        if isinstance(data, dict) and data.get("type") == "structural_tag":
            raise ValueError("structural_tag is not supported yet; use json_schema or structured_outputs")
        return data

    @model_validator(mode="after")
    def _check_together(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("the field json_schema is required for type json_schema and not allowed for other types")
        return self

    def constraint(self) -> Constraint | None:
        if self.json_schema is not None:
            return schema_constraint(self.json_schema.schema_)
        return Constraint("json", '{"type":"object"}') if self.type == "json_object" else None


class StructuredOutputs(_StrictModel):
    """vLLM's structured_outputs: exactly one of json, regex, choice, grammar, json_object."""

    json_: Annotated[str | Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("structural_tag") is not None:
            raise ValueError("structural_tag is not supported yet; remove it")
        return (
            {key: value for key, value in data.items() if key != "structural_tag"} if isinstance(data, dict) else data
        )

    def constraint(self) -> Constraint | None:
        """Return the constraint.

        Raises:
            ValueError: Not exactly one constraint is set.
        """
        given = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(value is not None for value in given) != 1:
            raise ValueError("structured_outputs requires exactly one of json, regex, choice, grammar, json_object")
        if self.json_object:
            return self._with_whitespace(Constraint("json", '{"type":"object"}'))
        if self.json_ is not None:
            schema = read_schema(self.json_)
            return self._with_whitespace(
                schema_constraint(
                    _forbid_additional_properties(schema) if self.disable_additional_properties else schema
                )
            )
        return _text_constraint(self.regex, self.choice, self.grammar)

    def _with_whitespace(self, constraint: Constraint) -> Constraint:
        return Constraint(
            constraint.kind, constraint.value, not self.disable_any_whitespace, self.whitespace_pattern or None
        )


class StructuredFields(BaseModel):
    """Request fields that constrain the output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _check_constraint(self) -> "StructuredFields":
        self.constraint()
        return self

    def constraint(self) -> Constraint | None:
        """Return the constraint of the output, or None.

        Raises:
            ValueError: Several constraints are set.
        """
        given: list[Constraint] = []
        if self.response_format is not None and (constraint := self.response_format.constraint()) is not None:
            given.append(constraint)
        if self.structured_outputs is not None and (constraint := self.structured_outputs.constraint()) is not None:
            given.append(constraint)
        if self.guided_json is not None:
            schema = schema_constraint(read_schema(self.guided_json))
            given.append(Constraint("json", schema.value, True, self.guided_whitespace_pattern))
        if self.guided_regex is not None:
            given.append(_text_constraint(self.guided_regex, None, None))
        if self.guided_choice is not None:
            given.append(_text_constraint(None, self.guided_choice, None))
        if self.guided_grammar is not None:
            given.append(_text_constraint(None, None, self.guided_grammar))
        if len(given) > 1:
            raise ValueError(
                f"the output has {len(given)} constraints; set only one of response_format, structured_outputs, "
                f"{', '.join(GUIDED)}"
            )
        return given[0] if given else None


def schema_constraint(schema: Schema) -> Constraint:
    """Return the constraint of a JSON schema.

    Raises:
        ValueError: The schema is too deep or too long.
    """
    if _is_deeper(schema, MAX_SCHEMA_DEPTH):
        raise ValueError(f"the schema is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    _check_length("the schema", text, MAX_SCHEMA_CHARACTERS)
    return Constraint("json", text)


def read_schema(schema: str | Schema) -> Schema:
    """Return a schema that may be given as JSON text.

    Raises:
        ValueError: The text is too long or not a JSON object.
    """
    if isinstance(schema, dict):
        return schema
    _check_length("the schema", schema, MAX_SCHEMA_CHARACTERS)
    try:
        value = json.loads(schema)
    except (ValueError, RecursionError):
        raise ValueError("the schema is not JSON") from None
    if not isinstance(value, dict):
        raise ValueError("the schema is not a JSON object")
    return value


def _text_constraint(regex: str | None, choice: list[str] | None, grammar: str | None) -> Constraint:
    if regex is not None:
        _check_length("the regex", regex, MAX_REGEX_CHARACTERS)
        return Constraint("regex", regex)
    if choice is not None:
        _check_length("the list of choices", "".join(choice), MAX_CHOICE_CHARACTERS)
        return Constraint("choice", tuple(choice))
    assert grammar is not None
    _check_length("the grammar", grammar, MAX_GRAMMAR_CHARACTERS)
    return Constraint("grammar", grammar)


def _check_length(what: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise ValueError(f"{what} has {len(text)} characters; at most {limit} are allowed")


def _is_deeper(value: Any, limit: int) -> bool:
    """Return True if objects and arrays are nested deeper than `limit`. Iterative, so that deep input cannot overflow
    the stack.
    """
    level = [value]
    for _ in range(limit + 1):
        level = [item for node in level for item in _items(node)]
        if not level:
            return False
    return True


def _items(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []


def _forbid_additional_properties(node: Any) -> Any:
    """Return a copy whose objects forbid additional properties unless they allow them explicitly (as in vLLM)."""
    if isinstance(node, list):
        return [_forbid_additional_properties(item) for item in node]
    if not isinstance(node, dict):
        return node
    copied = {key: _forbid_additional_properties(value) for key, value in node.items()}
    if "additionalProperties" not in copied and ("properties" in copied or "patternProperties" in copied):
        copied["additionalProperties"] = False
    return copied
