"""Requests about tools, and answers with calls, against a server whose stub core writes what the prompt says."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import ValidationError
from trimtab_engine.api.http.errors import ApiError
from trimtab_engine.api.openai.protocol import ChatMessage, ChatRequest
from trimtab_engine.api.openai.tools import tool_use_of

ECHO = "{% if tools %}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
"""What the stub core echoes; that it names tools is enough to know them."""
SHOW = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.role }}{{ m.tool_call_id }}"
    "{{ m.tool_calls | default(none) | tojson }}{% endfor %}"
)
CALL = '<tool_call>{"name": "light"}</tool_call>'  # two of them and their echo fit into the stub's context
AS_CALL = ("light", "{}")


def a_tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


LIGHT = a_tool("light", type="object", properties={"on": {"type": "boolean"}}, required=["on"])
TIME = a_tool("time")


@pytest.fixture(scope="module")
def client(start_shared_server: Any) -> openai.OpenAI:
    server = start_shared_server("--chat-template", ECHO, "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, content: str, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": content}]
    return client.chat.completions.create(model="stub", messages=messages, **{"tools": [LIGHT, TIME], **fields})


def called(calls: Any) -> list[tuple[str, str]]:
    assert len({call.id for call in calls}) == len(calls)
    return [(call.function.name, call.function.arguments) for call in calls]


def test_a_call_comes_as_a_call_and_text_as_text(client: openai.OpenAI) -> None:
    choice = ask(client, "!eosOne moment. " + CALL).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("One moment. ", "tool_calls")
    assert called(choice.message.tool_calls) == [AS_CALL]
    plain = ask(client, "!eosjust text").choices[0]
    assert (plain.message.content, plain.message.tool_calls, plain.finish_reason) == ("just text", None, "stop")


def test_streamed_calls_are_the_same(client: openai.OpenAI) -> None:
    text = ""
    calls: list[Any] = []
    reasons: list[str] = []
    for chunk in ask(client, "!eosOne moment. " + CALL + CALL, stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        calls += delta.tool_calls or []
        reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert (text, reasons) == ("One moment. ", ["tool_calls"])
    assert called(calls) == [AS_CALL] * 2
    assert [call.index for call in calls] == [0, 1]


def test_without_parallel_calls_only_the_first_is_kept(client: openai.OpenAI) -> None:
    choice = ask(client, "!eos" + CALL + CALL, parallel_tool_calls=False).choices[0]
    assert called(choice.message.tool_calls) == [AS_CALL]
    deltas = [
        chunk.choices[0].delta for chunk in ask(client, "!eos" + CALL + CALL, parallel_tool_calls=False, stream=True)
    ]
    assert called([call for delta in deltas for call in delta.tool_calls or []]) == [AS_CALL]


def test_tool_choice_none_reads_no_calls(client: openai.OpenAI) -> None:
    choice = ask(client, "!eos" + CALL, tool_choice="none").choices[0]
    assert (choice.message.content, choice.finish_reason) == (CALL, "stop")


def test_auto_needs_its_flags_and_tools_a_template_that_knows_them(start_server: Any) -> None:
    for flags, reason in ((("--chat-template", ECHO), "--enable-auto-tool-choice"), ((), "knows no tools")):
        server = start_server(*flags)
        body = {"messages": [{"role": "user", "content": "a"}], "tools": [LIGHT]}
        response = server.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert reason in response.json()["error"]["message"]


def test_the_template_sees_tools_calls_and_their_results(start_server: Any) -> None:
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
        ({"tools": [LIGHT, LIGHT]}, "two tools have one name"),
        ({"tools": [LIGHT], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "not among the tools"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [LIGHT], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [a_tool("no spaces")]}, "name"),
        ({"tools": [{"type": "web_search"}]}, "type"),
        ({"tools": [a_tool(f"f{n}") for n in range(129)]}, "tools"),
        ({"tools": [a_tool("f", enum=["x" * 300_000])]}, "at most"),
        ({"chat_template_kwargs": {"messages": "x"}}, "'messages'"),
        ({"chat_template_kwargs": {f"k{n}": 1 for n in range(17)}}, "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "function", "content": "x"}, "function"),
        ({"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}, "only the assistant's"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "only the tool's"),
        ({"role": "assistant"}, "content is missing"),
        ({"role": "tool"}, "content is missing"),
    ],
)
def test_a_message_that_cannot_be_is_refused(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        ChatMessage.model_validate(message)


def test_arguments_that_are_no_json_are_refused_when_they_are_written() -> None:
    call = {"function": {"name": "f", "arguments": "{broken"}}
    with pytest.raises(ValueError, match="not JSON"):
        ChatMessage.model_validate({"role": "assistant", "tool_calls": [call]}).for_template()


def the_schema(**fields: Any) -> dict[str, Any]:
    """What tool_choice makes the output match."""
    body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})
    use = tool_use_of(body, template_knows_tools=True, auto_parser=None, is_constrained=False)
    assert use.constraint is not None
    schema: dict[str, Any] = json.loads(str(use.constraint.value))
    return schema


def test_a_named_choice_is_the_functions_own_schema() -> None:
    choice = {"type": "function", "function": {"name": "light"}}
    assert the_schema(tools=[LIGHT, TIME], tool_choice=choice) == LIGHT["function"]["parameters"]


def test_a_required_choice_is_an_array_of_any_of_them_with_definitions_on_top() -> None:
    tool = a_tool("f", type="object", properties={"x": {"$ref": "#/$defs/x"}}, **{"$defs": {"x": {"type": "null"}}})
    schema = the_schema(tools=[tool, TIME], tool_choice="required", parallel_tool_calls=False)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert [option["properties"]["name"]["const"] for option in schema["items"]["anyOf"]] == ["f", "time"]
    assert schema["$defs"] == {"x": {"type": "null"}}
    assert "$defs" not in schema["items"]["anyOf"][0]["properties"]["parameters"]


def test_definitions_that_contradict_each_other_and_two_constraints_are_refused() -> None:
    tools = [a_tool(name, type="object", **{"$defs": {"x": {"const": name}}}) for name in ("f", "g")]
    with pytest.raises(ApiError, match="differently"):
        the_schema(tools=tools, tool_choice="required")
    body = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "a"}], "tools": [LIGHT], "tool_choice": "required"}
    )
    with pytest.raises(ApiError, match="leave out one"):
        tool_use_of(body, template_knows_tools=True, auto_parser=None, is_constrained=True)


def test_a_models_own_template_can_be_read_from_a_file(start_server: Any, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("own: {{ messages[0].content }}")
    server = start_server("--chat-template", str(file))
    tokens = server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()["tokens"]
    assert bytes(tokens) == b"own: x"
