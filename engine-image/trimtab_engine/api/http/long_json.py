"""Incremental JSON encoding of long responses: the encoder holds the interpreter lock, also in a thread, and would
block all other requests of the process.
"""

import json
from collections.abc import Iterator
from typing import Any

MAX_ENTRIES_PER_PIECE = 2_000  # of lists and their elements: encoded within a few milliseconds

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def long_json(value: Any) -> bytes:
    """Return the JSON without blanks, like json.dumps. Object keys must be strings."""
    return "".join(pieces(value)).encode()


def pieces(value: Any) -> Iterator[str]:
    """Yield the JSON in pieces that each encode quickly."""
    if isinstance(value, dict) and _weight(value) > MAX_ENTRIES_PER_PIECE:
        yield "{"
        for number, (key, item) in enumerate(value.items()):
            yield f"{',' if number else ''}{_ENCODER.encode(key)}:"
            yield from pieces(item)
        yield "}"
    elif isinstance(value, list) and _weight(value) > MAX_ENTRIES_PER_PIECE:
        yield "["
        for number, run in enumerate(_runs(value)):
            yield "," if number else ""
            yield from pieces(run[0]) if len(run) == 1 else [_ENCODER.encode(run)[1:-1]]
        yield "]"
    else:
        yield _ENCODER.encode(value)


def _runs(items: list[Any]) -> Iterator[list[Any]]:
    """Yield groups of elements that are encoded together; a long element is a group by itself."""
    run: list[Any] = []
    weight = 0
    for item in items:
        own = _weight(item)
        if run and weight + own > MAX_ENTRIES_PER_PIECE:
            yield run
            run, weight = [], 0
        run.append(item)
        weight += own
    if run:
        yield run


def _weight(value: Any) -> int:
    """Return the number of nested entries, counted only up to the limit."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return 1
    total = 1
    for item in value:
        total += _weight(item) if isinstance(item, dict | list) else 1
        if total > MAX_ENTRIES_PER_PIECE:
            break
    return total
