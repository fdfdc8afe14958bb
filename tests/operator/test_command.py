"""The console entry points: Ctrl-C while they load, or while they work, is code 130 and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPTS: dict[str, str] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
INTERRUPTED = """
import os, signal, sys
from trimtab_operator import command
class Interrupts:
    def find_spec(self, *_):
        os.kill(os.getpid(), signal.SIGINT)
sys.argv = ["trimtab", "--version"]
sys.meta_path.insert(0, Interrupts())
command.{entry}()
"""
INTERRUPTED_AT_WORK = """
import os, signal, sys
from trimtab_operator import command
from trimtab_operator.cli import trimtab_command
trimtab_command.facts_of = lambda model: os.kill(os.getpid(), signal.SIGINT)
sys.argv = ["trimtab", "plan", "MODEL", "--gpu", "H100"]
command.trimtab()
"""


@pytest.mark.parametrize(
    "program", [INTERRUPTED.format(entry="trimtab"), INTERRUPTED.format(entry="operator"), INTERRUPTED_AT_WORK]
)
def test_ctrl_c_is_a_code_and_no_traceback(program: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (ended.returncode, ended.stdout) == (130, "")
    assert "Traceback" not in ended.stderr


def test_every_program_of_the_project_is_there() -> None:
    for where in SCRIPTS.values():
        module, _, name = where.partition(":")
        assert callable(getattr(import_module(module), name))


@pytest.mark.parametrize("program", ["trimtab-engine", "trimtab-operator"])
def test_an_image_starts_what_the_project_installs(program: str) -> None:
    """SIGTERM included: a container's first process ignores what it has no handler for."""
    module, _, name = SCRIPTS[program].partition(":")
    imported = f"from {module} import {name}" + ("" if name == "main" else " as main")
    assert imported in (REPOSITORY / "images" / "bin" / program).read_text().splitlines()
