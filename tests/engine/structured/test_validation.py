"""Grammars accepted and rejected by validation; its processes are tested in api/openai/test_grammar_validation.py."""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from trimtab_engine.structured import validation
from trimtab_engine.structured.json_schema import ENFORCED_FORMATS
from trimtab_engine.structured.matcher import GrammarMatcher
from trimtab_engine.structured.reasons import MAX_CHARACTERS
from trimtab_engine.structured.validation import validate_grammar
from trimtab_engine.structured.vocabulary import read_vocabulary

OBJECT = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> LLTokenizer:
    return read_vocabulary(str(tokenizer_folder), 258, (256,)).build()


def allows(tokenizer: LLTokenizer, text: str, **spec: Any) -> bool:
    """Return True if the whole text, followed by the end, matches."""
    matcher = GrammarMatcher.of(tokenizer, validate_grammar(tokenizer, spec)["grammar"])
    matcher.accept([*text.encode(), 256])
    return matcher.error is None and matcher.is_complete


@pytest.mark.parametrize(
    ("spec", "text", "matches"),
    [
        ({"kind": "json", "value": OBJECT}, '{"a":1}', True),
        ({"kind": "json", "value": OBJECT}, '{\n  "a": 1\n}', True),
        ({"kind": "json", "value": OBJECT}, '{"b":1}', False),
        ({"kind": "json", "value": OBJECT}, '{"a":' + " " * 65 + "1}", False),
        ({"kind": "json", "value": OBJECT, "any_whitespace": False}, '{"a": 1}', False),
        ({"kind": "json", "value": OBJECT, "whitespace_pattern": "[ ]"}, '{"a":  1}', False),
        ({"kind": "regex", "value": "[ab]+"}, "abba", True),
        ({"kind": "regex", "value": "[ab]+"}, "abc", False),
        ({"kind": "choice", "value": ["ab", 'q"\\', "é"]}, 'q"\\', True),
        ({"kind": "choice", "value": ["ab", 'q"\\', "é"]}, "é", True),
        ({"kind": "choice", "value": ["ab", 'q"\\', "é"]}, "a", False),
        ({"kind": "grammar", "value": 'start: "a" start | "b"'}, "aab", True),
        ({"kind": "grammar", "value": 'root ::= "a" root | "b"'}, "aab", True),  # GBNF
    ],
)
def test_grammar_matches_expected_text(tokenizer: LLTokenizer, spec: dict[str, Any], text: str, matches: bool) -> None:
    assert allows(tokenizer, text, **spec) is matches


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"kind": "regex", "value": "(a"}, "unclosed group"),
        ({"kind": "regex", "value": "(?=a)b"}, "look-around"),
        ({"kind": "regex", "value": r"[^\s\S]"}, "no text matches"),
        ({"kind": "grammar", "value": 'start: start "a"'}, "no text matches"),
        ({"kind": "grammar", "value": "start: missing"}, "missing"),
        ({"kind": "grammar", "value": "start: " + "(" * 999 + '"a"' + ")" * 999}, "too deeply nested"),
        ({"kind": "json", "value": '{"type": "strin"}'}, "strin"),
        ({"kind": "json", "value": '{"not": {}}'}, "not"),
        ({"kind": "json", "value": '{"$ref": "#"}'}, "no text matches"),
        ({"kind": "json", "value": OBJECT, "whitespace_pattern": "("}, "unclosed group"),
    ],
)
def test_invalid_grammar_is_rejected_with_reason(tokenizer: LLTokenizer, spec: dict[str, Any], reason: str) -> None:
    assert reason in validate_grammar(tokenizer, spec)["error"]


