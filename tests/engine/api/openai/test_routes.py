"""OpenAI routes over HTTP, with the official client and raw requests."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        yield client


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_completion_has_text_usage_and_finish_reason(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="stub", prompt="abc", max_tokens=7)
    assert answer.choices[0].text == "abcabca"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 7, 10)


def test_streamed_completion_equals_complete_one(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="alias", prompt="grüße ", max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
    )
    whole = client.completions.create(model="alias", prompt="grüße ", max_tokens=20)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert all("�" not in chunk.choices[0].text for chunk in chunks[:-2] if chunk.choices)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert {chunk.model for chunk in chunks} == {"alias"}


def test_chat_streams_role_content_and_end(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="stub", messages=[{"role": "user", "content": "!eosParis"}], stream=True
    )
    deltas = [chunk.choices[0] for chunk in stream]
    assert deltas[0].delta.role == "assistant"
    assert "".join(delta.delta.content or "" for delta in deltas) == "Paris"
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["stop"]


def test_chat_without_limit_fills_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="stub", messages=[{"role": "user", "content": "ab"}])
    assert answer.usage is not None
    assert answer.usage.total_tokens == 256
    assert answer.choices[0].finish_reason == "length"


def test_prompt_may_be_token_ids_or_a_list_of_one(client: openai.OpenAI) -> None:
    for prompt in ([97, 98], [[97, 98]], "ab", ["ab"]):
        assert client.completions.create(model="stub", prompt=prompt, max_tokens=3).choices[0].text == "aba"


def test_n_choices_have_different_seeds(server: Any, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="stub", prompt="xy", n=3, seed=40, max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == ["xy"] * 3
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 6)
    assert sorted(sampling["seed"] for sampling in server.core_state()["seen"][-3:]) == [40, 41, 42]


def test_completion_logprobs_format(client: openai.OpenAI) -> None:
    logprobs = client.completions.create(model="stub", prompt="ab", max_tokens=2, logprobs=2).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b"]
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert logprobs.text_offset == [0, 1]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0]["a"] == -0.5


def test_chat_logprobs_format(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="stub", messages=[{"role": "user", "content": "ab"}], max_tokens=1, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    entry = answer.choices[0].logprobs.content[0]
    assert (entry.token, entry.logprob, entry.bytes, len(entry.top_logprobs)) == ("a", -0.5, [97], 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": "def"}, "abc"),
        ({"stop": ["zzz", "ef"]}, "abcd"),
        ({"stop": "def", "include_stop_str_in_output": True}, "abcdef"),
        ({"stop": "efabx"}, "abcdefabcdef"),  # held back, then released
        ({"stop_token_ids": [99]}, "ab"),
    ],
)
def test_stop_cuts_text_streamed_and_complete(server: Any, fields: dict[str, Any], text: str, stream: bool) -> None:
    body = {"model": "stub", "prompt": "abcdef", "max_tokens": 12, "stream": stream, **fields}
    response = server.http.post("/v1/completions", json=body)
    choices = [item["choices"][0] for item in (events(response.text) if stream else [response.json()])]
    assert "".join(choice["text"] for choice in choices) == text
    assert choices[-1]["finish_reason"] == ("length" if len(text) == 12 else "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_that_is_a_special_token_stops(server: Any, stream: bool) -> None:
    """Text without special tokens never contains it, so that it becomes a stop token."""
    body = {"prompt": [97, 98, 257], "max_tokens": 12, "stop": ["zz", "<|pad|>"], "stream": stream}
    response = server.http.post("/v1/completions", json=body)
    choices = [item["choices"][0] for item in (events(response.text) if stream else [response.json()])]
    assert "".join(choice["text"] for choice in choices) == "ab"
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", "<|pad|>")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a\ud83d", ["b", "a\ud83d"]])
def test_echoed_lone_surrogate_is_replacement_character(server: Any, prompt: Any, stream: bool) -> None:
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0, "stream": stream}
    response = server.http.post(
        "/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 200
    answers = events(response.text) if stream else [response.json()]
    assert [choice["text"] for answer in answers for choice in answer["choices"]][-1] == "a\ufffd"


def test_stop_string_frees_sequence_in_core(server: Any) -> None:
    before = server.core_state()["aborted"]
    server.http.post("/v1/completions", json={"prompt": "!slowabc", "max_tokens": 100, "stop": "c"})
    assert server.core_state()["aborted"] == before + 1


def test_stop_strings_are_ignored_before_min_tokens(server: Any) -> None:
    body = {"prompt": "abc", "max_tokens": 12, "min_tokens": 5, "stop": "b"}
    assert server.http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "abcabca"[:7]


def test_models_lists_every_served_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["stub", "alias"]


def test_single_model_can_be_requested(client: openai.OpenAI) -> None:
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_tokenize_takes_a_prompt_or_messages(server: Any) -> None:
    assert server.http.post("/tokenize", json={"prompt": "ab"}).json()["tokens"] == [97, 98]
    answer = server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "c"}]}).json()
    assert (answer["count"], answer["tokens"], answer["max_model_len"]) == (1, [99], 256)


def test_sampling_parameters_reach_core_unchanged(server: Any) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 9,
        "min_p": 0.25,
        "presence_penalty": 1.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "min_tokens": 1,
        "max_tokens": 3,
        "seed": 5,
        "ignore_eos": True,
        "stop_token_ids": [7],
    }
    assert server.http.post("/v1/completions", json={"prompt": "a", **fields}).status_code == 200
    assert server.core_state()["seen"][-1] == fields


def test_request_failing_in_core_does_not_affect_others(server: Any) -> None:
    assert server.http.post("/v1/completions", json={"prompt": "!fail"}).status_code == 500
    streamed = events(server.http.post("/v1/completions", json={"prompt": "!fail", "stream": True}).text)
    assert "message" in streamed[-1]["error"]
    assert server.http.post("/v1/completions", json={"prompt": "ok"}).status_code == 200


def test_fields_without_effect_are_accepted(server: Any) -> None:
    fields: dict[str, Any] = {
        "user": "u",
        "metadata": {"a": "b"},
        "prompt_cache_retention": "24h",
        "n": None,
        "stream": None,
        "store": False,
        "service_tier": "auto",
        "logit_bias": None,
        "tools": [],
    }
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **fields}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200
