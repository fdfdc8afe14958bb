"""Input lines, and files of answers that survive kills."""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from trimtab_engine.api.batches.lines import (
    MAX_ERRORS,
    MAX_LINE_BYTES,
    AnswerFile,
    answer_line,
    answered_numbers,
    check_lines,
    requests_after,
)

ENDPOINT = "/v1/completions"
GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": ENDPOINT, "body": {"prompt": "x"}}


def check(tmp_path: Path, *lines: Any) -> list[tuple[str, int | None]]:
    """Return the codes and line numbers of the errors of these lines; dicts become JSON."""
    path = tmp_path / "input"
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines))
    return [(error.code, error.line) for error in check_lines(path, ENDPOINT)[1]]


def test_lines_all_errors_have_their_line_numbers(tmp_path: Path) -> None:
    found = check(
        tmp_path,
        GOOD,
        b"{not JSON",
        b"",
        GOOD,
        GOOD | {"custom_id": "b", "method": "GET"},
        GOOD | {"custom_id": "c", "url": "/v1/embeddings"},
        GOOD | {"custom_id": "d", "body": {"stream": True}},
        GOOD | {"custom_id": "e", "body": [1]},
        GOOD | {"custom_id": ""},
        {"custom_id": "f"},
        b'"text"',
        b"\xff\xfe",
        b'{"custom_id": "\xff", "method": "POST", "url": "/v1/completions", "body": {}}',
    )
    assert found == [
        ("invalid_json_line", 2),
        ("duplicate_custom_id", 4),
        ("invalid_method", 5),
        ("mismatched_url", 6),
        ("invalid_request", 7),
        ("invalid_json_line", 8),
        ("invalid_custom_id", 9),
        ("invalid_json_line", 10),
        ("invalid_json_line", 11),
        ("invalid_json_line", 12),
        ("invalid_json_line", 13),
    ]


def test_lines_stream_is_named_in_its_error(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_text(json.dumps(GOOD | {"body": {"stream": True}}))
    [error] = check_lines(path, ENDPOINT)[1]
    assert (error.message, error.param) == ("stream: not supported in a batch; remove it", "body.stream")


def test_lines_long_line_does_not_hide_the_next(tmp_path: Path) -> None:
    long = b'{"custom_id": "' + b"x" * (3 * MAX_LINE_BYTES) + b'"}'
    assert check(tmp_path, long, GOOD, b"{") == [("line_too_long", 1), ("invalid_json_line", 3)]


@pytest.mark.parametrize("lines", [(), (b"",), (b" ", b"\t")])
def test_lines_without_requests_are_an_error(tmp_path: Path, lines: tuple[bytes, ...]) -> None:
    assert check(tmp_path, *lines) == [("empty_file", None)]


def test_lines_number_of_errors_is_bounded(tmp_path: Path) -> None:
    assert len(check(tmp_path, *[b"{"] * 1000)) == MAX_ERRORS


def test_lines_windows_line_ends_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"".join(json.dumps(GOOD | {"custom_id": name}).encode() + b"\r\n" for name in "ab"))
    assert check_lines(path, ENDPOINT) == (2, [])
    assert [number for number, _ in requests_after(path, {1})] == [2]


def written(number: int) -> bytes:
    return answer_line("batch_1", number, f"c{number}", {"status_code": 200}, None)


@pytest.mark.parametrize("end", [b"", b'{"id": "batch_req_1_3", "cust', b"\0" * 100, b"\0" * 50 + b"\n", b"\xff\n"])
def test_answers_incomplete_end_is_removed(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "answers"
    path.write_bytes(written(1) + written(2) + end)
    assert answered_numbers(path) == {1, 2}
    assert path.read_bytes() == written(1) + written(2)


def test_answers_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    """A limit on the size of files fails writes in the middle of a line, as a full disk does."""
    path, program = tmp_path / "answers", tmp_path / "program.py"
    program.write_text(
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from trimtab_engine.api.batches.lines import AnswerFile\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (250, {resource.RLIM_INFINITY}))\n"
        "file = AnswerFile(Path(sys.argv[1]))\n"
        "try:\n"
        "    [file.append(b'x' * 99 + b'\\n') for _ in range(9)]\n"
        "except OSError as error:\n"
        "    print(error.strerror)\n"
    )
    run = subprocess.run([sys.executable, program, path], capture_output=True, text=True, check=True)
    assert run.stdout == "File too large\n"
    assert path.read_bytes() == (b"x" * 99 + b"\n") * 2


WRITER = """
import sys
from pathlib import Path
from trimtab_engine.api.batches.lines import AnswerFile, answer_line, answered_numbers
path = Path(sys.argv[1])
answered = answered_numbers(path)
file = AnswerFile(path)
print("started", flush=True)
for number in range(1, 100_000_000):
    if number not in answered:
        file.append(answer_line("batch_1", number, f"c{number}", {"status_code": 200, "body": "x" * 5000}, None))
"""


def test_answers_killed_writers_write_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "answers"
    for delay in (0.002, 0.013, 0.031):
        with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(delay)
            writer.kill()
    count = len(answered_numbers(path))
    ids = [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]
    assert ids == [f"c{number}" for number in range(1, count + 1)]
    assert count > 3


def test_answer_file_appends_to_earlier_answers(tmp_path: Path) -> None:
    for number in (1, 2):
        file = AnswerFile(tmp_path / "answers")
        file.append(written(number))
        file.close()
    assert answered_numbers(tmp_path / "answers") == {1, 2}
