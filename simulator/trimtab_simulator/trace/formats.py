"""Formats of trace files, detected by their first line.

| format   | first line                                                  | contents                       |
|----------|-------------------------------------------------------------|--------------------------------|
| azure    | TIMESTAMP,ContextTokens,GeneratedTokens                     | a log of requests              |
| mooncake | {"timestamp", "input_length", "output_length", "hash_ids"}  | a log, with prefix blocks      |
| rates    | client,window_start_s,rate,cv,pattern,arg1,arg2             | load per client and window     |
| lengths  | {"client", "window_start_s", "input_tokens", …}             | lengths per client and window  |
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from trimtab_simulator.errors import BadTrace
from trimtab_simulator.trace.arrivals import KEY_TOKENS, Arrival, Trace
from trimtab_simulator.trace.lines import (
    csv_lines,
    json_lines,
    json_object,
    number,
    read_rows,
    read_text,
    tokens,
)

RATE_WINDOW_SECONDS = 600.0
LENGTH_WINDOW_SECONDS = 21_600.0
PATTERNS = ("Gamma", "Weibull", "Poisson", "Exponential")


class Format(StrEnum):
    AZURE = "azure"
    MOONCAKE = "mooncake"
    RATES = "rates"
    LENGTHS = "lengths"


HEADERS = {
    Format.AZURE: {"TIMESTAMP", "ContextTokens", "GeneratedTokens"},
    Format.RATES: {"client", "window_start_s", "rate", "cv"},
}
KEYS = {
    Format.MOONCAKE: {"timestamp", "input_length", "output_length"},
    Format.LENGTHS: {"client", "window_start_s", "input_tokens", "output_tokens"},
}


class RateWindow(NamedTuple):
    """Load of one client in one window: requests a second, and the variation of the gaps between them."""

    client: str
    start: float
    rate: float
    cv: float


@dataclass(frozen=True, slots=True)
class Distribution:
    """Numbers of tokens with their cumulative probabilities."""

    values: tuple[int, ...]
    cumulated: tuple[float, ...]


class LengthWindow(NamedTuple):
    """Lengths of one client's prompts and outputs in one window."""

    client: str
    start: float
    prompts: Distribution
    outputs: Distribution


def format_of(path: Path, text: str) -> Format:
    """Return the format of the file. Raise BadTrace if it is unknown."""
    first = text.split("\n", 1)[0].strip().lstrip("\ufeff")
    names: set[str] = set()
    candidates: Mapping[Format, set[str]] = HEADERS
    if first.startswith("{"):
        candidates = KEYS
        try:
            names = set(json.loads(first))
        except (json.JSONDecodeError, RecursionError):
            raise BadTrace(f"{path} line 1: this is not JSON") from None
    else:
        names = {name.strip() for name in first.split(",")}
    for kind, needed in candidates.items():
        if needed <= names:
            return kind
    known = "; ".join(
        f"{kind.value}: {', '.join(sorted(needed))}" for kind, needed in (*HEADERS.items(), *KEYS.items())
    )
    raise BadTrace(f"{path} line 1: none of the known columns ({known}); give a file of one of these formats")


def read_log(path: Path, text: str, kind: Format) -> Trace:
    """Read a log of requests. It lasts from its first to its last request."""
    parse = _azure_row if kind is Format.AZURE else _mooncake_row
    lines = csv_lines(text.lstrip("\ufeff")) if kind is Format.AZURE else json_lines(text)
    rows = read_rows(path, lines, parse)
    notes = []
    if any(later.at < earlier.at for earlier, later in pairwise(rows)):
        rows.sort(key=lambda row: row.at)
        notes.append("the rows were not in order of time and were sorted")
    num_silent = sum(row.output == 0 for row in rows)
    if num_silent:
        notes.append(f"{num_silent} requests without output tokens are replayed with one")
    start = rows[0].at
    arrivals = [row._replace(at=row.at - start, output=max(1, row.output)) for row in rows]
    return Trace(path.name, arrivals, arrivals[-1].at, tuple(notes))


