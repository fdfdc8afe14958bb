"""POST /v1/embeddings over HTTP, with the official client and raw requests, on a core with known vectors: length, first
four tokens, a third; and a 9 if normalization was requested.
"""

import base64
import struct
import threading
from array import array
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest
from trimtab_engine.api.openai import embedding_request
from trimtab_engine.api.openai.embedding_routes import _to_base64, _to_json_list

PATH = "/v1/embeddings"
THIRD = struct.unpack("f", struct.pack("f", 1 / 3))[0]


def vector_of(text: str) -> list[float]:
    tokens = [*text.encode(), 0, 0, 0, 0]
    return [len(text.encode()), *tokens[:4], THIRD]


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(server: Any, **body: Any) -> httpx.Response:
    answer: httpx.Response = server.http.post(PATH, json={"model": "stub", **body})
    return answer


def error_of(server: Any, **body: Any) -> tuple[str, str | None]:
    """Return the message and the field of a 400."""
    answer = post(server, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["message"], error["param"]


def test_official_client_gets_a_vector(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="stub", input="abc", user="somebody")
    assert [(one.index, one.object) for one in answer.data] == [(0, "embedding")]
    assert answer.data[0].embedding == pytest.approx(vector_of("abc"), rel=1e-7)
    assert (answer.object, answer.model) == ("list", "stub")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (3, 3)


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_both_encodings_are_bit_identical(server: Any, encoding: str) -> None:
    body = post(server, input=["abc", "grüße"], encoding_format=encoding).json()
    found = [one["embedding"] for one in body["data"]]
    if encoding == "base64":
        found = [list(array("f", base64.b64decode(text))) for text in found]
    assert [array("f", vector) for vector in found] == [array("f", vector_of(text)) for text in ("abc", "grüße")]


def test_json_numbers_round_trip_to_float32() -> None:
    values = array("f", [0.1, -1 / 3, 1e-30, 16777217.0, 3.4e38, 1.1754944e-38, 0.0])
    written = _to_json_list(values.tobytes())
    assert array("f", httpx.Response(200, content=written).json()) == values
    assert base64.b64decode(httpx.Response(200, content=_to_base64(values.tobytes())).json()) == values.tobytes()


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("abc", ["abc"]),
        (["abc", "b", "cd"], ["abc", "b", "cd"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
    ],
)
def test_input_may_be_text_token_ids_or_a_list(client: openai.OpenAI, given: Any, texts: list[str]) -> None:
    answer = client.embeddings.create(model="alias", input=given)
    assert [one.embedding for one in answer.data] == [pytest.approx(vector_of(text), rel=1e-7) for text in texts]
    assert [one.index for one in answer.data] == list(range(len(texts)))
    assert answer.usage.prompt_tokens == sum(map(len, texts))


def test_inputs_run_concurrently_and_are_returned_in_order(server: Any) -> None:
    """The core takes as many steps as the last digit of a text's last token."""
    texts = [f"{number}m" if number % 2 else f"{number}n" for number in range(40)]  # nine steps, or none
    body = post(server, input=texts).json()
    assert [one["embedding"][:3] for one in body["data"]] == [vector_of(text)[:3] for text in texts]
    assert [one["index"] for one in body["data"]] == list(range(40))


def test_dimensions_and_normalization_reach_the_engine(client: openai.OpenAI) -> None:
    assert client.embeddings.create(model="stub", input="abc", dimensions=2).data[0].embedding == [3.0, 97.0]
    for name in ("normalize", "use_activation"):
        answer = client.embeddings.create(model="stub", input="abc", dimensions=2, extra_body={name: True})
        assert answer.data[0].embedding == [3.0, 97.0, 9.0]


def test_cached_tokens_are_reported(server: Any) -> None:
    usage = post(server, input=["abc", "de"]).json()["usage"]
    assert usage == {
        "prompt_tokens": 5,
        "completion_tokens": 0,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_conversation_is_embedded_as_rendered_by_template(server: Any) -> None:
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    body = post(server, messages=messages).json()
    assert body["data"][0]["embedding"] == pytest.approx(vector_of("abcd"), rel=1e-7)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"truncate_prompt_tokens": 3}, "def"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, "ab"),
        ({"truncate_prompt_tokens": -1}, "abcdef"),
    ],
)
def test_input_is_truncated_as_requested(server: Any, fields: dict[str, Any], text: str) -> None:
    body = post(server, input="abcdef", **fields).json()
    assert body["data"][0]["embedding"] == pytest.approx(vector_of(text), rel=1e-7)
    assert body["usage"]["prompt_tokens"] == len(text)


def test_input_may_not_exceed_the_context(server: Any) -> None:
    assert post(server, input="a" * 256).json()["usage"]["prompt_tokens"] == 256
    message, param = error_of(server, input=["b", "a" * 257])
    assert message.startswith(
        "This model's maximum context length is 256 tokens. However, input 1 has 257 input tokens."
    )
    assert param == "input"
    whole = post(server, input="a" * 300, truncate_prompt_tokens=-1)
    assert whole.json()["usage"]["prompt_tokens"] == 256


