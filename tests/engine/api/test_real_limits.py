"""Numeric request fields at their limits on a real engine: served or 400, and the engine continues."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from trimtab_engine.api.openai.protocol import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from tests.engine.api.conftest import RealEngine

VOCABULARY = 258
SMALLEST = 5e-324
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "ab"},
    CHAT: {"messages": [{"role": "user", "content": "ab"}]},
}
NEEDED: dict[str, dict[str, Any]] = {
    "max_tokens": {},
    "min_tokens": {"ignore_eos": True},
    "n": {"max_tokens": 1},
    "top_logprobs": {"logprobs": True},
}
"""Other required fields."""


def limits_of(schema: dict[str, Any]) -> set[int | float]:
    """Return the minimum and maximum of each number type in the schema."""
    found: set[int | float] = set()
    for kind in schema.get("anyOf", [schema]):
        if kind.get("type") in ("integer", "number"):
            found |= {kind[name] for name in ("minimum", "maximum") if name in kind}
            found |= {kind["exclusiveMinimum"] + SMALLEST} if "exclusiveMinimum" in kind else set()
    return found


def cases() -> Iterator[Any]:
    for path, model in ((COMPLETIONS, CompletionRequest), (CHAT, ChatRequest)):
        for name, schema in model.model_json_schema()["properties"].items():
            for value in sorted(limits_of(schema)):
                yield pytest.param(path, {**NEEDED.get(name, {}), name: value}, id=f"{path} {name}={value}")
    for fields in (
        {"logit_bias": {str(VOCABULARY - 1): 100.0, "0": -100.0}},
        {"allowed_token_ids": [VOCABULARY - 1]},
        {"allowed_token_ids": list(range(VOCABULARY))},
        {"stop_token_ids": [VOCABULARY - 1], "min_tokens": 2},
        {"bad_words": ["\u0000", "ab" * 128]},
        {"top_k": 2**31, "temperature": 1.0, "seed": 1},
        {"logprobs": VOCABULARY, "prompt_logprobs": 1000},
    ):
        yield pytest.param(COMPLETIONS, fields, id=str(fields)[:40])


@pytest.fixture(scope="module")
def engine(tiny_model: Path, real_engine: "type[RealEngine]") -> "Iterator[RealEngine]":
    flags = ("--max-num-seqs", "16", "--max-num-batched-tokens", "128", "--max-logprobs", "1000")
    engine = real_engine(tiny_model, tiny_model / "log", *flags)
    yield engine
    engine.end()


@pytest.mark.parametrize(("path", "fields"), list(cases()))
def test_number_at_its_limit_is_served_or_rejected(engine: "RealEngine", path: str, fields: dict[str, Any]) -> None:
    response = engine.http.post(path, json={**BODIES[path], "max_tokens": 3, **fields})
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        assert response.json()["error"]["param"]
    assert engine.post("cd", max_tokens=2).status_code == 200


def test_numeric_fields_exist() -> None:
    assert len(list(cases())) > 50
