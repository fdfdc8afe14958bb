"""Console entry point `trimtab-engine`. Installs handlers of SIGTERM and Ctrl-C, and starts the engine core, before any
large import.

PID 1 of a container ignores signals that have no handler: without this, a pod deleted during startup would wait for its
whole grace period. Ctrl-C during imports would print a traceback.
"""

import os
import signal
import sys

from trimtab_engine.engine_client.early_core import end_early_core, start_early_core
from trimtab_engine.ipc import process_age  # noqa: F401 - it records when this program began

EXIT_NOT_INSTALLED = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM  # shell convention; a server that has started exits with 0


def main() -> int:
    """Run one command and return its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    signal.signal(signal.SIGINT, _exit_interrupted)
    start_early_core(sys.argv[1:])
    try:
        return _run()
    finally:
        end_early_core()


def _exit_interrupted(*_: object) -> None:
    end_early_core()
    os._exit(EXIT_INTERRUPTED)


def _run() -> int:
    try:
        from trimtab_engine.cli import main as run_command
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "trimtab_engine":
            raise
        print(
            f"trimtab-engine: the Python package {error.name} is not installed; pip install 'trimtab[engine]'",
            file=sys.stderr,
        )
        return EXIT_NOT_INSTALLED

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
