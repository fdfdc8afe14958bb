"""A process tied to its parent ends with it, also when the parent died before the process could ask for that."""

import os
import subprocess
import sys

from trimtab_engine.ipc.tie import PARENT_VARIABLE, tied_environment

CHILD = "from trimtab_engine.ipc.tie import end_with_parent; end_with_parent(); print('lives')"


def run_child(environment: dict[str, str]) -> tuple[int, str]:
    command = [sys.executable, "-c", CHILD]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return child.returncode, child.stdout


def test_a_child_of_the_process_that_tied_it_lives() -> None:
    assert run_child(tied_environment(dict(os.environ))) == (0, "lives\n")


def test_a_child_whose_parent_has_died_already_ends_at_once() -> None:
    assert run_child({**os.environ, PARENT_VARIABLE: "1"}) == (1, "")
