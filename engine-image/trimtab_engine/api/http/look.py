"""Routes for who reads: GET, and HEAD for who only looks, as load balancers do and aiperf before it measures."""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter

Handler = Callable[..., Any]


def look(router: APIRouter, path: str) -> Callable[[Handler], Handler]:
    """Register a function for GET and HEAD of a path.

    HEAD is a route of its own, out of /openapi.json: in there FastAPI gives all methods of one route the same id, and
    warns of that in the server's log.
    """

    def register(handler: Handler) -> Handler:
        router.add_api_route(path, handler, methods=["GET"])
        router.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)
        return handler

    return register
