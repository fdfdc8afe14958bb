"""JSON bodies of admin calls: values that cannot be sent to the core are rejected."""

import json
import math
from typing import Any

import msgspec
from fastapi import Request

from trimtab_engine.api.http.errors import ApiError, shorten

MAX_INT64 = 2**63 - 1
MAX_INT64_CHARACTERS = 19  # 9223372036854775807


async def read_json(request: Request) -> Any:
    """Return the body. Rejects values that cannot be sent to the core: NaN, infinity, invalid text."""
    try:
        body = json.loads(await request.body(), parse_constant=_reject, parse_float=_finite, parse_int=_integer)
        msgspec.msgpack.encode(body)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {shorten(str(error))}") from error
    return body


def _reject(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _reject(shorten(text))


def _integer(text: str) -> int:
    """Return the integer, clamped to 64 bits, so that the range check of the field reports it."""
    if len(text) <= MAX_INT64_CHARACTERS:
        return min(int(text), MAX_INT64)
    return -MAX_INT64 if text.startswith("-") else MAX_INT64
