"""The console entry point `trimtab-engine`: it hears SIGTERM before anything large is imported.

A container's first process ignores a signal that it has no handler for. One that is told to end while it starts would
otherwise sit out its grace period.
"""

import signal
import sys

EXIT_TERMINATED = 128 + signal.SIGTERM  # as a shell says it; a server that has started ends with 0


def main() -> int:
    """Run one command. Returns its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    from trimtab_engine.cli import main as run_command

    return run_command()
