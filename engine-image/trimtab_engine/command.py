"""The console entry point `trimtab-engine`: it hears SIGTERM and Ctrl-C before anything large is imported.

A container's first process ignores a signal that it has no handler for. One that is told to end while it starts would
otherwise sit out its grace period; and who presses Ctrl-C is not helped by a traceback of imports.
"""

import os
import signal
import sys

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM  # as a shell says it; a server that has started ends with 0


def main() -> int:
    """Run one command. Returns its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    from trimtab_engine.cli import main as run_command

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return run_command()