@pytest.mark.parametrize(
    ("body", "expected", "param"),
    [
        ({}, "set either input or messages", "input"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "set either input or messages", "input"),
        ({"input": ""}, "input is empty; send at least one token", "input"),
        ({"input": []}, "input is empty; send at least one token", "input"),
        ({"input": ["a", ""]}, "input 1 of the list is empty; send at least one token", "input"),
        ({"input": [[1], []]}, "input 1 of the list is empty; send at least one token", "input"),
        ({"input": [258]}, "token id 258 is out of vocabulary; the model has 258 tokens", "input"),
        ({"input": [[1], [300]]}, "token id 300 is out of vocabulary", "input"),
        ({"input": [-1]}, "input.0: Input should be greater than or equal to 0", "input.0"),
        ({"input": ["a"] * 2049}, "2049 inputs exceed the maximum of 2048; send fewer", "input"),
        ({"input": "a", "dimensions": 7}, "dimensions exceeds the model's 6 (7)", "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions: Input should be greater than or equal to 1", "dimensions"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format: Input should be 'float' or 'base64'", None),
        ({"input": "a", "endianness": "big"}, "endianness is supported only as", "endianness"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype is supported only as", "embed_dtype"),
        ({"input": "a", "task": "classify"}, "task is supported only as", "task"),
        ({"input": "a", "normalize": True, "use_activation": False}, "normalize and use_activation", "normalize"),
        ({"input": "a", "add_generation_prompt": True}, "add_generation_prompt is only allowed with messages", None),
        ({"input": "a", "dimension": 3}, "unrecognized request argument: dimension; did you mean dimensions?", None),
        ({"prompt": "a", "input": "a"}, "unrecognized request argument: prompt; it belongs to /v1/completions", None),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0; set 1 or more", None),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "the user speaks first", None),
    ],
)
def test_invalid_embedding_request_is_400_and_names_field(
    server: Any, body: dict[str, Any], expected: str, param: str | None
) -> None:
    message, field = error_of(server, **body)
    assert expected in message
    assert param in (None, field)


def test_fields_without_effect_are_accepted(server: Any) -> None:
    body: dict[str, Any] = {
        "embed_dtype": "float32",
        "endianness": "native",
        "task": "embed",
        "metadata": {},
        "chat_template": None,
    }
    assert post(server, input="a", **body).status_code == 200


def test_unknown_model_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="the model 'other' does not exist"):
        client.embeddings.create(model="other", input="a")


def test_number_of_values_per_response_is_limited(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,048 inputs are allowed for this server's small vectors, but not for larger ones."""
    assert len(post(server, input=["a"] * 2048).json()["data"]) == 2048
    assert embedding_request.MAX_VALUES["float"] // embedding_request.MAX_INPUTS == 1024
    assert embedding_request.MAX_VALUES["base64"] // embedding_request.MAX_INPUTS == 4096


def test_failed_input_fails_request_and_aborts_others(server: Any) -> None:
    before = server.core_state()["aborted"]
    answer = post(server, input=["!slow a", "!fail", "!slow b"])
    assert answer.status_code == 500
    server.wait_for(lambda: server.core_state()["aborted"] == before + 2, "the others' abort")
    assert server.core_state()["running"] == 0


def test_client_disconnect_aborts_all_inputs(server: Any) -> None:
    before = server.core_state()["aborted"]
    gone = threading.Event()

    def ask() -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"http://127.0.0.1:{server.port}{PATH}", json={"input": ["!slow"] * 5}, timeout=0.5)
        gone.set()

    thread = threading.Thread(target=ask)
    thread.start()
    server.wait_for(lambda: server.core_state()["running"] == 5 or gone.is_set(), "the requests")
    thread.join()
    server.wait_for(lambda: server.core_state()["aborted"] == before + 5, "their abort")


def test_salt_priority_and_id_are_forwarded(server: Any) -> None:
    answer = post(server, input="a", cache_salt="mine", priority=-3, request_id="my-own")
    assert answer.json()["id"] == "embd-my-own"
    assert answer.headers["X-Request-Id"] == "my-own"
    assert server.core_state()["added"][-1] == {"cache_salt": "mine", "priority": -3}


def test_embeddings_count_as_prompts_not_generations(start_server: Any) -> None:
    server = start_server()
    assert post(server, input=["abc", "de"]).status_code == 200
    server.wait_for(lambda: server.metric("vllm:request_success_total", finished_reason="stop") == 2, "the counters")
    assert server.metric("vllm:request_prompt_tokens_sum") == 5
    assert server.metric("vllm:e2e_request_latency_seconds_count") == 2
    assert server.metric("vllm:request_queue_time_seconds_count") == 2
    assert server.metric("vllm:request_prefill_time_seconds_count") == 2
    assert server.metric("vllm:request_inference_time_seconds_count") == 2
    for family in ("time_to_first_token_seconds", "inter_token_latency_seconds", "request_decode_time_seconds",
                   "request_generation_tokens", "request_params_max_tokens", "request_params_n",
                   "request_time_per_output_token_seconds"):  # fmt: skip
        assert server.metric(f"vllm:{family}_count") == 0, family
    assert server.admin.get("/admin/v1/requests").json()["finished"] == []


def test_generation_only_engine_rejects_embeddings(start_server: Any) -> None:
    server = start_server("--seed", "555")
    assert error_of(server, input="a") == ("this engine does not compute embeddings: set by the stub", None)
    assert server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_embedding_only_engine_rejects_generation(start_server: Any) -> None:
    server = start_server("--seed", "556")
    assert post(server, input="a").status_code == 200
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions/render", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        answer = server.http.post(path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "this engine does not generate text: set by the stub"
    assert server.http.post("/tokenize", json={"prompt": "ab"}).json()["count"] == 2


def test_full_queue_rejects_embeddings(start_server: Any) -> None:
    server = start_server("--max-num-queued-tokens", "4")

    def ask() -> None:
        with suppress(httpx.TransportError):  # the server is stopped during the request
            httpx.post(f"http://127.0.0.1:{server.port}{PATH}", json={"input": "!slow"}, timeout=60)

    waiting = threading.Thread(target=ask)
    waiting.start()
    server.wait_for(lambda: server.core_state()["running"] == 1, "the first")
    answer = post(server, input="abc")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_full")
    server.process.kill()
    waiting.join()