def _azure_row(row: dict[str, str]) -> Arrival:
    stamp = row.get("TIMESTAMP") or ""
    whole, _, fraction = stamp.partition(".")
    digits = fraction[: len(fraction) - len(fraction.lstrip("0123456789"))]
    zone = fraction[len(digits) :]
    if zone not in ("", "Z", "+00:00") or (fraction and not digits):
        raise ValueError(f"TIMESTAMP is {stamp[:40]!r}; it must be a time such as 2023-11-16 18:17:03.9799600")
    try:
        at = datetime.strptime(whole, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise ValueError(
            f"TIMESTAMP is {stamp[:40]!r}; it must be a time such as 2023-11-16 18:17:03.9799600"
        ) from None
    prompt = tokens(row, "ContextTokens")
    if not prompt:
        raise ValueError("ContextTokens is 0; a request has a prompt of at least one token")
    return Arrival(at + (float(f"0.{digits}") if digits else 0.0), prompt, tokens(row, "GeneratedTokens"))


def _mooncake_row(line: str) -> Arrival:
    row = json_object(line)
    prompt = tokens(row, "input_length")
    if not prompt:
        raise ValueError("input_length is 0; a request has a prompt of at least one token")
    prefix = row.get("hash_ids", [])
    if not isinstance(prefix, list) or not all(isinstance(key, int) and key >= 0 for key in prefix):
        raise ValueError("hash_ids is not a list of numbers")
    if len(prefix) > -(-prompt // KEY_TOKENS):
        raise ValueError(f"hash_ids names {len(prefix)} blocks, but {prompt} tokens have {-(-prompt // KEY_TOKENS)}")
    return Arrival(number(row, "timestamp") / 1000, prompt, tokens(row, "output_length"), tuple(prefix))


def read_rates(path: Path, text: str) -> list[RateWindow]:
    """Return the load per client and window, in order of time."""
    rows = read_rows(path, csv_lines(text.lstrip("\ufeff")), _rate_row)
    seen: set[tuple[str, float]] = set()
    for row in rows:
        if (row.client, row.start) in seen:
            raise BadTrace(f"{path}: client {row.client} has two rows for the window at {row.start:g} s; keep one")
        seen.add((row.client, row.start))
    return sorted(rows, key=lambda row: (row.start, row.client))


def _rate_row(row: dict[str, str]) -> RateWindow:
    if not row.get("client"):
        raise ValueError("client is missing")
    pattern = row.get("pattern")
    if pattern and pattern not in PATTERNS:
        raise ValueError(f"pattern is {pattern[:40]!r}; it must be one of {', '.join(PATTERNS)}")
    return RateWindow(row["client"], number(row, "window_start_s"), number(row, "rate"), number(row, "cv"))


def read_lengths(path: Path, text: str) -> list[LengthWindow]:
    """Return the lengths per client and window."""
    return read_rows(path, json_lines(text), _length_row)


def _length_row(line: str) -> LengthWindow:
    row = json_object(line)
    if not isinstance(row.get("client"), int | str) or row["client"] == "":
        raise ValueError("client is missing")
    start = number(row, "window_start_s")
    return LengthWindow(
        str(row["client"]), start, _distribution(row, "input_tokens"), _distribution(row, "output_tokens")
    )


def _distribution(row: dict[str, Any], column: str) -> Distribution:
    """Parse {length: probability}, as text or as JSON. Length 0 counts as 1: a request has a prompt and a token."""
    found = row.get(column)
    if isinstance(found, str):
        try:
            found = ast.literal_eval(found)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise ValueError(f"{column} is not {{length: probability, …}}") from None
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{column} is not {{length: probability, …}}")
    weights: dict[int, float] = {}
    for key, probability in found.items():
        length, weight = tokens({column: key}, column), number({column: probability}, column)
        weights[max(1, length)] = weights.get(max(1, length), 0.0) + weight
    total = math.fsum(weights.values())
    if not 0.99 < total < 1.01:
        raise ValueError(f"the probabilities of {column} add up to {total:.3f}; they must add up to 1")
    values = tuple(sorted(weights))
    return Distribution(values, tuple(accumulate(weights[value] / total for value in values)))


def load_text(path: Path) -> tuple[str, Format]:
    """Return the file's text and format."""
    text = read_text(path)
    return text, format_of(path, text)
