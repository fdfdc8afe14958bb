"""Immediate exit of the engine's processes after their resources are closed.

Processes wait for each other's exit (API servers and cores by the first process, all by the kubelet), and the
interpreter's teardown takes about a second with torch or transformers loaded, several seconds on a busy machine.
"""

import gc
import logging
import os
import signal
import sys
from typing import NoReturn

EXIT_INTERRUPTED = 128 + signal.SIGINT  # the shell's exit code after Ctrl-C


def exit_process(exit_code: int) -> NoReturn:
    """End this process after flushing its output. No exit handler runs."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def freeze_gc_before_exit() -> None:
    """Freeze garbage collection before a normal exit: exit handlers run, but the final collections have nothing to
    scan.
    """
    gc.freeze()
