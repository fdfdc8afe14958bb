"""Clean-up after a killed Docker daemon: its containers' processes and its mounts.

A daemon that is stopped ends its containers and unmounts its folder. A killed one does neither, and its folder could
not be removed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from devtools import docker_cli
from devtools.cache import locked
from devtools.process import run
from devtools.progress import log_line

from . import docker_daemon
from .leftovers import Process, ancestors, matching, processes

END_SECONDS = 10.0
MOUNTS = Path("/proc/self/mounts")
ESCAPED = {r"\040": " ", r"\011": "\t", r"\012": "\n", r"\134": "\\"}


def clear() -> bool:
    """End processes and mounts of a killed daemon. Return False if there are none, or the daemon is running."""
    with locked("docker"):
        if docker_cli.own_pid() is not None:
            return False
        folder = docker_cli.own_folder()
        found = list(processes())
        orphans = descendants(found, folder, ancestors(found, os.getpid()))
        for process in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        _await_exit(orphans)
        points = mounts_below(MOUNTS.read_text(), folder)
        for point in points:
            run(["umount", "--lazy", point], log="docker")  # lazily: killed processes may still use it
        if orphans or points:
            if docker_cli.find() is None:  # the bridge may be another daemon's
                docker_daemon.delete_bridge()
            log_line(f"docker: the daemon was killed; ended {len(orphans)} processes, unmounted {len(points)} folders")
        return bool(orphans or points)


def descendants(found: Sequence[Process], folder: Path, excluded: frozenset[int]) -> list[Process]:
    """Return processes with the daemon's exec folder in their arguments (containerd, shims), and their descendants.

    Processes in containers cannot be recognized by their own command line.
    """
    known = {process.pid for process in matching(found, (f"{folder}/exec",), excluded)}
    while more := {process.pid for process in found if process.parent in known} - known - excluded:
        known |= more
    return [process for process in found if process.pid in known]


def mounts_below(table: str, folder: Path) -> list[str]:
    """Return mount points in the folder, last mounted first, since it may be inside or on top of an earlier one."""
    points = [_unescaped(line.split()[1]) for line in table.splitlines() if len(line.split()) > 1]
    return [point for point in reversed(points) if point.startswith(f"{folder}/")]


def _unescaped(text: str) -> str:
    for written, meant in ESCAPED.items():
        text = text.replace(written, meant)
    return text


def _await_exit(ended: Sequence[Process]) -> None:
    """Wait until the processes have exited, so that their files can be unmounted; their parents reap them."""
    end = time.monotonic() + END_SECONDS
    while time.monotonic() < end and any(Path(f"/proc/{process.pid}/exe").exists() for process in ended):
        time.sleep(0.05)
