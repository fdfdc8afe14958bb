"""Runs the phases of a run as processes: a hanging one is killed, and a crashed one is restarted after the failed row.
Does not import torch: the device is left to the phases.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from kernel_benchmarks.phase import DEVICE_LOST, DONE, FAILED, NO_GPU, OUT_OF_TIME
from kernel_benchmarks.report import Report

POLL_SECONDS = 0.5
EXPECTED = (DONE, FAILED, NO_GPU, OUT_OF_TIME)


def run_phase(module: str, arguments: list[str], path: Path, run: str, *, deadline: float) -> int:
    """Run `python -m MODULE ARGUMENTS` to its end and return its exit code (phase.py), OUT_OF_TIME if it was killed at
    the deadline. `path` is the report's, which contains the row that was being measured.
    """
    while time.time() < deadline:
        code, why = _watch([sys.executable, "-m", module, *arguments], path, run, deadline)
        report = Report(path, run)
        if code in EXPECTED and not why:
            report.fail_running(f"the process ended with exit code {code} in this row")
            return code
        if time.time() >= deadline:
            report.drop_running()
            return OUT_OF_TIME
        blamed = report.fail_running(why or f"the process ended with exit code {code} in this row")
        if code != DEVICE_LOST and not blamed:
            return FAILED  # outside of any row: it would fail the same way again
    return OUT_OF_TIME


def _watch(command: list[str], path: Path, run: str, deadline: float) -> tuple[int, str]:
    """Return the exit code, and the reason why the process was killed, if it was."""
    process = subprocess.Popen(command, start_new_session=True)
    while True:
        try:
            return process.wait(POLL_SECONDS), ""
        except subprocess.TimeoutExpired:
            why = _why_end(path, run, deadline)
        if why:
            os.killpg(process.pid, signal.SIGKILL)
            return process.wait(), why


def _why_end(path: Path, run: str, deadline: float) -> str:
    now = time.time()
    if now >= deadline:
        return "the run's time is over"
    running = Report(path, run).running
    if running is not None and now > running["until"]:
        return "hung: stopped at its time limit"
    return ""
