"""Routes for GET and HEAD. Load balancers use HEAD, and aiperf before it measures."""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter

Handler = Callable[..., Any]


def get_and_head(router: APIRouter, path: str) -> Callable[[Handler], Handler]:
    """Register a function for GET and HEAD of a path.

    HEAD is a separate route, excluded from /openapi.json: FastAPI gives all methods of one route the same ID there and
    logs a warning.
    """

    def register(handler: Handler) -> Handler:
        router.add_api_route(path, handler, methods=["GET"])
        router.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)
        return handler

    return register
