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


GENERATION_PATHS = frozenset(
    (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/completions/render",
        "/v1/chat/completions/render",
        "/tokenize",
        "/detokenize",
    )
)
"""Paths of POST requests that need the model."""
PROMPT_PATHS = frozenset(("/v1/completions", "/v1/chat/completions"))
"""Paths whose prompts use the prefix cache and generate tokens."""
COMPUTE_PATHS = PROMPT_PATHS | {"/v1/embeddings"}
"""Paths whose prompts are computed; the others only need a tokenizer."""
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
    if method == b"POST" and path in GENERATION_PATHS:
        return Route.GENERATE
    return _ROUTES.get(path, Route.FORWARD)
