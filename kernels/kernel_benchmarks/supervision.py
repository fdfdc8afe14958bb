"""Runs the parts of a run as processes: one that hangs in a row is ended, one that dies of a row is started again
behind it. No torch here: the device is left to the parts.
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


def run_part(module: str, arguments: list[str], path: Path, run: str, *, deadline: float) -> int:
    """`python -m MODULE ARGUMENTS` to its end; returns its exit code (phase.py), OUT_OF_TIME where it was ended at the
    deadline. `path` is the report's: what was being measured when the process ended stands there."""
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
            return FAILED  # outside of any row: it would end so again
    return OUT_OF_TIME


def _watch(command: list[str], path: Path, run: str, deadline: float) -> tuple[int, str]:
    """Exit code, and why it was ended here, if it was."""
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
        return "it hung: ended after the time that it may take"
    return ""