@pytest.mark.parametrize(
    ("schema", "text", "matches"),
    [
        ({"type": "string", "format": "password"}, '"a b"', True),
        ({"type": "string", "format": "uri-reference", "maxLength": 2}, '"abc"', False),
        ({"type": "string", "format": "date"}, '"a b"', False),
        ({"format": "binary"}, "7", True),
        ({"type": "array", "items": {"type": "string", "format": "path"}}, '["/a"]', True),
        ({"anyOf": [{"type": "string", "format": "byte"}, {"type": "null"}]}, '"YQ=="', True),
        ({"$ref": "#/$defs/format", "$defs": {"format": {"type": "string", "format": "json-string"}}}, '"{}"', True),
        ({"$ref": "#/own/a", "own": {"a": {"type": "string", "format": "url"}}}, '"a"', True),
        ({"properties": {"format": {"const": "url"}}, "required": ["format"]}, '{"format":"url"}', True),
        ({"properties": {"default": {"type": "string", "format": "url"}}}, '{"default":"a"}', True),
        ({"const": {"format": "password"}}, '{"format":"password"}', True),
        ({"enum": [{"format": "password"}]}, "{}", False),
    ],
)
def test_unknown_format_is_an_annotation(tokenizer: LLTokenizer, schema: Any, text: str, matches: bool) -> None:
    assert allows(tokenizer, text, kind="json", value=json.dumps(schema)) is matches


ANNOTATIONS = ("uri-reference", "iri", "idn-email", "idn-hostname", "uri-template", "json-pointer", "regex", "password")
INT64 = {"minimum": -(2**63), "maximum": 2**63 - 1}


@pytest.mark.parametrize(
    ("schema", "text", "matches"),
    [
        ({"type": "integer", **INT64}, "-9000000000000000000", True),
        ({"type": "integer", **INT64}, "9223372036854775807", True),
        ({"type": "integer", **INT64}, "9223372036854775808", False),
        ({"type": "integer", "exclusiveMinimum": -(2**63) - 1, "exclusiveMaximum": 2**63}, "5", True),
        ({"type": ["integer", "null"], **INT64}, "null", True),
        ({"type": "integer", "minimum": -(2**64), "maximum": 2**64}, "-1", True),
        ({"type": "number", **INT64}, "-9000000000000000000.5", True),
        ({"type": "number", **INT64}, "9300000000000000000", False),
        ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, "1.5", True),
        (INT64, "1.5", True),
        ({"type": "string", "maxLength": 2**63 - 1}, '"abc"', True),
        ({"type": "array", "maxItems": 2**64}, "[1]", True),
        ({"type": "object", "maxProperties": 2**64}, "{}", True),
        (
            {"type": "array", "items": {"properties": {"maximum": {"type": "integer", **INT64}}}},
            '[{"maximum":1}]',
            True,
        ),
    ],
)
def test_bounds_of_int64_are_accepted(tokenizer: LLTokenizer, schema: Any, text: str, matches: bool) -> None:
    assert allows(tokenizer, text, kind="json", value=json.dumps(schema)) is matches


@pytest.mark.parametrize("name", sorted([*ENFORCED_FORMATS, *ANNOTATIONS]))
def test_known_formats_are_those_of_llguidance(name: str) -> None:
    is_unknown = "Unknown format" in LLMatcher.validate_grammar(
        LLMatcher.grammar_from_json_schema({"type": "string", "format": name})
    )
    assert is_unknown is (name not in ENFORCED_FORMATS)


def test_mask_above_time_limit_is_rejected(tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MAX_MASK_SECONDS", 0.0)
    assert "computing the allowed tokens" in validate_grammar(tokenizer, {"kind": "regex", "value": "[a-z]+"})["error"]


def test_reason_is_one_short_line(tokenizer: LLTokenizer) -> None:
    error = validate_grammar(tokenizer, {"kind": "regex", "value": "(" * 5000})["error"]
    assert len(error) <= MAX_CHARACTERS
    assert "\n" not in error


def test_regex_error_has_its_position(tokenizer: LLTokenizer) -> None:
    assert validate_grammar(tokenizer, {"kind": "regex", "value": "ab(c"})["error"] == "unclosed group, at character 3"
    error = validate_grammar(tokenizer, {"kind": "grammar", "value": "start: foo"})["error"]
    assert error == 'unknown name: "foo", at line 1 column 8', "without the caret drawing"
