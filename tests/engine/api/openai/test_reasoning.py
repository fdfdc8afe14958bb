"""Responses of reasoning models, against a server whose stub core repeats the prompt."""

import json
from typing import Any

import pytest
from trimtab_engine.api.openai.protocol import ChatMessage

ECHO = "{% if tools %}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
"""Text echoed by the stub core; naming tools is enough to support them."""
CALL = '<tool_call>{"name": "light"}</tool_call>'
LIGHT = {"type": "function", "function": {"name": "light", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def thinking(start_shared_server: Any) -> Any:
    return start_shared_server(
        "--chat-template", ECHO, "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--reasoning-parser", "deepseek_r1",
    )  # fmt: skip


def chat(server: Any, content: str, **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": content}], **fields}
    return server.http.post("/v1/chat/completions", json=body)


def message(server: Any, content: str, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = chat(server, content, **fields).json()["choices"][0]["message"]
    return answer


def test_reasoning_is_returned_under_both_names(thinking: Any) -> None:
    answer = message(thinking, "!eos<think>hm</think>yes")
    assert (answer["content"], answer["reasoning"], answer["reasoning_content"]) == ("yes", "hm", "hm")


def test_truncated_reasoning_leaves_no_content(thinking: Any) -> None:
    answer = message(thinking, "!eoshm, and")
    assert (answer["content"], answer["reasoning"]) == (None, "hm, and")


def test_reasoning_can_be_excluded(thinking: Any) -> None:
    answer = message(thinking, "!eoshm</think>yes", include_reasoning=False)
    assert answer["content"] == "yes"
    assert "reasoning" not in answer


def test_calls_are_parsed_after_reasoning_only(thinking: Any) -> None:
    answer = message(thinking, f"!eos{CALL}?</think>{CALL}", tools=[LIGHT])
    assert answer["reasoning"] == f"{CALL}?"
    assert [call["function"]["name"] for call in answer["tool_calls"]] == ["light"]


def test_stream_equals_complete_response(thinking: Any) -> None:
    events = chat(thinking, f"!eoshm</think>yes {CALL}", tools=[LIGHT], stream=True).text.split("\n\n")
    deltas = [
        json.loads(event.removeprefix("data: "))["choices"][0]["delta"]
        for event in events
        if event.startswith("data: {")
    ]
    for name, text in (("reasoning", "hm"), ("reasoning_content", "hm"), ("content", "yes ")):
        assert "".join(delta.get(name) or "" for delta in deltas) == text
    assert [call["function"]["name"] for delta in deltas for call in delta.get("tool_calls", [])] == ["light"]


def test_grammar_constrained_response_has_no_reasoning(thinking: Any) -> None:
    answer = message(thinking, "!eos[]", tools=[LIGHT], tool_choice="required")
    assert "reasoning" not in answer


def test_no_parser_returns_everything_as_content(start_server: Any) -> None:
    server = start_server("--chat-template", ECHO)
    assert message(server, "!eos<think>hm</think>yes")["content"] == "<think>hm</think>yes"
    refused = chat(server, "a", include_reasoning=False)
    assert refused.status_code == 400
    assert "--reasoning-parser" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "include_reasoning"


def test_reasoning_of_earlier_response_reaches_the_template() -> None:
    expected = ChatMessage(role="assistant", content="yes", reasoning="hm")
    assert expected.for_template() == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    older = ChatMessage(role="assistant", content=None, reasoning_content="hm")
    assert older.for_template()["reasoning_content"] == "hm"
    with pytest.raises(ValueError, match="a message of role user has reasoning"):
        ChatMessage(role="user", content="a", reasoning="hm")
