"""Model output gives the same calls and text, complete or split at any position."""

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
from trimtab_engine.api.openai.tool_parsers import PARSERS, ToolParser
from trimtab_engine.api.openai.tool_parsers.enforced import NamedParser, RequiredParser
from trimtab_engine.api.openai.tool_parsers.llama3_json import Llama3JsonParser

F = '{"name": "f", "arguments": {"a": "<b>", "n": [1, {"x": "}"}]}}'
G = '{"name": "g", "parameters": {}}'
PYTHON_F = 'f(a="<b>", n=[1, {"x": "}"}])'
ARGUMENTS = {"f": {"a": "<b>", "n": [1, {"x": "}"}]}, "g": {}}


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str | None, str]]]:
    """Return all content, and each call's name and arguments."""
    parsed = [parser.push(piece) for piece in pieces] + [parser.flush()]
    calls: dict[int, tuple[str | None, str]] = {}
    for delta in [delta for part in parsed for delta in part.calls]:
        name, arguments = calls.get(delta.index, (None, ""))
        assert name is None or delta.name is None  # a name appears once, first
        calls[delta.index] = (name or delta.name, arguments + delta.arguments)
    assert list(calls) == list(range(len(calls)))
    return "".join(part.content for part in parsed), list(calls.values())


def torn(text: str, seed: int) -> list[str]:
    choose = random.Random(seed)
    cuts = sorted(choose.sample(range(len(text) + 1), min(len(text), choose.randrange(1, 40))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", f"<tool_call>\n{F}\n</tool_call>", "", ["f"]),
        (
            "hermes",
            f"Let me see.<tool_call>{F}</tool_call>\n<tool_call>\n{G}\n</tool_call>\n",
            "Let me see.",
            ["f", "g"],
        ),
        ("hermes", f"<tool_call>{F}", "", ["f"]),  # the end of the response also ends the call
        ("hermes", "a < b <tool_cal", "a < b <tool_cal", []),
        ("hermes", "<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
        ("hermes", f"<tool_call>{{}}</tool_call><tool_call>{G}</tool_call>", "<tool_call>{}</tool_call>", ["g"]),
        ("hermes", "just text", "just text", []),
        ("llama3_json", F, "", ["f"]),
        ("llama3_json", f"<|python_tag|>{F}; {G}", "", ["f", "g"]),
        ("llama3_json", f"{F}; <|python_tag|>{G}", "", ["f", "g"]),
        ("llama3_json", f"<|python_tag|>{F};<|python_tag|> {G} ; <|python_tag|>{F}", "", ["f", "g", "f"]),
        ("llama3_json", f"\n{G}\n", "", ["g"]),
        ("llama3_json", '{"no": "call"}', '{"no": "call"}', []),
        ("llama3_json", '{"name": "f", "para', '{"name": "f", "para', []),
        ("llama3_json", f"Well: {F}", f"Well: {F}", []),
        ("llama3_json", "", "", []),
        ("llama3_json", '{"name": "Alice", "age": 3}', '{"name": "Alice", "age": 3}', []),
        ("llama3_json", f"{F} calls f", "calls f", ["f"]),
        ("llama3_json", f'{F}; {{"name": "Alice"}} }} x', '{"name": "Alice"} } x', ["f"]),
        ("llama3_json", f"{F}; {G} <|python_tag|>{G} ", "", ["f", "g", "g"]),
        ("hermes", '<tool_call>{"name": "f</tool_call>', '<tool_call>{"name": "f</tool_call>', []),
        (
            "hermes",
            f'<tool_call>{{"name": "f}}</tool_call> <tool_call>{G}</tool_call>',
            '<tool_call>{"name": "f}</tool_call> ',
            ["g"],
        ),
        (
            "hermes",
            f'<tool_call>{{"name": "f}}\n</tool_call> so <tool_call>{G}</tool_call>',
            '<tool_call>{"name": "f}\n</tool_call> so ',
            ["g"],
        ),
        ("hermes", f'<tool_call>the "hi</tool_call><tool_call>{G}', '<tool_call>the "hi</tool_call>', ["g"]),
        ("pythonic", f"[{PYTHON_F}]", "", ["f"]),
        ("pythonic", f"\n[ {PYTHON_F}, g() ]\n", "", ["f", "g"]),
        ("llama4_pythonic", f"<|python_start|>[g(), {PYTHON_F}]<|python_end|>", "", ["g", "f"]),
        ("pythonic", f"[g(), {PYTHON_F}", "", ["g", "f"]),
        ("pythonic", "[g(), f(a=", "", ["g"]),  # truncated
        ("pythonic", "[g(), f(1)] and so on", "f(1)] and so on", ["g"]),
        ("pythonic", f"[g(), {PYTHON_F}] and so on", "and so on", ["g", "f"]),
        ("pythonic", "<|python_start|>[g()]<|python_end|> so", "so", ["g"]),
        ("pythonic", "[g()] [f(", "[f(", ["g"]),
        ("pythonic", f"Well: [{PYTHON_F}]", f"Well: [{PYTHON_F}]", []),
        ("pythonic", "[1, 2]", "[1, 2]", []),
        ("pythonic", "[f]", "[f]", []),
        ("pythonic", "[f(a=g())]", "[f(a=g())]", []),
        ("pythonic", "[f(**{'a': 1})]", "[f(**{'a': 1})]", []),
        ("pythonic", "[f(a=", "[f(a=", []),
        ("pythonic", "<|python_sta", "<|python_sta", []),
        ("pythonic", "", "", []),
    ],
)
def test_parser_separates_calls_and_text(name: str, text: str, content: str, calls: list[str]) -> None:
    expected = [(call, json.dumps(ARGUMENTS[call])) for call in calls]
    assert read(PARSERS[name](), [text]) == (content, expected)
    assert read(PARSERS[name](), list(text)) == (content, expected)
    for seed in range(30):
        assert read(PARSERS[name](), torn(text, seed)) == (content, expected)


def check_all_splits(name: str, text: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    """`calls` in any split of the text, with the offered functions f and g."""
    for pieces in ([text], list(text), *(torn(text, seed) for seed in range(30))):
        found = read(PARSERS[name](("f", "g")), pieces)
        assert (found[0], [(call, json.loads(arguments)) for call, arguments in found[1]]) == (content, calls)


@pytest.mark.parametrize(
    "value", ["</tool_call>", "<tool_call>", '\\"</tool_call>', "<tool_call>{}</tool_call>", "<", "</tool"]
)
def test_markers_inside_strings_are_part_of_the_call(value: str) -> None:
    call = json.dumps({"name": "f", "arguments": {"x": value}})
    expected = [("f", {"x": value}), ("g", {})]
    check_all_splits("hermes", f"<tool_call>\n{call}\n</tool_call>\n<tool_call>{G}</tool_call>", "", expected)
    check_all_splits("hermes", f"<tool_call>{call}", "", expected[:1])


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (json.dumps('{"x": "é"}'), {"x": "é"}),
        ("null", {}),
        ('""', {}),
        ('" "', {}),
        ('"null"', {}),
        ("{}", {}),
        ('{"x": 1e999, "y": -1e999}', {"x": sys.float_info.max, "y": -sys.float_info.max}),
    ],
)
def test_arguments_are_the_json_text_of_an_object(arguments: str, value: dict[str, Any]) -> None:
    call = f'{{"name": "f", "arguments": {arguments}}}'
    check_all_splits("hermes", f"<tool_call>{call}</tool_call>", "", [("f", value)])
    check_all_splits("llama3_json", call, "", [("f", value)])


