"""Invalid requests get a 4xx in OpenAI's format, and the server continues."""

import contextlib
import json
import socket
from typing import Any

import httpx
import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "a"}]


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(response.content) < 2000
    return error


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt 1 of the list"),
        ({"prompt": [[1], []]}, "prompt 1 of the list"),
        ({"prompt": ["a", 7]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": ["a", "b" * 256]}, "256"),
        ({"prompt": ["a"] * 1025}, "1024"),
        ({"prompt": ["a"] * 9, "n": 128}, "1024"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [258]}, "258"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": "a" * 256}, "256"),
        ({"prompt": "a" * 200_000}, "200000"),
        ({"prompt": "a" * 250, "max_tokens": 7}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**9}, "max"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": "7"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": float("-inf")}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "a"}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 10**12}, "n"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "21"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop: is a list of 17; send at most 16"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop": ["x" * (1 << 20)]}, "stop"),
        ({"stop": 7}, "stop: Input should be a valid string; or: Input should be a valid list"),
        ({"stop": ["a", 7]}, "stop.1: Input should be a valid string"),
        ({"logit_bias": {"1": 2, "01": 3}}, "twice"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [258]}, "258"),
        ({"stop_token_ids": list(range(257))}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options"),
        ({"echo": 1}, "echo"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "continuous_usage_stats"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "s" * 513}, "cache_salt"),
        ({"priority": 1.5}, "priority"),
        ({"priority": 2**31}, "priority"),
        ({"suffix": "s"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": {"258": 1}}, "258"),
        ({"logit_bias": {"x": 1}}, "'x' is not a token id"),
        ({"logit_bias": {"-1": 1}}, "'-1' is not a token id"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "1025 entries"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [258]}, "258"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "21"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": [97] * 200, "prompt_logprobs": 20, "n": 128, "max_tokens": 1}, "534912 log-probabilities"),
        ({"prompt": [97], "logprobs": 20, "n": 128, "max_tokens": 200}, "537600 log-probabilities"),
        ({"prompt": [[97] * 200] * 8, "logprobs": 20, "n": 8, "max_tokens": 0, "echo": True}, "prompt_logprobs"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"store": True}, "store"),
        ({"temprature": 1}, "did you mean temperature?"),
        ({"max_new_tokens": 1}, "did you mean max_tokens?"),
        ({"messages": []}, "it belongs to /v1/chat/completions"),
        ({"response_format": "json"}, 'use {"type": "json_object"}'),
        ({"x" * 5000: 1}, "xxx"),
        ({"model": 7}, "model"),
        ({"model": "\ud800"}, "model"),
        ({"\ud800": 1}, "unicode"),
        ({"": 1}, "argument"),
    ],
)
def test_invalid_completion_is_400_and_names_field(server: Any, fields: dict[str, Any], word: str) -> None:
    body = json.dumps({"model": "stub", "prompt": "a", **fields})
    response = server.http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert word in error_of(response)["message"] + str(error_of(response)["param"])


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"messages": []}, "messages: is a list of 0; send at least 1"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"prompt": "hi"}, "it belongs to /v1/completions"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "role"),
        ({"messages": [{"role": "function", "content": "a"}]}, "function"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": None}]}, "content"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "the user speaks first"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": "a" * 300}]}, "300"),
        ({"messages": USER * 5000}, "messages"),
        ({"response_format": {"type": "json_schema"}}, "the field json_schema is required for type json_schema"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {}}, "audio"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"service_tier": "flex"}, 'service_tier is supported only as "auto" or "default"; remove it'),
    ],
)
def test_invalid_chat_is_400_and_names_field(server: Any, fields: dict[str, Any], word: str) -> None:
    response = server.http.post(CHAT, json={"model": "stub", "messages": USER, **fields})
    assert response.status_code == 400, response.text
    assert word in error_of(response)["message"] + str(error_of(response)["param"])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"prompt"',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": "a", "n": ' + b"9" * 10_000 + b"}",
        b'{"prompt": "\xff\xfe"}',
        b"\x00",
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
def test_invalid_body_is_400(server: Any, path: str, content: bytes) -> None:
    response = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    error_of(response)


def test_oversized_body_is_413_before_it_is_read(server: Any) -> None:
    response = server.http.post(COMPLETIONS, content=b'{"prompt": "' + b"a" * (9 << 20) + b'"}')
    assert response.status_code == 413
    error_of(response)


def test_body_without_length_is_limited_while_reading(server: Any) -> None:
    def endless() -> Any:
        for _ in range(20):
            yield b" " * (1 << 20)

    try:
        response = server.http.post(COMPLETIONS, content=endless())
    except httpx.WriteError:  # rejected while still writing
        return
    assert response.status_code == 413


def test_unknown_model_is_404(server: Any) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER}), ("/tokenize", {"prompt": "a"})):
        response = server.http.post(path, json={"model": "gpt-5" * 50, **body})
        assert response.status_code == 404
        assert error_of(response)["code"] == "model_not_found"


def test_unknown_path_and_method_have_openai_format(server: Any) -> None:
    assert error_of(server.http.get("/v1/nothing"))["code"] == 404
    assert server.http.get(COMPLETIONS).status_code == 405


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Request-Id": "http://127.0.0.1/\t%0d%0aSet-Cookie: a"},
        {"Authorization": "Bearer"},
        {"Content-Type": "text/plain"},
        {"X-Long": "x" * 8000},
    ],
)
def test_headers_are_treated_as_data(server: Any, headers: dict[str, str]) -> None:
    response = server.http.post(COMPLETIONS, content=b'{"prompt": "ab", "max_tokens": 1}', headers=headers)
    assert response.status_code in (200, 400)
    assert "set-cookie" not in response.headers


