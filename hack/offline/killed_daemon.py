"""What a Docker daemon of ours leaves that did not end by itself: its containers' processes, and its mounts.

One that is told to stop ends its containers and unmounts its own folder. One that was killed does neither, and nobody
else would: the folder could not even be removed.
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
from .leftovers import Process, belonging, own_line, processes

END_SECONDS = 10.0
MOUNTS = Path("/proc/self/mounts")
ESCAPED = {r"\040": " ", r"\011": "\t", r"\012": "\n", r"\134": "\\"}


def clear() -> bool:
    """End and unmount it where no daemon of ours runs; False when there was nothing."""
    with locked("docker"):
        if docker_cli.own_pid() is not None:
            return False
        folder = docker_cli.own_folder()
        found = list(processes())
        orphans = family(found, folder, own_line(found, os.getpid()))
        for process in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        _wait_for_the_end_of(orphans)
        points = mounts_below(MOUNTS.read_text(), folder)
        for point in points:
            run(["umount", "--lazy", point], log="docker")  # lazily: what was killed just now may still hold it
        if orphans or points:
            if docker_cli.find() is None:  # the bridge may be another daemon's
                docker_daemon.delete_bridge()
            log_line(
                f"docker: its daemon was killed: ended {len(orphans)} processes and {len(points)} mounts that it left"
            )
        return bool(orphans or points)


def family(found: Sequence[Process], folder: Path, besides: frozenset[int]) -> list[Process]:
    """Processes that name the daemon's run-time folder, as containerd and its shims do, and all that they started:
    those of a container name nothing outside it."""
    known = {process.pid for process in belonging(found, (f"{folder}/exec",), besides)}
    while more := {process.pid for process in found if process.parent in known} - known - besides:
        known |= more
    return [process for process in found if process.pid in known]


def mounts_below(table: str, folder: Path) -> list[str]:
    """Mount points in the folder, the last one that was mounted first: it may be in, or on, an earlier one."""
    points = [_unescaped(line.split()[1]) for line in table.splitlines() if len(line.split()) > 1]
    return [point for point in reversed(points) if point.startswith(f"{folder}/")]


def _unescaped(text: str) -> str:
    for written, meant in ESCAPED.items():
        text = text.replace(written, meant)
    return text


def _wait_for_the_end_of(ended: Sequence[Process]) -> None:
    """Their files can be unmounted then; they are children of others, which reap them."""
    end = time.monotonic() + END_SECONDS
    while time.monotonic() < end and any(Path(f"/proc/{process.pid}/exe").exists() for process in ended):
        time.sleep(0.05)