@pytest.mark.parametrize("arguments", ["NaN", '{"x": -Infinity}', '"Paris"', "[1]", "3", '"{\\"x\\": NaN}"'])
def test_arguments_without_an_object_are_not_a_call(arguments: str) -> None:
    call = f'{{"name": "f", "arguments": {arguments}}}'
    check_all_splits("hermes", f"<tool_call>{call}</tool_call>", f"<tool_call>{call}</tool_call>", [])
    check_all_splits("llama3_json", call, call, [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_json", '{"name": "Alice", "parameters": {"age": 3}}'),
        ("llama3_json", '<|python_tag|>{"name": "Alice", "arguments": {}}'),
        ("pythonic", '[print(end="x")] is python'),
    ],
)
def test_answer_that_names_no_offered_function_is_text(name: str, text: str) -> None:
    check_all_splits(name, text, text, [])


def test_many_unmatched_quotes_are_text() -> None:
    text = '<tool_call>{"\\"</tool_call>' * 3000
    assert read(PARSERS["hermes"](), [text]) == (text, [])


def test_required_arguments_are_valid_json() -> None:
    text = '[{"name": "f", "parameters": {"x": 1e999}}, {"name": "f", "parameters": "any"}]'
    assert read(RequiredParser(), [text]) == ("", [("f", f'{{"x": {sys.float_info.max}}}'), ("f", '"any"')])


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("-1.5", -1.5),
        ("True", True),
        ("false", False),
        ("None", None),
        ("null", None),
        ("(1, 'a)\\'')", [1, "a)'"]),
        ("{'k': {'': [-2]}}", {"k": {"": [-2]}}),
        ('"é\\n"', "é\n"),
    ],
)
def test_python_arguments_are_literals(literal: str, value: Any) -> None:
    for pieces in ([f"[a.b-c(x={literal})]"], list(f"[a.b-c(x={literal})]")):
        content, [(name, arguments)] = read(PARSERS["pythonic"](), pieces)
        assert (content, name, json.loads(arguments)) == ("", "a.b-c", {"x": value})


