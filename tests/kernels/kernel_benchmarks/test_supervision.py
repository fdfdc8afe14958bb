"""A phase that hangs, crashes or loses the device fails only its current row, and the run continues."""

import json
import textwrap
import time
from pathlib import Path

import pytest
from kernel_benchmarks.phase import DEVICE_LOST, DONE, FAILED, OUT_OF_TIME
from kernel_benchmarks.report import FILE, Report
from kernel_benchmarks.supervision import run_phase

PART = """
import os, signal, sys, time
from pathlib import Path
from kernel_benchmarks.report import Report
report = Report(Path(sys.argv[1]), "1")
for name, fate in (pair.split("=") for pair in sys.argv[2:]):
    if report.has(name):
        continue
    report.begin(name, seconds=0.5 if fate == "hangs" else 240.0)
    if fate == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fate == "hangs" or fate == "takes long":
        time.sleep(600)
    if fate == "raises":
        raise ValueError(name)
    report.add(name, {"error": "the device"} if fate == "loses the device" else {"share": 1.0})
    if fate == "loses the device":
        sys.exit(4)
"""


LONG_SECONDS = 600


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "a_part.py").write_text(textwrap.dedent(PART))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[3] / 'kernels'}")
    return "a_part"


def run(part: str, folder: Path, *rows: str, seconds: float = 240.0) -> tuple[int, dict[str, str]]:
    path = folder / FILE
    code = run_phase(part, [str(path), *rows], path, "1", deadline=time.time() + seconds)
    found = json.loads(path.read_text()) if path.exists() else {"rows": {}}  # it may not even have started
    assert "running" not in found
    return code, {name: row.get("error", "") for name, row in found["rows"].items()}


def test_successful_phase_returns_its_exit_code(part: str, tmp_path: Path) -> None:
    assert run(part, tmp_path, "one=is well", "two=is well") == (DONE, {"one": "", "two": ""})


@pytest.mark.parametrize(("fate", "expected"), [("dies", "exit code -11"), ("hangs", "hung")])
def test_row_that_ends_process_fails_and_next_is_measured(part: str, tmp_path: Path, fate: str, expected: str) -> None:
    code, rows = run(part, tmp_path, "one=is well", f"two={fate}", "three=is well")
    assert code == DONE
    assert list(rows) == ["one", "two", "three"]
    assert expected in rows["two"]


def test_lost_device_starts_new_process(part: str, tmp_path: Path) -> None:
    code, rows = run(part, tmp_path, "one=loses the device", "two=is well")
    assert (code, rows) == (DONE, {"one": "the device", "two": ""})
    assert DEVICE_LOST not in (DONE, FAILED)


def test_error_outside_of_rows_ends_phase(part: str, tmp_path: Path) -> None:
    code, rows = run(part, tmp_path, "one=raises", "two=is well")
    assert code == FAILED
    assert "exit code 1" in rows["one"]


def test_deadline_ends_phase(part: str, tmp_path: Path) -> None:
    began = time.monotonic()
    code, rows = run(part, tmp_path, "one=takes long", seconds=2.0)
    assert (code, rows) == (OUT_OF_TIME, {})
    assert time.monotonic() - began < LONG_SECONDS


def test_module_that_does_not_start_is_not_restarted_forever(part: str, tmp_path: Path) -> None:
    path = tmp_path / FILE
    assert run_phase("no_such_part", [], path, "1", deadline=time.time() + 60) == FAILED
    assert Report(path).rows == {}
