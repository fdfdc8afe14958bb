"""Lines of a trace file, plain or gzipped. A file with a bad line is rejected as a whole."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from trimtab_simulator.errors import BadTrace

Row = TypeVar("Row")

GZIP_MAGIC = b"\x1f\x8b"
MAX_SHOWN = 5  # bad lines in one message
MAX_BYTES = 2 << 30  # of an unpacked file
MAX_TOKENS = 100_000_000  # of one request: more indicates a wrong column


def read_text(path: Path) -> str:
    """Return the file's text. Raise BadTrace if it is missing, invalid gzip, or not UTF-8."""
    try:
        data = path.read_bytes()
        if data.startswith(GZIP_MAGIC):
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
                data = packed.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadTrace(f"{path} cannot be read: {reason}; give a trace file, plain or gzipped") from error
    if len(data) > MAX_BYTES:
        raise BadTrace(f"{path} has more than {MAX_BYTES >> 30} GiB when unpacked; cut it")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadTrace(f"{path} line {line}: this is not UTF-8 text") from error


def read_rows(path: Path, lines: Iterable[tuple[int, Any]], parse: Callable[[Any], Row]) -> list[Row]:
    """Parse every line. Raise BadTrace with the numbers and problems of the bad lines.

    `parse` raises ValueError or KeyError, whose message is the reason.
    """
    rows: list[Row] = []
    bad: list[str] = []
    num_bad = 0
    for number, line in lines:
        try:
            rows.append(parse(line))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            num_bad += 1
            if len(bad) < MAX_SHOWN:
                bad.append(f"line {number}: {_reason(error)}")
    if bad:
        more = f"; and {num_bad - len(bad)} more bad lines" if num_bad > len(bad) else ""
        raise BadTrace(f"{path}: {'; '.join(bad)}{more}. Nothing was replayed; fix or remove these lines")
    if not rows:
        raise BadTrace(f"{path} has no requests in it; give a trace with at least one row")
    return rows


def csv_lines(text: str) -> Iterable[tuple[int, dict[str, str]]]:
    """Yield the rows of a CSV file with a header, with line numbers."""
    reader = csv.DictReader(io.StringIO(text), restkey="", restval="")
    for row in reader:
        yield reader.line_num, row


def json_lines(text: str) -> Iterable[tuple[int, str]]:
    """Return the lines with a JSON object each, with line numbers."""
    # str.splitlines() would also split at U+2028 and others, which JSON strings may contain.
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def json_object(line: str) -> dict[str, Any]:
    """Parse one line of JSON, which must be an object."""
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"this is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TypeError("this is not a JSON object")
    return value


def number(row: dict[str, Any], column: str, *, least: float = 0.0) -> float:
    """Return a finite number of at least `least`."""
    found = row.get(column)
    if found is None or found == "" or isinstance(found, bool):
        raise ValueError(f"{column} is missing")
    try:
        value = float(found)
    except (TypeError, ValueError):
        raise ValueError(f"{column} is {str(found)[:40]!r}, which is not a number") from None
    if not math.isfinite(value) or value < least:
        raise ValueError(f"{column} is {found}; it must be a number of at least {least:g}")
    return value


def tokens(row: dict[str, Any], column: str) -> int:
    """Return a number of tokens: an integer, 0 or more."""
    value = number(row, column)
    if value != int(value) or value > MAX_TOKENS:
        raise ValueError(f"{column} is {row[column]}; it must be a whole number of tokens, at most {MAX_TOKENS:,}")
    return int(value)


def _reason(error: Exception) -> str:
    return str(error.args[0]) if error.args else type(error).__name__
