"""X-Request-Id and API keys."""

from typing import Any

import pytest


def test_client_request_id_is_returned_and_in_response_id(server: Any) -> None:
    for path, body, prefix in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}, "cmpl"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}, "chatcmpl"),
    ):
        answer = server.http.post(path, json=body, headers={"X-Request-Id": "gateway-17"})
        assert answer.headers["x-request-id"] == "gateway-17"
        assert answer.json()["id"] == f"{prefix}-gateway-17"


def test_request_id_may_be_shared_by_concurrent_requests(server: Any) -> None:
    body = {"prompt": ["ab"] * 8, "max_tokens": 3}
    for _ in range(2):
        answer = server.http.post("/v1/completions", json=body, headers={"X-Request-Id": "same"})
        assert [choice["text"] for choice in answer.json()["choices"]] == ["aba"] * 8


@pytest.mark.parametrize("given", [None, "", "a" * 129, "with space", "tab\there"])
def test_invalid_request_id_is_replaced(server: Any, given: str | None) -> None:
    headers = {} if given is None else {"X-Request-Id": given}
    answer = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
    assert answer.status_code == 200
    assert answer.json()["id"] == f"cmpl-{answer.headers['x-request-id']}"
    assert len(answer.headers["x-request-id"]) == 32


def test_streams_and_errors_have_the_request_id(server: Any) -> None:
    headers = {"X-Request-Id": "abc"}
    stream = {"prompt": "a", "max_tokens": 1, "stream": True}
    for body, status in ((stream, 200), ({"prompt": ""}, 400), ({"prompt": "a", "model": "other"}, 404)):
        answer = server.http.post("/v1/completions", json=body, headers=headers)
        assert (answer.status_code, answer.headers["x-request-id"]) == (status, "abc")


def test_api_keys_never_share_cached_prefixes(start_server: Any) -> None:
    server = start_server("--api-key", "k1", "k2")
    salts = []
    for key in ("k1", "k2", "k1"):
        body = {"prompt": "a", "max_tokens": 1, "cache_salt": "s"}
        server.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        salts.append(server.core_state()["added"][-1]["cache_salt"])
    assert salts[0] == salts[2] != salts[1]
    assert salts[0].endswith(":s")
    assert "k1" not in salts[0]
