"""What a trial lets through and what it refuses; the processes around it are in api/openai/test_grammar_trials.py."""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer
from trimtab_engine.structured import trial
from trimtab_engine.structured.matcher import GrammarMatcher
from trimtab_engine.structured.reasons import MAX_CHARACTERS
from trimtab_engine.structured.trial import try_grammar
from trimtab_engine.structured.vocabulary import read_vocabulary

OBJECT = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> LLTokenizer:
    return read_vocabulary(str(tokenizer_folder), 258, (256,)).build()


def allows(tokenizer: LLTokenizer, text: str, **spec: Any) -> bool:
    """Whether this whole text, and then the end, matches."""
    matcher = GrammarMatcher.of(tokenizer, try_grammar(tokenizer, spec)["grammar"])
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
def test_a_grammar_matches_what_it_says(tokenizer: LLTokenizer, spec: dict[str, Any], text: str, matches: bool) -> None:
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
def test_what_is_no_grammar_is_refused_with_a_reason(tokenizer: LLTokenizer, spec: dict[str, Any], reason: str) -> None:
    assert reason in try_grammar(tokenizer, spec)["error"]


def test_a_mask_above_its_limit_is_refused(tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MAX_MASK_SECONDS", 0.0)
    assert "what may come next" in try_grammar(tokenizer, {"kind": "regex", "value": "[a-z]+"})["error"]


def test_a_reason_is_one_short_line(tokenizer: LLTokenizer) -> None:
    error = try_grammar(tokenizer, {"kind": "regex", "value": "(" * 5000})["error"]
    assert len(error) <= MAX_CHARACTERS
    assert "\n" not in error


def test_of_a_regular_expression_it_is_said_what_is_wrong_and_where(tokenizer: LLTokenizer) -> None:
    assert try_grammar(tokenizer, {"kind": "regex", "value": "ab(c"})["error"] == "unclosed group, at character 3"
    error = try_grammar(tokenizer, {"kind": "grammar", "value": "start: foo"})["error"]
    assert error == 'unknown name: "foo", at line 1 column 8', "without the drawing below it"
