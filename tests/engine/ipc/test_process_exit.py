"""Tests of process exit: exit code, flushed output, exit handlers."""

import subprocess
import sys

CHILD = """
import atexit, gc
from trimtab_engine.ipc.process_exit import exit_process, freeze_gc_before_exit
atexit.register(lambda: print("exit handlers ran", len(gc.get_objects()) > 1000))
print("last words", end=" ")
"""


def run_child(ending: str) -> tuple[int, str]:
    child = subprocess.run([sys.executable, "-c", CHILD + ending], capture_output=True, text=True, check=False)
    return child.returncode, child.stdout


def test_exit_process_flushes_output_and_skips_exit_handlers() -> None:
    assert run_child("exit_process(3)") == (3, "last words ")


def test_freeze_gc_before_exit_runs_exit_handlers_after_freeze() -> None:
    assert run_child("") == (0, "last words exit handlers ran True\n")
    assert run_child("freeze_gc_before_exit()") == (0, "last words exit handlers ran False\n")
