"""Grammars accepted and rejected by validation; its processes are tested in api/openai/test_grammar_validation.py."""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer
from trimtab_engine.structured import validation
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
