"""What is wrong with a request is found in milliseconds, however much of it is wrong."""

import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from trimtab_engine.api.openai.not_built_routes import NOT_BUILT as NOT_BUILT_ROUTES
from trimtab_engine.api.openai.protocol import (
    NOT_BUILT,
    WITHOUT_EFFECT,
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
)

API = Path(__file__).parents[4] / "docs" / "api.md"
MANY = 200_000  # a report on each of them took 10 s and 800 MB
MAX_FINDINGS = 10
CPU_SECONDS = 1.0


def chat(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a", **message}]}


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": [-1] * MANY}),
        (CompletionRequest, {"prompt": [1.5] * MANY}),
        (CompletionRequest, {"prompt": [[-1] * MANY]}),
        (CompletionRequest, {"prompt": ["a"] * MANY + [1]}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": [-1] * MANY}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}),
        (CompletionRequest, {"prompt": "a", **{f"k{i}": 1 for i in range(MANY)}}),
        (ChatRequest, {"messages": [{}] * MANY}),
        (ChatRequest, chat(content=[{"type": "text"}] * MANY)),
        (ChatRequest, chat(**{f"k{i}": 1 for i in range(MANY)})),
        (ChatRequest, chat(content=[{"type": "text", "text": "a", **{f"k{i}": 1 for i in range(MANY)}}])),
        (TokenizeRequest, {"messages": [{}] * MANY}),
        (TokenizeRequest, {"prompt": "a", **{f"k{i}": 1 for i in range(MANY)}}),
    ],
)
def test_a_request_with_many_faults_is_refused_for_the_first_few(model: type[BaseModel], body: dict[str, Any]) -> None:
    began = time.process_time()
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    assert refused.value.error_count() <= MAX_FINDINGS
    assert time.process_time() - began < CPU_SECONDS


@pytest.mark.parametrize(("given", "sampled"), [(None, 1.0), (0.0, 0.0), (1e-300, 0.0), (1e-6, 0.0), (1e-5, 1e-5)])
def test_a_temperature_by_which_logits_would_overflow_is_greedy(given: float | None, sampled: float) -> None:
    request = CompletionRequest.model_validate({"prompt": "a", "temperature": given})
    assert request.sampling(max_tokens=1, logprobs=None, index=0).temperature == sampled


@pytest.mark.parametrize("name", [*NOT_BUILT, *WITHOUT_EFFECT, *NOT_BUILT_ROUTES])
def test_the_page_of_the_api_lists_what_is_refused_and_what_has_no_effect(name: str) -> None:
    assert f"`{name}`" in API.read_text()
