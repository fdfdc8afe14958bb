"""The console entry point installs its SIGTERM handler first: PID 1 of a container ignores signals without one. Ctrl-C
prints no traceback of imports.
"""

import signal
import subprocess
import sys

import pytest
from trimtab_engine import command
from trimtab_engine.ipc import process_exit

PROBE = """
import signal, sys
from trimtab_engine import command
real = signal.signal
def heard(number, handler):
    print(number, *sorted(name for name in sys.modules if name.startswith(("trimtab_engine.", "msgspec", "torch"))))
    return real(number, handler)
signal.signal = heard
sys.argv = ["trimtab-engine", "--version"]
sys.exit(command.main())
"""
SMALL = {
    *("command", "config", "config.core_environment", "engine_client", "engine_client.early_core"),
    *("ipc", "ipc.parent_death", "ipc.process_age"),
}
"""Modules that start the core, and import no other package."""
ENDED = """
import os, signal, sys
from trimtab_engine import command
class EndsUs:
    def find_spec(self, *_):
        os.kill(os.getpid(), signal.{name})
sys.meta_path.insert(0, EndsUs())
command.main()
"""


def test_signal_handlers_are_installed_before_large_imports() -> None:
    first, *rest = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    number, *modules = first.split()
    assert int(number) == signal.SIGTERM
    assert {name.removeprefix("trimtab_engine.") for name in modules} <= SMALL
    assert rest[-1].startswith("trimtab-engine ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_during_startup_exits_silently(number: signal.Signals) -> None:
    program = ENDED.format(name=number.name)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + number, "", "")


def test_ctrl_c_exit_code_is_the_same_before_and_after_imports() -> None:
    assert command.EXIT_INTERRUPTED == process_exit.EXIT_INTERRUPTED == 130


MISSING = """
import sys
sys.modules["{missing}"] = None
from {package}.command import {entry}
sys.argv = ["{program}", "--help"]
sys.exit({entry}())
"""


@pytest.mark.parametrize(
    ("program", "package", "entry", "missing", "extra"),
    [
        ("trimtab-engine", "trimtab_engine", "main", "msgspec", "trimtab[engine]"),
        ("trimtab", "trimtab_operator", "trimtab", "typer", "trimtab[operator]"),
    ],
)
def test_missing_package_is_one_line_with_the_extra(
    program: str, package: str, entry: str, missing: str, extra: str
) -> None:
    script = MISSING.format(program=program, package=package, entry=entry, missing=missing)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert run.stderr.strip() == f"{program}: the Python package {missing} is not installed; pip install '{extra}'"
