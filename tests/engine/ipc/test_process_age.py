"""Age of a process."""

import subprocess
import sys

from trimtab_engine.ipc.process_age import process_age

SLEEP_SECONDS = 0.3
CLOCK_TICK_SECONDS = 0.01
EXECUTED = "from trimtab_engine.ipc.process_age import process_age; print(process_age())"


def test_age_continues_in_an_executed_program() -> None:
    program = f"import os, sys, time; time.sleep({SLEEP_SECONDS}); "
    program += f"os.execv(sys.executable, [sys.executable, '-c', {EXECUTED!r}])"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert float(printed) >= SLEEP_SECONDS - CLOCK_TICK_SECONDS


def test_age_grows() -> None:
    first = process_age()
    assert 0.0 < first <= process_age()
