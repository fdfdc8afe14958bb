"""POST /score and /rerank over HTTP, on a core with known vectors: length, first four tokens, a third, and a 9."""

import math
from typing import Any

import pytest


def vector_of(text: str) -> list[float]:
    tokens = [*text.encode(), 0, 0, 0, 0]
    return [len(text.encode()), *tokens[:4], 1 / 3, 9.0]


def cosine(a: str, b: str) -> float:
    left, right = vector_of(a), vector_of(b)
    product = sum(x * y for x, y in zip(left, right, strict=True))
    return product / math.hypot(*left) / math.hypot(*right)


def scores(server: Any, path: str = "/score", **body: Any) -> list[float]:
    answer = server.http.post(path, json={"model": "stub", **body})
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [(one["index"], one["object"]) for one in data] == [(index, "score") for index in range(len(data))]
    return [one["score"] for one in data]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_score_compares_a_text_with_several(server: Any, path: str) -> None:
    found = scores(server, path, text_1="query", text_2=["abc", "query", "zz"])
    assert found == pytest.approx([cosine("query", text) for text in ("abc", "query", "zz")], abs=1e-6)
    assert found[1] == pytest.approx(1.0, abs=1e-6)


def test_lists_are_scored_pair_by_pair(server: Any) -> None:
    found = scores(server, queries=["ab", "cd"], documents=["ab", "xy"])
    assert found == pytest.approx([1.0, cosine("cd", "xy")], abs=1e-6)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_sorted_by_relevance(server: Any, path: str) -> None:
    documents: list[Any] = ["zz", {"text": "query"}, "abc"]
    body = {"model": "stub", "query": "query", "documents": documents, "top_n": 2}
    answer = server.http.post(path, json=body).json()
    texts = ["zz", "query", "abc"]
    best = sorted(range(3), key=lambda index: -cosine("query", texts[index]))[:2]
    assert [one["index"] for one in answer["results"]] == best
    assert answer["results"][0]["document"] == {"text": "query"}
    assert answer["results"][0]["relevance_score"] == pytest.approx(1.0, abs=1e-6)
    assert answer["usage"]["total_tokens"] == sum(map(len, ["query", *texts]))


def test_documents_can_be_omitted_from_results(server: Any) -> None:
    body = {"query": "a", "documents": ["b"], "return_documents": False}
    assert "document" not in server.http.post("/rerank", json=body).json()["results"][0]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1 has 2 texts and text_2 3"),
        ("/score", {"text_1": "", "text_2": "a"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": "b", "unknown": 1}, "unrecognized request argument: unknown"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": {"image": "x"}, "documents": ["a"]}, "images are not supported"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 4}, "max_tokens_per_doc is not supported"),
        ("/rerank", {"query": "a", "documents": ["b" * 300]}, "maximum context length"),
    ],
)
def test_invalid_body_is_rejected(server: Any, path: str, body: dict[str, Any], message: str) -> None:
    answer = server.http.post(path, json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
