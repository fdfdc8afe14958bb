"""Cost of JSON bodies: equal to a plain count of values outside of strings, and bounded for each request."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from trimtab_engine.api.http import json_cost as module
from trimtab_engine.api.http.json_cost import (
    CHEAP_BYTES,
    ITEM_COST,
    LIST_COST,
    MAX_COST,
    OBJECT_COST,
    JsonCostLimit,
    json_cost,
)

TEXTS = st.text('a"\\,[{é', max_size=12)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=30
)


def expected(value: Any) -> int:
    """Return the cost of a value without commas: the sum over lists and objects."""
    if isinstance(value, list):
        return LIST_COST + sum(map(expected, value)) + ITEM_COST * max(len(value) - 1, 0)
    if isinstance(value, dict):
        return OBJECT_COST + sum(map(expected, value.values())) + ITEM_COST * max(len(value) - 1, 0)
    return 0


@given(VALUES, st.booleans(), st.integers(1, 40))
def test_cost_counts_values_outside_of_strings(value: Any, is_ascii: bool, chunk: int) -> None:
    """Also if strings and runs of backslashes cross the borders of chunks."""
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", chunk)
        assert json_cost(body) == ITEM_COST + expected(value)


@pytest.mark.parametrize("body", [b'"\\', b"\\\\\\", b'"', b"[" * 5000, b'\\"' * 999, bytes(range(256))])
def test_cost_of_invalid_json_is_a_number(body: bytes) -> None:
    assert json_cost(body) >= ITEM_COST


@pytest.fixture
async def client() -> Any:
    app = FastAPI()

    @app.post("/count")
    async def count(body: dict[str, Any]) -> int:
        return len(body["prompt"])

    app.add_middleware(JsonCostLimit, max_cost=lambda: MAX_COST)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        yield client


@pytest.mark.parametrize(
    "body",
    [
        '{"prompt":[' + "[1]," * 800_000 + "[1]]}",
        '{"prompt":[' + "{}," * 500_000 + "{}]}",
        '{"prompt":[' + "1," * 2_000_000 + "1]}",
        "[" * 4_000_000,
    ],
    ids=["lists", "objects", "numbers", "nested"],
)
async def test_body_of_many_values_is_rejected(client: httpx.AsyncClient, body: str) -> None:
    response = await client.post("/count", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert "the body has too many values" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "prompt",
    ["[{, " * 1_500_000, [1] * 200_000, ["a, b"] * 100_000, [[1, 2, 3]] * 20_000],
    ids=["text", "ids", "texts", "lists"],
)
async def test_long_prompts_are_accepted(client: httpx.AsyncClient, prompt: Any) -> None:
    body = json.dumps({"prompt": prompt})
    assert len(body) > CHEAP_BYTES
    response = await client.post("/count", content=body, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()) == (200, len(prompt))
