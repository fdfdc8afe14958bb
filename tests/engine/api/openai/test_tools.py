"""Requests with tools and responses with calls, against a server whose stub core repeats the prompt."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import ValidationError
from trimtab_engine.api.http.errors import ApiError
from trimtab_engine.api.openai.protocol import ChatMessage, ChatRequest
from trimtab_engine.api.openai.tools import build_tool_use

ECHO = "{% if tools %}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
"""Text echoed by the stub core; naming tools is enough to support them."""
SHOW = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.role }}{{ m.tool_call_id }}"
    "{{ m.tool_calls | default(none) | tojson }}{% endfor %}"
)
CALL = '<tool_call>{"name": "light"}</tool_call>'  # two of them and their echo fit into the stub's context
AS_CALL = ("light", "{}")


def make_tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


LIGHT = make_tool("light", type="object", properties={"on": {"type": "boolean"}}, required=["on"])
TIME = make_tool("time")


@pytest.fixture(scope="module")
def client(start_shared_server: Any) -> openai.OpenAI:
    server = start_shared_server("--chat-template", ECHO, "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, content: str, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": content}]
    return client.chat.completions.create(model="stub", messages=messages, **{"tools": [LIGHT, TIME], **fields})


def called(calls: Any) -> list[tuple[str, str]]:
    assert len({call.id for call in calls}) == len(calls)
    return [(call.function.name, call.function.arguments) for call in calls]


def test_calls_and_text_are_separated(client: openai.OpenAI) -> None:
    choice = chat(client, "!eosOne moment. " + CALL).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("One moment. ", "tool_calls")
    assert called(choice.message.tool_calls) == [AS_CALL]
    plain = chat(client, "!eosjust text").choices[0]
    assert (plain.message.content, plain.message.tool_calls, plain.finish_reason) == ("just text", None, "stop")


def test_streamed_calls_equal_complete_ones(client: openai.OpenAI) -> None:
    text = ""
    calls: list[Any] = []
    reasons: list[str] = []
    for chunk in chat(client, "!eosOne moment. " + CALL + CALL, stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        calls += delta.tool_calls or []
        reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert (text, reasons) == ("One moment. ", ["tool_calls"])
    assert called(calls) == [AS_CALL] * 2
    assert [call.index for call in calls] == [0, 1]


def test_call_with_lone_surrogate_is_returned(client: openai.OpenAI) -> None:
    call = '!eos<tool_call>{"name": "light", "arguments": {"x": "\\ud800"}}</tool_call>'
    expected = [("light", '{"x": "\ufffd"}')]
    assert called(chat(client, call, tools=[LIGHT]).choices[0].message.tool_calls) == expected
    deltas = [chunk.choices[0].delta for chunk in chat(client, call, tools=[LIGHT], stream=True)]
    assert called([call for delta in deltas for call in delta.tool_calls or []]) == expected


def test_parallel_tool_calls_false_keeps_first_call(client: openai.OpenAI) -> None:
    choice = chat(client, "!eos" + CALL + CALL, parallel_tool_calls=False).choices[0]
    assert called(choice.message.tool_calls) == [AS_CALL]
    deltas = [
        chunk.choices[0].delta for chunk in chat(client, "!eos" + CALL + CALL, parallel_tool_calls=False, stream=True)
    ]
    assert called([call for delta in deltas for call in delta.tool_calls or []]) == [AS_CALL]


def test_tool_choice_none_parses_no_calls(client: openai.OpenAI) -> None:
    choice = chat(client, "!eos" + CALL, tool_choice="none").choices[0]
    assert (choice.message.content, choice.finish_reason) == (CALL, "stop")


def test_auto_requires_flags_and_template_with_tools(start_server: Any) -> None:
    for flags, reason in ((("--chat-template", ECHO), "--enable-auto-tool-choice"), ((), "does not support tools")):
        server = start_server(*flags)
        body = {"messages": [{"role": "user", "content": "a"}], "tools": [LIGHT]}
        response = server.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert reason in response.json()["error"]["message"]


def test_template_gets_tools_calls_and_results(start_server: Any) -> None:
    server = start_server("--chat-template", SHOW)
    call = {"id": "c1", "type": "function", "function": {"name": "light", "arguments": '{"on": true}'}}
    body: dict[str, Any] = {
        "messages": [
            {"role": "user", "content": "on!"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "done", "tool_call_id": "c1"},
        ],
        "tools": [LIGHT],
        "tool_choice": "none",
        "max_tokens": 1,
    }
    assert server.http.post("/v1/chat/completions", json=body).status_code == 400  # 256 tokens are not enough
    tokens = server.http.post("/tokenize", json={"messages": body["messages"][1:]}).json()["tokens"]
    text = bytes(tokens).decode()
    assert text.startswith("nullassistant")
    assert '"arguments": {"on": true}' in text
    assert text.endswith("toolc1null")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tools": [LIGHT, LIGHT]}, "two tools have the same name"),
        ({"tools": [LIGHT], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "not one of the tools"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [LIGHT], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [make_tool("no spaces")]}, "name"),
        ({"tools": [{"type": "web_search"}]}, "type"),
        ({"tools": [make_tool(f"f{n}") for n in range(129)]}, "tools"),
        ({"tools": [make_tool("f", enum=["x" * 300_000])]}, "at most"),
        ({"chat_template_kwargs": {"messages": "x"}}, "'messages'"),
        ({"chat_template_kwargs": {f"k{n}": 1 for n in range(17)}}, "chat_template_kwargs"),
    ],
)
def test_invalid_tools_are_rejected(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "function", "content": "x"}, "function"),
        ({"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}, "only role assistant"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "only role tool"),
        ({"role": "assistant"}, "content is missing"),
        ({"role": "tool"}, "content is missing"),
    ],
)
def test_invalid_tool_message_is_rejected(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        ChatMessage.model_validate(message)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"on": true}', {"on": True}),
        ('{"on": tr', {"raw_arguments": '{"on": tr'}),  # truncated by max_tokens
        ("[1]", {"raw_arguments": "[1]"}),
        ("", {}),
        ("null", {}),
    ],
)
def test_arguments_of_earlier_calls_are_objects(text: str, arguments: dict[str, Any]) -> None:
    call = {"function": {"name": "f", "arguments": text}}
    message = ChatMessage.model_validate({"role": "assistant", "tool_calls": [call]}).for_template()
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def output_schema(**fields: Any) -> dict[str, Any]:
    """Return the schema of the output that tool_choice enforces."""
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})
    use = build_tool_use(body, template_knows_tools=True, auto_parser=None, is_constrained=False)
    assert use.constraint is not None
    schema: dict[str, Any] = json.loads(str(use.constraint.value))
    return schema


def test_named_choice_uses_schema_of_function() -> None:
    choice = {"type": "function", "function": {"name": "light"}}
    assert output_schema(tools=[LIGHT, TIME], tool_choice=choice) == LIGHT["function"]["parameters"]


def test_required_choice_is_array_with_shared_definitions() -> None:
    tool = make_tool("f", type="object", properties={"x": {"$ref": "#/$defs/x"}}, **{"$defs": {"x": {"type": "null"}}})
    schema = output_schema(tools=[tool, TIME], tool_choice="required", parallel_tool_calls=False)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert [option["properties"]["name"]["const"] for option in schema["items"]["anyOf"]] == ["f", "time"]
    assert schema["$defs"] == {"x": {"type": "null"}}
    assert "$defs" not in schema["items"]["anyOf"][0]["properties"]["parameters"]


def test_conflicting_definitions_and_constraints_are_rejected() -> None:
    tools = [make_tool(name, type="object", **{"$defs": {"x": {"const": name}}}) for name in ("f", "g")]
    with pytest.raises(ApiError, match="differently"):
        output_schema(tools=tools, tool_choice="required")
    body = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "a"}], "tools": [LIGHT], "tool_choice": "required"}
    )
    with pytest.raises(ApiError, match="remove one"):
        build_tool_use(body, template_knows_tools=True, auto_parser=None, is_constrained=True)


def test_chat_template_may_be_read_from_file(start_server: Any, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("own: {{ messages[0].content }}")
    server = start_server("--chat-template", str(file))
    tokens = server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()["tokens"]
    assert bytes(tokens) == b"own: x"
