"""Token IDs in responses: return_token_ids, return_tokens_as_token_ids, and tokens per chunk."""

import json
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import openai
import pytest
from trimtab_engine.api.http.errors import ApiError
from trimtab_engine.api.openai.planning import check_returned_ids
from trimtab_engine.api.openai.protocol import MAX_RETURNED_IDS, ChatRequest, CompletionRequest

AB, XYZ = [97, 98], [120, 121, 122]


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        yield client


def joined(parts: Iterable[list[int]]) -> list[int]:
    return [token_id for part in parts for token_id in part]


def extra(value: Any, name: str) -> Any:
    assert value.model_extra is not None
    return value.model_extra.get(name)


ASKED: Any = {"return_token_ids": True}


def test_completion_choices_include_prompt_and_output_ids(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="stub", prompt=["ab", "xyz"], n=2, max_tokens=4, extra_body=ASKED)
    assert [extra(choice, "prompt_token_ids") for choice in answer.choices] == [AB, AB, XYZ, XYZ]
    assert [extra(choice, "token_ids") for choice in answer.choices] == [AB * 2, AB * 2, [*XYZ, 120], [*XYZ, 120]]


@pytest.mark.parametrize("interval", [1, 3, 100])
def test_stream_sends_each_token_id_once_and_prompt_first(client: openai.OpenAI, interval: int) -> None:
    body: Any = {**ASKED, "stream_interval": interval}
    chunks = list(
        client.completions.create(model="stub", prompt=["ab", "xyz"], max_tokens=7, stream=True, extra_body=body)
    )
    for index, prompt in enumerate((AB, XYZ)):
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert joined(extra(choice, "token_ids") for choice in choices) == (prompt * 4)[:7]
        assert extra(choices[0], "prompt_token_ids") == prompt
        assert all("prompt_token_ids" not in (choice.model_extra or {}) for choice in choices[1:])
        assert len(choices) <= 2 + 7 // interval


def test_chat_response_has_its_prompt_ids_once(client: openai.OpenAI) -> None:
    request_fields: Any = {
        "model": "stub",
        "messages": [{"role": "user", "content": "ab"}],
        "max_tokens": 3,
        "extra_body": ASKED,
    }
    answer = client.chat.completions.create(**request_fields, n=2)
    assert extra(answer, "prompt_token_ids") == AB
    assert [extra(choice, "token_ids") for choice in answer.choices] == [[97, 98, 97]] * 2
    chunks = list(client.chat.completions.create(**request_fields, stream=True))
    assert [extra(chunk, "prompt_token_ids") for chunk in chunks] == [AB, *[None] * (len(chunks) - 1)]
    assert joined(extra(chunk.choices[0], "token_ids") or [] for chunk in chunks) == [97, 98, 97]


def test_token_ids_are_omitted_by_default(server: Any) -> None:
    text = server.http.post("/v1/completions", json={"prompt": "ab", "max_tokens": 2}).text
    assert "token_ids" not in text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "token_ids"),
    [
        ({"stop": "def"}, list(b"abcdef")),  # the tokens of the stop string were generated, and are counted
        ({"stop": "bc", "min_tokens": 3}, list(b"abcdefabc")),
        ({"stop_token_ids": [99]}, list(b"abc")),
        ({"echo": True}, list(b"abcdefabcdef")),
        ({"echo": True, "max_tokens": 0}, []),
    ],
)
def test_number_of_token_ids_equals_usage(
    server: Any, fields: dict[str, Any], token_ids: list[int], stream: bool
) -> None:
    body = {"prompt": "abcdef", "max_tokens": 12, "stream": stream, **ASKED, **fields}
    if stream:
        body["stream_options"] = {"include_usage": True}
    response = server.http.post("/v1/completions", json=body)
    bodies = (
        [json.loads(line[6:]) for line in response.text.split("\n\n") if line not in ("", "data: [DONE]")]
        if stream
        else [response.json()]
    )
    choices = [choice for body in bodies for choice in body["choices"]]
    assert joined(choice["token_ids"] for choice in choices) == token_ids
    assert bodies[-1]["usage"]["completion_tokens"] == len(token_ids)


@pytest.mark.parametrize(
    ("num_tokens", "n", "is_chat", "is_refused"),
    [(1000, 1, False, False), (1000, 2, False, True), (1001, 1, False, True), (1000, 9, True, False)],
)
def test_returned_prompt_ids_are_limited(num_tokens: int, n: int, is_chat: bool, is_refused: bool) -> None:
    fields = {"n": n, "return_token_ids": True}
    prompts = [range(num_tokens)] * (1 if is_chat else MAX_RETURNED_IDS // 1000)
    body: CompletionRequest | ChatRequest = CompletionRequest.model_validate({"prompt": "a", **fields})
    if is_chat:
        body = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})
    with pytest.raises(ApiError, match="prompt token ids") if is_refused else nullcontext():
        check_returned_ids(body, prompts)


def test_logprobs_can_name_tokens_by_id(client: openai.OpenAI) -> None:
    by_id: Any = {"return_tokens_as_token_ids": True}
    completion = client.completions.create(model="stub", prompt="ab", max_tokens=2, logprobs=1, extra_body=by_id)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["token_id:97", "token_id:98"]
    assert logprobs.text_offset == [0, 1]  # offsets in the text
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0].keys() == {"token_id:97", "token_id:0"}
    chat = client.chat.completions.create(
        model="stub",
        messages=[{"role": "user", "content": "ab"}],
        max_tokens=1,
        logprobs=True,
        top_logprobs=1,
        extra_body=by_id,
    )
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    entry = chat.choices[0].logprobs.content[0]
    assert (entry.token, entry.bytes, entry.top_logprobs[0].token) == ("token_id:97", [97], "token_id:0")


def test_request_id_may_be_in_the_body(server: Any) -> None:
    body = {"prompt": "ab", "max_tokens": 1, "request_id": "mine"}
    answer = server.http.post("/v1/completions", json=body)
    assert (answer.json()["id"], answer.headers["X-Request-Id"]) == ("cmpl-mine", "mine")
    answer = server.http.post("/v1/completions", json=body, headers={"X-Request-Id": "heads"})
    assert (answer.json()["id"], answer.headers["X-Request-Id"]) == ("cmpl-heads", "heads")