@pytest.mark.parametrize("argument", ["b'x'", "1j", "...", "{**{}}", "{1: 2}[1]", "-True", "open('x')", "x", "1e999"])
def test_non_json_literal_is_not_a_call(argument: str) -> None:
    text = f"[f(x={argument})]"
    assert read(PARSERS["pythonic"](), [text]) == (text, [])


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (
            PARSERS["hermes"],
            '<tool_call>{"name": "f\\ud800", "arguments": {"x": "a\\ud83d\\ude00\\udc00"}}</tool_call>',
        ),
        (PARSERS["hermes"], '<tool_call>{"name": "f\\ud800", "arguments": {"x": "a\\ud83d\\ude00\\udc00"}}'),
        (PARSERS["llama3_json"], '{"name": "f\\ud800", "parameters": {"x": "a\\ud83d\\ude00\\udc00"}}'),
        (RequiredParser, '[{"name": "f\\ud800", "parameters": {"x": "a\\ud83d\\ude00\\udc00"}}]'),
    ],
)
def test_lone_surrogate_in_call_becomes_replacement_character(parser: Callable[[], ToolParser], text: str) -> None:
    for pieces in ([text], list(text)):
        assert read(parser(), pieces) == ("", [("f\ufffd", '{"x": "a😀\ufffd"}')])


def test_lone_surrogate_in_python_call_becomes_replacement_character() -> None:
    text = "[f(x='a\\ud83d\\ude00\\udc00')]"
    for pieces in ([text], list(text)):
        assert read(PARSERS["pythonic"](), pieces) == ("", [("f", '{"x": "a😀\ufffd"}')])


def test_text_before_a_call_is_returned_at_once() -> None:
    assert PARSERS["hermes"]().push("Let me <b>").content == "Let me <b>"
    assert PARSERS["llama3_json"]().push("Let me ").content == "Let me "


def test_required_calls_are_emitted_when_complete() -> None:
    text = f"[{F.replace('arguments', 'parameters')}, {G}]"
    expected = [(call, json.dumps(ARGUMENTS[call])) for call in ("f", "g")]
    for pieces in ([text], list(text), torn(text, 1), torn(text, 2)):
        assert read(RequiredParser(), pieces) == ("", expected)
    first = RequiredParser().push(text[: text.index(G) - 2])
    assert [call.name for call in first.calls] == ["f"]


def test_truncated_required_response_keeps_complete_calls() -> None:
    assert read(RequiredParser(), [f'[{G}, {{"name": "f", "par']) == ("", [("g", "{}")])
    assert read(RequiredParser(), ['[{"name": "f"']) == ('[{"name": "f"', [])


def test_named_call_streams_its_arguments() -> None:
    assert read(NamedParser("f"), ['{"a"', "", ": 1}"]) == ("", [("f", '{"a": 1}')])


def test_long_call_is_decoded_once_for_any_split() -> None:
    parser = Llama3JsonParser()
    looks: list[int] = []
    really_decode = parser._decoder.raw_decode

    def raw_decode(text: str) -> Any:
        looks.append(len(text))
        return really_decode(text)

    parser._decoder.raw_decode = raw_decode  # type: ignore[assignment, method-assign]  # counts
    nested = {"list": [{"x": "}{" * 3, "y": '\\"}'} for _ in range(2000)]}
    text = json.dumps({"name": "f", "parameters": nested})
    assert read(parser, [text[i : i + 3] for i in range(0, len(text), 3)]) == ("", [("f", json.dumps(nested))])
    assert len(looks) == 1
