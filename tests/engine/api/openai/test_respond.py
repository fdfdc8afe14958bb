"""Complete and streamed responses to several prompts, echoed prompts, their log-probabilities, and usage."""

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


def text_of(chunks: list[Any], index: int) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index)


PROMPT_LISTS = [["ab", "xyz"], [[97, 98], [120, 121, 122]]]


@pytest.mark.parametrize("prompts", PROMPT_LISTS)
def test_choices_are_numbered_prompt_by_prompt(client: openai.OpenAI, prompts: Any) -> None:
    answer = client.completions.create(model="stub", prompt=prompts, n=2, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["abab", "abab", "xyzx", "xyzx"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 16)


def test_several_prompts_stream_concurrently(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    chunks = list(
        client.completions.create(model="stub", prompt=["ab", "xyz"], max_tokens=4, stream=True, stream_options=options)
    )
    assert [text_of(chunks, index) for index in (0, 1)] == ["abab", "xyzx"]
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (5, 8)


def test_prompt_in_a_list_samples_as_a_single_prompt(server: Any) -> None:
    server.http.post("/v1/completions", json={"prompt": ["ab", "cd"], "n": 2, "seed": 40, "max_tokens": 1})
    assert sorted(sampling["seed"] for sampling in server.core_state()["seen"][-4:]) == [40, 40, 41, 41]


@pytest.mark.parametrize("prompt", ["ab", [97, 98], ["ab"]])
def test_echoed_prompt_precedes_its_continuation(client: openai.OpenAI, prompt: Any) -> None:
    answer = client.completions.create(model="stub", prompt=prompt, echo=True, max_tokens=3)
    assert answer.choices[0].text == "ab" + "aba"
    chunks = list(client.completions.create(model="stub", prompt=prompt, echo=True, max_tokens=3, stream=True))
    assert text_of(chunks, 0) == "ab" + "aba"


def test_echo_with_zero_max_tokens_returns_prompt_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="stub", prompt=["abc", "de"], echo=True, max_tokens=0, logprobs=2)
    first, second = answer.choices
    assert (first.text, second.text) == ("abc", "de")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    assert first.logprobs is not None
    assert first.logprobs.tokens == ["a", "b", "c"]
    assert first.logprobs.token_logprobs == [None, -0.25, -0.25]
    assert first.logprobs.text_offset == [0, 1, 2]
    assert first.logprobs.top_logprobs is not None
    assert first.logprobs.top_logprobs[0] is None
    assert first.logprobs.top_logprobs[1]["b"] == -0.25


@pytest.mark.parametrize("stream", [False, True])
def test_echoed_and_generated_tokens_share_logprobs_list(server: Any, stream: bool) -> None:
    body = {"prompt": "abc", "echo": True, "max_tokens": 2, "logprobs": 0, "stream": stream}
    response = server.http.post("/v1/completions", json=body)
    choices = [item["choices"][0] for item in (events(response.text) if stream else [response.json()])]
    assert [token for choice in choices for token in choice["logprobs"]["tokens"]] == ["a", "b", "c", "a", "b"]
    assert [offset for choice in choices for offset in choice["logprobs"]["text_offset"]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
    ],
)
def test_prompt_logprobs_are_keyed_by_token_id(server: Any, path: str, fields: dict[str, Any]) -> None:
    answer = server.http.post(path, json={**fields, "max_tokens": 1, "prompt_logprobs": 1}).json()
    assert ("prompt_logprobs" in answer) is ("messages" in fields)  # vLLM's places: chats have one prompt
    assert ("prompt_logprobs" in answer["choices"][0]) is ("prompt" in fields)
    holder = answer if "messages" in fields else answer["choices"][0]
    first, second, third = holder["prompt_logprobs"]
    assert first is None
    assert second["98"] == {"logprob": -0.25, "rank": 1, "decoded_token": "b"}
    assert second["0"]["rank"] == 1
    assert set(third) == {"99", "0"}


def test_chat_choices_share_prompt_logprobs(server: Any) -> None:
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 1, "prompt_logprobs": 0, "n": 2}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    assert [position and list(position) for position in answer["prompt_logprobs"]] == [None, ["98"], ["99"]]
    assert all("prompt_logprobs" not in choice for choice in answer["choices"])


def test_usage_reports_cached_prompt_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="stub", prompt=["abcd", "xy"], n=2, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3 + 1  # the stub caches all but the last token


def test_continuous_usage_is_in_every_chunk(server: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "ab", "max_tokens": 3, "stream": True, "stream_options": options}
    counts = [
        item["usage"]["completion_tokens"] for item in events(server.http.post("/v1/completions", json=body).text)
    ]
    assert counts == [1, 2, 3, 3]


def test_usage_is_null_in_other_chunks_by_default(server: Any) -> None:
    body = {"prompt": "ab", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events(server.http.post("/v1/completions", json=body).text)
    assert [item["usage"] is None for item in chunks] == [True, True, False]
    plain = events(server.http.post("/v1/completions", json={**body, "stream_options": None}).text)
    assert all("usage" not in item for item in plain)


def test_salt_and_priority_reach_the_core(server: Any) -> None:
    server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "cache_salt": "s", "priority": -3})
    assert server.core_state()["added"][-1] == {"cache_salt": "s", "priority": -3}


def test_stream_interval_joins_tokens_except_the_first(start_server: Any) -> None:
    server = start_server("--stream-interval", "3")
    response = server.http.post("/v1/completions", json={"prompt": "abcdefgh", "max_tokens": 8, "stream": True})
    assert [item["choices"][0]["text"] for item in events(response.text)] == ["a", "bcd", "efg", "h"]


def test_request_log_has_no_text(start_server: Any) -> None:
    server = start_server("--enable-log-requests")
    headers = {"X-Request-Id": "trace-me-7"}
    server.http.post("/v1/completions", json={"prompt": "secret", "max_tokens": 1}, headers=headers)
    log = server.log.read_text()
    assert "Received request cmpl-trace-me-7: 1 prompts of 6 tokens" in log
    assert "secret" not in log


def test_large_response_is_whole_and_too_large_is_rejected(
    server: Any,
) -> None:
    body = {"prompt": [97, 98] * 50, "prompt_logprobs": 20, "n": 4, "max_tokens": 2}
    choices = server.http.post("/v1/completions", json=body).json()["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [100] * 4
    chat = {"messages": [{"role": "user", "content": "ab"}], "logprobs": True, "top_logprobs": 20, "n": 24}
    refused = server.http.post("/v1/chat/completions", json=chat)  # 254 tokens each by default
    assert refused.status_code == 400
    assert "set max_tokens" in refused.json()["error"]["message"]
    server.wait_for(lambda: server.core_state()["running"] == 0, "the abort of running choices")