@pytest.mark.parametrize(
    "head",
    [
        b"".join(b"X-%d: %s\r\n" % (i, b"x" * 1000) for i in range(2000)),
        b"X-Long: " + b"x" * (2 << 20),
        b"",
    ],
)
def test_endless_headers_close_connection(server: Any, head: bytes) -> None:
    line = b"GET /livez HTTP/1.1\r\nHost: a\r\n" if head else b"GET /" + b"x" * (2 << 20)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        answer = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall(line + head)
            answer = connection.recv(100)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
    assert server.status("/livez") == 200


def test_large_bodies_on_one_connection_do_not_count_as_headers(server: Any) -> None:
    for _ in range(3):
        response = server.http.post("/tokenize", json={"prompt": "a" * 15_000, "add_special_tokens": False})
        assert response.json()["count"] == 15_000
    body = {"prompt": "a", "max_tokens": 1, "metadata": {"padding": "x" * 500_000}}
    for _ in range(3):
        assert server.http.post(COMPLETIONS, json=body).status_code == 200


def test_wrong_content_type_error_names_json(server: Any) -> None:
    response = server.http.post(COMPLETIONS, data={"prompt": "a"})
    assert response.status_code == 400
    assert "Content-Type: application/json" in error_of(response)["message"]


def test_server_still_serves_after_invalid_input(server: Any) -> None:
    assert server.http.post(COMPLETIONS, json={"prompt": "ab", "max_tokens": 1}).json()["choices"][0]["text"] == "a"
    assert server.core_state()["running"] == 0


def test_invalid_json_is_400_with_line_and_column(server: Any) -> None:
    response = server.http.post(
        COMPLETIONS, content=b'{"model": "stub",\n "prompt": }', headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 400
    assert error_of(response)["message"].endswith("Expecting value: line 2 column 12 (char 29)")


def test_non_utf8_body_is_400_with_position(server: Any) -> None:
    response = server.http.post(
        COMPLETIONS, content=b'{"prompt": "\xff"}', headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 400
    assert error_of(response)["message"] == "the body is not UTF-8 text: byte 12 is 0xff; send JSON in UTF-8"


@pytest.mark.parametrize("path", ["/v1/files", "/classify", "/pooling", "/v1/audio/speech", "/v1/batches"])
def test_unsupported_route_is_rejected_by_name(server: Any, path: str) -> None:
    response = server.http.post(path, json={"model": "stub", "input": "a"})
    assert response.status_code == 404
    assert error_of(response)["message"].startswith(f"{path} is not supported; ")


TEXT = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("message", "param", "expected"),
    [
        ({"content": [TEXT, {"type": "text", "txt": "a"}]}, "messages.0.content.1.text", "Field required"),
        ({"content": [{"type": "text", "text": 5}]}, "messages.0.content.0.text", "should be a valid string"),
        ({"content": [{"type": "image_url", "image_url": "x"}]}, "messages.0.content.0.image_url", "a JSON object"),
        ({"content": [{"type": "txt", "text": "a"}]}, "messages.0.content.0.type", "send text, image_url, video_url"),
        ({"content": [{"text": "a"}]}, "messages.0.content.0.type", 'such as {"type": "text", "text": "Hi"}'),
        ({"content": ["a"]}, "messages.0.content.0", 'such as {"type": "text", "text": "Hi"}'),
        ({"contents": "a"}, "messages.0.contents", "did you mean content?"),
        ({"rol": "user", "content": "a"}, "messages.0.rol", "did you mean role?"),
        ({"content": "a", "prompt": "b"}, "messages.0.prompt", "unrecognized request argument: messages.0.prompt"),
    ],
)
def test_invalid_message_field_is_named_by_client_path(
    server: Any, message: dict[str, Any], param: str, expected: str
) -> None:
    role: dict[str, Any] = {} if "rol" in message else {"role": "user"}
    error = error_of(server.http.post(CHAT, json={"model": "stub", "messages": [role | message]}))
    assert error["param"] == param
    assert expected in error["message"]


@pytest.mark.parametrize(
    ("sent_as", "content", "expected"),
    [
        ("application/x-www-form-urlencoded", b'{"prompt": "a"}', "; received application/x-www-form-urlencoded"),
        ("application/json", b"", "; the body is empty"),
        ("application/json", b"[]", "sent with Content-Type: application/json"),
    ],
)
def test_non_object_body_error_names_content_type(server: Any, sent_as: str, content: bytes, expected: str) -> None:
    refused = server.http.post(COMPLETIONS, content=content, headers={"Content-Type": sent_as})
    assert error_of(refused)["message"].endswith(expected)


def test_tls_client_on_plain_port_is_logged(server: Any) -> None:
    """The client only sees an invalid TLS response: curl prints `wrong version number`."""
    with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), timeout=30)) as connection:
        connection.sendall(bytes.fromhex("16030100c8010000c40303") + bytes(194))
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert b"plain HTTP; use http:// instead of https://" in answer
    assert f"uses TLS on port {server.port}, which serves plain HTTP" in server.log.read_text()
    assert server.http.get("/health").status_code == 200


def test_openapi_schema_logs_no_warnings(server: Any) -> None:
    described = server.http.get("/openapi.json").json()["paths"]
    assert {"get", "post"} <= set(described["/ping"])
    assert "Duplicate Operation ID" not in server.log.read_text()
