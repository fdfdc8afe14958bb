"""…/render returns what a request would run with; sent as tokens, it gives the same response."""

from typing import Any

import pytest

SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "min_tokens": 1, "logprobs": 2, "stop": ["x"]}


def test_prompts_are_rendered_as_tokens_with_sampling_parameters(server: Any) -> None:
    body = {"model": "alias", "prompt": ["ab", "xyz"], "n": 2, "max_tokens": 5, "request_id": "r", **SAMPLING}
    first, second = server.http.post("/v1/completions/render", json=body).json()
    assert (first["token_ids"], second["token_ids"]) == ([97, 98], [120, 121, 122])
    assert (first["request_id"], second["request_id"]) == ("cmpl-r-0", "cmpl-r-1")
    assert first["model"] == "alias"
    for entry in (first, second):
        assert SAMPLING.items() <= entry["sampling_params"].items()
        assert (entry["sampling_params"]["n"], entry["sampling_params"]["max_tokens"]) == (2, 5)


def test_rendered_conversation_sent_as_tokens_gives_same_response(server: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
    render_chat = server.http.post("/v1/chat/completions/render", json=chat).json()
    as_tokens = {"prompt": render_chat["token_ids"], "max_tokens": render_chat["sampling_params"]["max_tokens"]}
    text = server.http.post("/v1/completions", json=as_tokens).json()["choices"][0]["text"]
    answer = server.http.post("/v1/chat/completions", json=chat).json()
    assert text == answer["choices"][0]["message"]["content"]


def test_render_does_not_reach_the_engine(server: Any) -> None:
    before = len(server.core_state()["seen"])
    server.http.post("/v1/completions/render", json={"prompt": "ab"})
    assert len(server.core_state()["seen"]) == before


def test_output_constraint_is_rendered_in_vllm_format(server: Any) -> None:
    body: dict[str, Any] = {"prompt": "ab", "guided_regex": "[ab]+"}
    (entry,) = server.http.post("/v1/completions/render", json=body).json()
    assert entry["sampling_params"]["structured_outputs"]["regex"] == "[ab]+"
    (entry,) = server.http.post("/v1/completions/render", json={"prompt": "ab"}).json()
    assert entry["sampling_params"]["structured_outputs"] is None


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("completions", {"prompt": "a" * 300}, 400),
        ("completions", {"prompt": "a", "model": "other"}, 404),
        ("completions", {"prompt": [300]}, 400),
        ("chat/completions", {"messages": []}, 400),
    ],
)
def test_invalid_requests_are_rejected_by_render(server: Any, path: str, body: dict[str, Any], status: int) -> None:
    assert server.http.post(f"/v1/{path}/render", json=body).status_code == status
    assert server.http.post(f"/v1/{path}", json=body).status_code == status
