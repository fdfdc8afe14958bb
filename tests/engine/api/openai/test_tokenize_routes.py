"""/tokenize and /detokenize are inverse to each other."""

from typing import Any

import pytest


def test_detokenize_restores_the_text(server: Any) -> None:
    text = "grüße, 世界"
    tokens = server.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert server.http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}
    assert server.http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "tokens"),
        ({"tokens": "abc"}, "tokens"),
        ({"tokens": [-1]}, "tokens"),
        ({"tokens": [258]}, "258"),
        ({"tokens": [1] * 257}, "256"),
        ({"tokens": [1], "x": 1}, "x"),
    ],
)
def test_invalid_tokens_are_400(server: Any, body: dict[str, Any], word: str) -> None:
    answer = server.http.post("/detokenize", json=body)
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]


def test_an_unknown_model_is_404(server: Any) -> None:
    assert server.http.post("/detokenize", json={"tokens": [1], "model": "other"}).status_code == 404
