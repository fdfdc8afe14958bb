"""Anthropic's Messages API with its own client, against a server whose stub core repeats the prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

ECHO = "{% if tools %}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
"""Text echoed by the stub core; naming tools is enough to support them."""
CALL = '<tool_call>{"name": "light", "arguments": {"on": true}}</tool_call>'
LIGHT: Any = {"name": "light", "description": "Switch it", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def server(start_shared_server: Any) -> Any:
    return start_shared_server(
        "--chat-template", ECHO, "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--reasoning-parser", "deepseek_r1", "--api-key", "k",
    )  # fmt: skip


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="k", max_retries=0) as made:
        yield made


def create(client: anthropic.Anthropic, content: Any, **fields: Any) -> Any:
    messages: Any = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return client.messages.create(**{"model": "stub", "max_tokens": 200, "messages": messages, **fields})


def test_answer_has_text_stop_reason_and_usage(client: anthropic.Anthropic) -> None:
    answer = create(client, "!eosx</think>hello")
    assert [block.text for block in answer.content] == ["hello"]
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == ("assistant", "end_turn", None)
    assert answer.usage.output_tokens > 0
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == len("!eosx</think>hello")


def test_max_tokens_and_stop_sequences_end_the_answer(client: anthropic.Anthropic) -> None:
    assert create(client, "!eosx</think>hello", max_tokens=3).stop_reason == "max_tokens"
    stopped = create(client, "!eosx</think>hello", stop_sequences=["ll"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == ("he", "stop_sequence", "ll")


def test_thinking_is_a_block_if_enabled(client: anthropic.Anthropic) -> None:
    answer = create(client, "!eoshm</think>yes", thinking={"type": "enabled", "budget_tokens": 1024})
    assert [(block.type, getattr(block, "thinking", None)) for block in answer.content] == [
        ("thinking", "hm"),
        ("text", None),
    ]
    assert [block.type for block in create(client, "!eoshm</think>yes").content] == ["text"]


def test_tool_use_has_name_and_input(client: anthropic.Anthropic) -> None:
    answer = create(client, f"!eosx</think>one {CALL}", tools=[LIGHT])
    assert [block.type for block in answer.content] == ["text", "tool_use"]
    assert (answer.content[1].name, answer.content[1].input) == ("light", {"on": True})
    assert answer.stop_reason == "tool_use"


def test_stream_equals_complete_answer(client: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": f"!eoshm</think>one {CALL}"}]
    fields: Any = {"tools": [LIGHT], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    with client.messages.stream(model="stub", max_tokens=200, messages=messages, **fields) as stream:
        streamed = stream.get_final_message()
    whole = create(client, messages, **fields)

    def shown(message: Any) -> list[dict[str, Any]]:
        return [block.model_dump(exclude={"id", "citations", "caller"}) for block in message.content]

    assert shown(streamed) == shown(whole)
    assert streamed.stop_reason == whole.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_tool_loop_reaches_the_template_in_order(client: anthropic.Anthropic) -> None:
    conversation = [
        {"role": "user", "content": "!eosa"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}},
                {"type": "tool_use", "id": "t1", "name": "light", "input": {"on": True}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "c"}]},
                {"type": "text", "text": "d</think>e"},
            ],
        },
    ]
    answer = create(client, conversation, tools=[LIGHT], system=[{"type": "text", "text": ""}])
    assert answer.content[0].text == "e"


def test_system_precedes_the_messages(client: anthropic.Anthropic) -> None:
    assert create(client, "x</think>b", system="!eos").content[0].text == "b"


def test_last_assistant_message_is_continued(server: Any) -> None:
    body = {"model": "stub", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
    body["messages"].append({"role": "assistant", "content": "b"})  # type: ignore[attr-defined]
    assert server.http.post("/v1/messages", json=body, headers={"x-api-key": "k"}).status_code == 200


def test_count_tokens_equals_usage(client: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "!eosx</think>hello"}]
    counted = client.messages.count_tokens(model="stub", messages=messages, system="s", tools=[LIGHT])
    assert counted.input_tokens == len("s!eosx</think>hello")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 2.0}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "runs on Anthropic's servers"),
        ({"tool_choice": {"type": "tool"}}, "name is required with type tool"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"unknown": 1}, "unrecognized request argument: unknown"),
        ({"mcp_servers": [{"name": "a"}]}, "mcp_servers"),
    ],
)
def test_invalid_field_is_an_error_in_anthropic_format(server: Any, fields: dict[str, Any], message: str) -> None:
    body = {"model": "stub", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}], **fields}
    answer = server.http.post("/v1/messages", json=body, headers={"x-api-key": "k"})
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert message in answer.json()["error"]["message"]


def test_errors_have_the_classes_of_the_client(client: anthropic.Anthropic, server: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        create(client, "a", model="other")
    url = f"http://127.0.0.1:{server.port}"
    with (
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as wrong,
        pytest.raises(anthropic.AuthenticationError),
    ):
        create(wrong, "a")


def test_events_have_names_and_no_done(server: Any) -> None:
    body = {
        "model": "stub",
        "max_tokens": 3,
        "stream": True,
        "messages": [{"role": "user", "content": "!eosx</think>a"}],
    }
    text = server.http.post("/v1/messages", json=body, headers={"x-api-key": "k"}).text
    events = [part.split("\n") for part in text.strip().split("\n\n")]
    assert events[0][0] == "event: message_start"
    assert events[-1] == ["event: message_stop", 'data: {"type":"message_stop"}']
    assert all(json.loads(lines[1][6:])["type"] == lines[0][7:] for lines in events)


def test_failure_after_the_first_event_is_an_error_event(server: Any) -> None:
    body = {"model": "stub", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "!fail"}]}
    text = server.http.post("/v1/messages", json=body, headers={"x-api-key": "k"}).text
    assert text.strip().split("\n\n")[-1].startswith("event: error\n")
