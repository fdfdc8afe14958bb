"""Lines of a batch's input file, and of its answers."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from trimtab_engine.api.batches.records import LineError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
MAX_LINES = 50_000
MAX_LINE_BYTES = 8 << 20  # as for the body of a single request
MAX_ERRORS = 50  # reported for one file
MAX_CUSTOM_ID_CHARACTERS = 512
ID_PREFIX = "batch_req_"

Json = dict[str, Any]


class LineBody(msgspec.Struct):
    """The fields of a body that are checked before the batch runs; its endpoint checks all others."""

    stream: Any = None


class InputLine(msgspec.Struct):
    """One request of an input file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


def check_lines(path: Path, endpoint: str) -> tuple[int, list[LineError]]:
    """Return the number of valid requests in an input file, and the errors of its lines."""
    errors: list[LineError] = []
    seen: set[str] = set()
    for number, line in _lines(path):
        if len(seen) >= MAX_LINES:
            errors.append(LineError(code="too_many_tasks", message=f"the file has more than {MAX_LINES} requests"))
            break
        if (error := _check_line(line, number, endpoint, seen)) is not None:
            errors.append(error)
            if len(errors) >= MAX_ERRORS:
                break
    if not seen and not errors:
        errors.append(LineError(code="empty_file", message="the file has no requests; write one per line"))
    return len(seen), errors


def _check_line(line: bytes, number: int, endpoint: str, seen: set[str]) -> LineError | None:
    """Return the error of a line, or None. Add its custom ID to `seen`."""

    def error(code: str, message: str, param: str | None = None) -> LineError:
        return LineError(code=code, message=message, line=number, param=param)

    if len(line) > MAX_LINE_BYTES:
        return error("line_too_long", f"the line has more than {MAX_LINE_BYTES} bytes; send a shorter request")
    try:
        given = msgspec.json.decode(line, type=InputLine)
        body = msgspec.json.decode(given.body, type=LineBody)
    except (msgspec.DecodeError, UnicodeDecodeError) as reason:
        needed = "the line must be a JSON object with custom_id, method, url and an object as body"
        return error("invalid_json_line", f"{needed} ({reason})")
    if not 0 < len(given.custom_id) <= MAX_CUSTOM_ID_CHARACTERS:
        return error("invalid_custom_id", f"custom_id: use 1 to {MAX_CUSTOM_ID_CHARACTERS} characters", "custom_id")
    if given.custom_id in seen:
        message = f"custom_id: an earlier line has the same one ({given.custom_id[:100]!r}); make each unique"
        return error("duplicate_custom_id", message, "custom_id")
    if given.method != "POST":
        return error("invalid_method", "method: only POST is supported", "method")
    if given.url != endpoint:
        return error("mismatched_url", f"url: must be the endpoint of the batch, {endpoint}", "url")
    if body.stream:
        return error("invalid_request", "stream: not supported in a batch; remove it", "body.stream")
    seen.add(given.custom_id)
    return None


def requests_after(path: Path, answered: set[int]) -> Iterator[tuple[int, InputLine]]:
    """Yield the number and content of each line of a checked file that is not answered yet."""
    for number, line in _lines(path):
        if number not in answered:
            yield number, msgspec.json.decode(line, type=InputLine)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number, from 1, and bytes of each line that is not blank. Of a line that is too long only the beginning
    is read into memory.
    """
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 2):
            number += 1
            if line.strip():
                yield number, line.removesuffix(b"\n")
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)


def answer_line(batch_id: str, number: int, custom_id: str, response: Json | None, error: Json | None) -> bytes:
    """Return the line of an answer. Its ID has the number of the input line, by which a restarted engine knows it."""
    written = {
        "id": f"{ID_PREFIX}{batch_id.rpartition('_')[2]}_{number}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(written) + b"\n"


class _Answer(msgspec.Struct):
    id: str


def answered_numbers(path: Path) -> set[int]:
    """Return the numbers of the input lines that a file answers. Remove an incomplete end, which a kill leaves, or
    which a crash of the machine has filled with zeros.
    """
    if not path.exists():
        return set()
    numbers = set()
    with path.open("r+b") as file:
        end = 0
        for line in file:
            try:
                number = int(msgspec.json.decode(line, type=_Answer).id.rpartition("_")[2])
            except (msgspec.DecodeError, UnicodeDecodeError):
                break
            if not line.endswith(b"\n"):
                break
            numbers.add(number)
            end += len(line)
        file.truncate(end)
    return numbers


class AnswerFile:
    """A file to which whole lines are appended: a line is in it completely or not at all."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, line: bytes) -> None:
        """Write a line. Raises OSError, for example if the disk is full; the file is then unchanged."""
        size = os.fstat(self._file).st_size
        try:
            rest = line
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            os.ftruncate(self._file, size)
            raise

    def close(self) -> None:
        os.close(self._file)
