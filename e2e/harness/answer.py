"""Requests to the model, sent with the openai client through the Service."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from openai import OpenAI

from harness.deployment import Deployment
from harness.service import port_forward

QUESTION = "What is the capital of France?"
EXPECTED = "Paris"
MAX_TOKENS = 32
ANSWER_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer. `first_token_at` is in seconds on time.monotonic()'s clock."""

    text: str
    chunks: int
    finish_reason: str | None
    completion_tokens: int
    first_token_at: float


def ask(
    deployment: Deployment,
    question: str = QUESTION,
    *,
    max_tokens: int = MAX_TOKENS,
    show: Callable[[str], None] = lambda piece: None,
) -> Answer:
    """Stream the answer to `question`; `show` is called with each piece."""
    name, _, port = deployment.service()
    with port_forward(deployment.kube, deployment.namespace, f"svc/{name}", port) as url:
        return ask_at(f"{url}/v1", deployment.served_name(), question, max_tokens=max_tokens, show=show)


def ask_at(
    base_url: str,
    model: str,
    question: str = QUESTION,
    *,
    max_tokens: int = MAX_TOKENS,
    show: Callable[[str], None] = lambda piece: None,
) -> Answer:
    pieces: list[str] = []
    first, reason, tokens = 0.0, None, 0
    with OpenAI(base_url=base_url, api_key="none", timeout=ANSWER_SECONDS, max_retries=0) as client:
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            stream=True,
            stream_options={"include_usage": True},
            temperature=0.0,
            max_tokens=max_tokens,
        )
        for chunk in stream:
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
                if choice.delta.content:
                    first = first or time.monotonic()
                    pieces.append(choice.delta.content)
                    show(choice.delta.content)
    return Answer("".join(pieces), len(pieces), reason, tokens, first)
