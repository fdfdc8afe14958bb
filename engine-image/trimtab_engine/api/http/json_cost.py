"""Limit on the cost of parsing a JSON body, which depends on its values and not on its bytes: eight MiB of text take 10
milliseconds, of small lists 1.5 seconds, in which the event loop serves no other request. The values are counted
beforehand, in a thread and without Python's global lock.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from fastapi import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trimtab_engine.api.http.errors import ApiError, invalid
from trimtab_engine.api.http.uploads import is_upload

ITEM_COST, LIST_COST, OBJECT_COST = 1, 8, 25
"""Relative time to parse and validate a value, a list and an object in addition to their contents; the unit is about
0.1 microseconds."""
MAX_COST = 250_000  # about 40 ms
CHEAP_BYTES = MAX_COST // OBJECT_COST  # of which no content exceeds the limit
CHUNK_BYTES = 1 << 20
QUOTE, BACKSLASH, COMMA, LIST, OBJECT = (ord(character) for character in '"\\,[{')

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def json_cost(body: bytes) -> int:
    """Return the cost of a JSON text: of its values, lists and objects outside of strings. Invalid JSON has some cost,
    too.
    """
    whole: Bytes = np.frombuffer(body, np.uint8)
    cost, is_inside, num_backslashes = ITEM_COST, False, 0
    for start in range(0, len(whole), CHUNK_BYTES):
        part = whole[start : start + CHUNK_BYTES]
        quotes, num_backslashes = _unescaped_quotes(part, num_backslashes)
        # Parities survive the overflow of 8-bit sums.
        inside = (np.cumsum(quotes, dtype=np.uint8) & 1).astype(bool) ^ is_inside
        outside = part[~inside]
        for character, each in ((COMMA, ITEM_COST), (LIST, LIST_COST), (OBJECT, OBJECT_COST)):
            cost += each * int(np.count_nonzero(outside == character))
        is_inside = bool(inside[-1])
    return cost


def _unescaped_quotes(part: Bytes, before: int) -> tuple[Any, int]:
    """Return where quotes begin or end strings, [bytes] bool, and the number of backslashes at the end of the part.
    `before`: that of the part before.
    """
    quotes = part == QUOTE
    others = np.flatnonzero(part != BACKSLASH)
    places = np.flatnonzero(quotes)
    previous = np.searchsorted(others, places) - 1  # the last byte before each quote that is no backslash
    first_run = places + before  # of a quote with backslashes only before it
    run = np.where(previous >= 0, places - others[np.maximum(previous, 0)] - 1, first_run) if len(others) else places
    quotes[places[run % 2 == 1]] = False
    at_end = len(part) - 1 - int(others[-1]) if len(others) else len(part) + before
    return quotes, at_end


class JsonCostLimit:
    """Middleware that rejects bodies whose parsing would delay others. `max_cost` is called for each request."""

    def __init__(
        self, app: ASGIApp, max_cost: Callable[[], int], respond: Callable[[ApiError], Response] = ApiError.response
    ) -> None:
        self._app, self._max_cost, self._respond = app, max_cost, respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH") or is_upload(scope):
            await self._app(scope, receive, send)
            return
        parts: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] != "http.request":  # the client has left
                await self._app(scope, _replay(message, receive), send)
                return
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                break
        body = b"".join(parts)
        del parts
        if len(body) > CHEAP_BYTES:
            cost, most = await asyncio.to_thread(json_cost, body), self._max_cost()
            if cost > most:
                error = invalid(
                    f"the body has too many values: their cost is {cost} ({ITEM_COST} for each value, {LIST_COST} for "
                    f"each list, {OBJECT_COST} for each object), above {most}; send fewer prompts or shorter lists",
                )
                await self._respond(error)(scope, receive, send)
                return
        await self._app(scope, _replay({"type": "http.request", "body": body, "more_body": False}, receive), send)


def _replay(first: Message, receive: Receive) -> Receive:
    """Return a `receive` that returns this message before all others."""
    pending = [first]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed
