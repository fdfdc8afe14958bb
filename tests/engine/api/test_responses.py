"""OpenAI's Responses API with its own client, against a server whose stub core repeats the prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from trimtab_engine.api.responses.store import ResponseStore, StoredResponse

ECHO = "{% if tools %}{% endif %}{% for m in messages %}{{ m.content or '' }}{% endfor %}"
"""Text echoed by the stub core; naming tools is enough to support them."""
CALL = '<tool_call>{"name": "light", "arguments": {"on": true}}</tool_call>'
LIGHT: Any = {"type": "function", "name": "light", "parameters": {"type": "object", "properties": {}}, "strict": False}


@pytest.fixture(scope="module")
def server(start_shared_server: Any) -> Any:
    return start_shared_server(
        "--chat-template", ECHO, "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--reasoning-parser", "deepseek_r1",
    )  # fmt: skip


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as made:
        yield made


def create(client: openai.OpenAI, given: Any, **fields: Any) -> Any:
    return client.responses.create(model="stub", input=given, **fields)


def test_response_has_text_reasoning_and_usage(client: openai.OpenAI) -> None:
    answer = create(client, "!eoshm</think>hello")
    assert answer.output_text == "hello"
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output[0].content[0].text == "hm"
    assert answer.status == "completed"
    assert answer.usage.input_tokens == len("!eoshm</think>hello")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_max_output_tokens_makes_it_incomplete(client: openai.OpenAI) -> None:
    answer = create(client, "!eosx</think>hello", max_output_tokens=11)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[-1].status == "incomplete"


def test_function_call_is_an_item(client: openai.OpenAI) -> None:
    answer = create(client, f"!eosx</think>one {CALL}", tools=[LIGHT])
    call = answer.output[-1]
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "light", {"on": True})
    assert answer.output_text == "one "


def test_stream_builds_the_same_response(client: openai.OpenAI) -> None:
    fields: Any = {"model": "stub", "input": f"!eoshm</think>one {CALL}", "tools": [LIGHT]}
    with client.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    whole = client.responses.create(**fields)

    def shown(answer: Any) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in item.model_dump(exclude_none=True).items() if key not in ("id", "call_id")}
            for item in answer.output
        ]

    def without_parsed(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: value for key, value in item.items() if not key.startswith("parsed")} for item in items]

    assert without_parsed(shown(streamed)) == without_parsed(shown(whole))
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    for kind in ("response.reasoning_text.delta", "response.output_text.delta", "response.output_item.done"):
        assert kind in kinds


def test_events_are_numbered_and_named(server: Any) -> None:
    body = {"input": "!eosx</think>ab", "stream": True}
    text = server.http.post("/v1/responses", json=body).text
    events = [part.split("\n") for part in text.strip().split("\n\n")]
    bodies = [json.loads(lines[1].removeprefix("data: ")) for lines in events]
    assert [body["sequence_number"] for body in bodies] == list(range(len(bodies)))
    assert [f"event: {body['type']}" for body in bodies] == [lines[0] for lines in events]


def test_previous_response_is_continued(client: openai.OpenAI) -> None:
    first = create(client, "!eosa</think>b", instructions="")
    second = create(client, "c</think>d", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens == len("!eosa</think>b" + "b" + "c</think>d")


def test_items_of_a_tool_loop_become_one_conversation(client: openai.OpenAI) -> None:
    first = create(client, f"!eosx</think>{CALL}", tools=[LIGHT])
    given: list[Any] = [{"role": "user", "content": "!eos1"}, *[item.model_dump() for item in first.output]]
    given.append({"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "2</think>3"})
    assert create(client, given, tools=[LIGHT]).output_text == "3"


def test_instructions_precede_but_are_not_inherited(client: openai.OpenAI) -> None:
    first = create(client, "a</think>b", instructions="!eos")
    assert first.output_text == "b"
    second = create(client, "!eos", previous_response_id=first.id, max_output_tokens=1)
    assert second.usage.input_tokens == len("a</think>b" + "b" + "!eos")


def test_stored_response_can_be_read_and_deleted(client: openai.OpenAI) -> None:
    made = create(client, "!eosx</think>b")
    assert client.responses.retrieve(made.id).output_text == "b"
    items = client.responses.input_items.list(made.id)
    assert [item.type for item in items.data] == ["message"]
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_store_false_is_not_stored(client: openai.OpenAI) -> None:
    made = create(client, "!eosx</think>b", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.BadRequestError, match="is not stored"):
        create(client, "a", previous_response_id=made.id)


def test_json_schema_constrains_the_text(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    text: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    made = create(client, "!eos", text=text, max_output_tokens=2)
    assert made.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"background": True}, "background is not supported yet; remove it"),
        ({"tools": [{"type": "web_search"}]}, "tools of type web_search are not supported"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "items of type item_reference are not supported"),
        ({"include": ["message.output_text.logprobs"]}, "is not supported"),
        ({"unknown": 1}, "unrecognized request argument: unknown"),
        ({"previous_response_id": "resp_x"}, "is not stored"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning_effort"),
    ],
)
def test_unsupported_field_is_rejected_by_name(server: Any, fields: dict[str, Any], message: str) -> None:
    answer = server.http.post("/v1/responses", json={"input": "a", **fields})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_failure_after_the_first_event_is_response_failed(server: Any) -> None:
    text = server.http.post("/v1/responses", json={"input": "!fail", "stream": True}).text
    assert text.strip().split("\n\n")[-1].startswith("event: response.failed\n")


def stored(response_id: str, text: str = "") -> StoredResponse:
    return StoredResponse({"id": response_id}, [], [{"role": "user", "content": text}])


def test_store_drops_the_oldest_beyond_its_bounds() -> None:
    store = ResponseStore(max_responses=2, max_bytes=10_000)
    for number in range(3):
        store.put("", stored(str(number)))
    assert [store.get("", str(number)) is not None for number in range(3)] == [False, True, True]
    store.put("", stored("large", "x" * 20_000))
    assert len(store) == 0
    assert store.num_bytes == 0


def test_store_separates_owners() -> None:
    store = ResponseStore()
    store.put("a", stored("1"))
    assert store.get("b", "1") is None
    assert not store.remove("b", "1")
