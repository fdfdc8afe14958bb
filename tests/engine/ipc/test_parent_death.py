"""A child process dies with its parent, even if the parent died before the child's request to the kernel."""

import os
import subprocess
import sys

from trimtab_engine.ipc.parent_death import PARENT_VARIABLE, environment_with_parent

CHILD = "from trimtab_engine.ipc.parent_death import exit_with_parent; exit_with_parent(); print('lives')"


def run_child(environment: dict[str, str]) -> tuple[int, str]:
    command = [sys.executable, "-c", CHILD]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return child.returncode, child.stdout


def test_child_of_living_parent_stays_alive() -> None:
    assert run_child(environment_with_parent(dict(os.environ))) == (0, "lives\n")


def test_orphan_exits_immediately() -> None:
    assert run_child({**os.environ, PARENT_VARIABLE: "1"}) == (1, "")
