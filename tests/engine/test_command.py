"""The console entry point hears SIGTERM from its first moment: a container's first process would ignore it."""

import signal
import subprocess
import sys

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
TERMINATED = """
import os, signal, sys
from trimtab_engine import command
class EndsUs:
    def find_spec(self, *_):
        os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, EndsUs())
command.main()
"""


def test_sigterm_is_heard_before_anything_large_is_imported() -> None:
    first, *rest = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert first == f"{signal.SIGTERM} trimtab_engine.command"
    assert rest[-1].startswith("trimtab-engine ")


def test_a_command_that_is_told_to_end_while_it_starts_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", TERMINATED], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGTERM, "")
