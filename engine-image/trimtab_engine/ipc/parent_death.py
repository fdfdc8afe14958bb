"""Termination of a child process when its parent dies in any way."""

import ctypes
import os
import signal

PARENT_VARIABLE = "TRIMTAB_PARENT_PID"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
ORPHANED_EXIT_CODE = 1


def environment_with_parent(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment for a process that calls `exit_with_parent`; it contains the parent's pid."""
    return {**environment, PARENT_VARIABLE: str(os.getpid())}


def exit_with_parent() -> None:
    """Let the kernel kill this process when its parent dies. Exit immediately if it has died already.

    The kernel does not report deaths before the request, and a parent may die while this process still imports: the pid
    in the environment detects such an orphan.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is not None and os.getppid() != int(parent):
        os._exit(ORPHANED_EXIT_CODE)
