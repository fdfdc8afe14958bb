"""Parsing and validation of field values from requests: kinds, bounds, and errors with the nearest valid value. Used by
the live configuration and the memory plan. Pure.
"""

import difflib
import math
from dataclasses import dataclass
from typing import Literal

from trimtab_engine.config.quantity import parse_quantity

Json = dict[str, object]
Kind = Literal["integer", "number", "bytes", "choice", "switch"]
Number = int | float
Value = int | float | str | bool
LARGEST_NUMBER = 1 << 53  # JSON numbers beyond it are inexact; all bounds are below
MAX_ECHO_CHARACTERS = 100  # of a refused value in an answer: enough to recognise it

WANTED = {"integer": "an integer", "number": "a number", "bytes": "a number of bytes, or a size such as 4Gi"}
"""Descriptions of kinds for error messages."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A minimum or maximum, and its reason for error messages."""

    value: Number
    reason: str


Bounds = tuple[Bound, Bound]


@dataclass(frozen=True, slots=True)
class InvalidValue:
    """Reason why a value does not have the field's kind, and the nearest valid one."""

    message: str
    nearest: Value | None = None


def read(
    kind: Kind, given: str, value: object, *, bounds: Bounds | None = None, choices: tuple[str, ...] = ()
) -> Value | InvalidValue:
    """Return the value as this kind. A bool is no number, text is not read as one, integers must be integral."""
    if kind == "switch":
        return (
            value if isinstance(value, bool) else InvalidValue(f"{given} must be true or false, not {kind_of(value)}")
        )
    if kind == "choice":
        return _read_choice(given, value, choices)
    if kind == "bytes" and isinstance(value, str) and (size := parse_quantity(value)) is not None:
        value = size
    wanted = WANTED[kind]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return InvalidValue(f"{given} must be {wanted}, not {_in_its_words(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        return InvalidValue(f"{given} must be {wanted}, not {value}")
    value = clamp(value, -LARGEST_NUMBER - 1, LARGEST_NUMBER + 1)  # values beyond are clamped
    if kind == "number":
        return value
    if value != int(value):
        low, high = bounds or (Bound(-LARGEST_NUMBER, ""), Bound(LARGEST_NUMBER, ""))
        return InvalidValue(f"{given} must be {wanted}, not {value}", clamp(round(value), low.value, high.value))
    return int(value)


def _in_its_words(value: object) -> str:
    """Return a text as given, with quotes if it looks like a number."""
    if not isinstance(value, str):
        return kind_of(value)
    is_number = value.strip().replace(".", "", 1).isdecimal()
    return f'"{shorten(value)}"' + (f"; write {value.strip()} without quotes" if is_number else "")


def _read_choice(given: str, value: object, choices: tuple[str, ...]) -> str | InvalidValue:
    allowed = " or ".join(choices)
    if not isinstance(value, str):
        return InvalidValue(f"{given} must be {allowed}, not {kind_of(value)}")
    if value in choices:
        return value
    close = difflib.get_close_matches(value[:MAX_ECHO_CHARACTERS].lower(), choices, n=1)
    nearest = close[0] if close else None
    return InvalidValue(f"{given} is {shorten(value)}; it must be {allowed}", nearest)


@dataclass(frozen=True, slots=True)
class FieldError:
    """Reason why a field cannot have a value, and the nearest valid one."""

    field: str
    value: object
    message: str
    min: Number | None = None
    max: Number | None = None
    nearest: Value | None = None

    def to_json(self) -> Json:
        return {
            "field": self.field,
            "value": _echo(self.value),
            "min": self.min,
            "max": self.max,
            "nearest": self.nearest,
            "message": self.message,
        }


def _echo(value: object) -> object:
    """Return the rejected value in a short form that JSON can carry."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        return in_words(value)
    return shorten(value) if isinstance(value, str) else value


def in_words(number: Number) -> str:
    """Return a number for a message. Numbers clamped by `read` are not shown as if they were given."""
    if abs(number) <= LARGEST_NUMBER:
        return str(number)
    return "a number beyond 2^53" if number > 0 else "a number below -2^53"


def kind_of(value: object) -> str:
    """Return the JSON type name of the value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    return "a string" if isinstance(value, str) else "a number"


def clamp(number: Number, low: Number, high: Number) -> Number:
    return max(low, min(high, number))


def shorten(text: str) -> str:
    return text if len(text) <= MAX_ECHO_CHARACTERS else text[:MAX_ECHO_CHARACTERS] + "..."
