"""A process ends with its code and its last words, and takes nothing apart."""

import subprocess
import sys

CHILD = """
import atexit, gc
from trimtab_engine.ipc.end import leave, prepare_to_leave
atexit.register(lambda: print("taken apart", len(gc.get_objects()) > 1000))
print("last words", end=" ")
"""


def run_child(ending: str) -> tuple[int, str]:
    child = subprocess.run([sys.executable, "-c", CHILD + ending], capture_output=True, text=True, check=False)
    return child.returncode, child.stdout


def test_a_process_that_leaves_says_what_it_has_written_and_runs_no_exit_handler() -> None:
    assert run_child("leave(3)") == (3, "last words ")


def test_who_prepares_to_leave_runs_its_exit_handlers_with_little_to_look_through() -> None:
    assert run_child("") == (0, "last words taken apart True\n")
    assert run_child("prepare_to_leave()") == (0, "last words taken apart False\n")
