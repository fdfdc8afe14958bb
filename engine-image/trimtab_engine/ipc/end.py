"""How the engine's processes end: at once, when all that they hold has been closed.

Others wait for that end, one after the other (the first process for the API servers, then for the cores, the kubelet
for all of them), and an interpreter that takes apart all that it has loaded needs a second for torch or transformers,
several on a busy machine.
"""

import gc
import logging
import os
import signal
import sys
from typing import NoReturn

EXIT_INTERRUPTED = 128 + signal.SIGINT  # what a shell says of a command that Ctrl-C ended


def leave(exit_code: int) -> NoReturn:
    """End this process; what it has written leaves first. For processes of the engine's own: no exit handler runs."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def prepare_to_leave() -> None:
    """For a process that somebody else ends, who may have exit handlers: they run, but the last collections of garbage
    have nothing to look through."""
    gc.freeze()
