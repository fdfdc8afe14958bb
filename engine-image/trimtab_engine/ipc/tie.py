"""A process that ends with the one that started it, however that dies, and whenever."""

import ctypes
import os
import signal

PARENT_VARIABLE = "TRIMTAB_PARENT_PID"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
ORPHANED_EXIT_CODE = 1


def tied_environment(environment: dict[str, str]) -> dict[str, str]:
    """The environment of a process that calls `end_with_parent`: who started it is in there."""
    return {**environment, PARENT_VARIABLE: str(os.getpid())}


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies; end at once where it has died already.

    The kernel tells of no death before it was asked, and a parent may die while this process still imports: without
    `tied_environment` such an orphan would wait for ever.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is not None and os.getppid() != int(parent):
        os._exit(ORPHANED_EXIT_CODE)
