"""Treatment of each path of the engine's API."""

from __future__ import annotations

from enum import Enum


class Route(Enum):
    """Treatment of a path."""

    GENERATE = "generate"
    """Scored, held, counted as demand: the request needs the model."""
    ADAPTER = "adapter"
    """Sent to every replica, so that all have the same adapters."""
    MODELS = "models"
    """The list of models: from a replica, or from the command line while there is none."""
    PROBE = "probe"
    """Answered by the router: 200 while it accepts requests."""
    LOAD = "load"
    """Answered by the router: its requests in progress."""
    METRICS = "metrics"
    """Rejected: metrics of an arbitrary replica would mislead."""
    FORWARD = "forward"
    """Any other path: sent to the least loaded replica, never held."""


COMPUTE_PATHS = frozenset(
    (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/embeddings",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
    )
)
"""Paths of POST requests whose prompts are computed."""
TOKENIZER_PATHS = frozenset(
    (
        "/v1/completions/render",
        "/v1/chat/completions/render",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
    )
)
"""Paths of POST requests that only need a tokenizer: they do not wait for a short queue."""
_ROUTES = {
    "/v1/load_lora_adapter": Route.ADAPTER,
    "/v1/unload_lora_adapter": Route.ADAPTER,
    "/load": Route.LOAD,
    "/metrics": Route.METRICS,
    "/v1/models": Route.MODELS,
    **dict.fromkeys(("/health", "/ping", "/livez", "/readyz", "/startupz"), Route.PROBE),
}


def route_of(method: bytes, path: str) -> Route:
    """Return how to treat a request."""
    if method == b"POST" and (path in COMPUTE_PATHS or path in TOKENIZER_PATHS):
        return Route.GENERATE
    return _ROUTES.get(path, Route.FORWARD)
