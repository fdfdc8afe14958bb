"""Leftovers of clusters on this machine: containers, a daemon, mounts, processes and host settings.

Only those of this checkout and of clusters in the cache count; other checkouts are ignored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from devtools import docker_cli
from devtools.cache_root import cache_root
from devtools.errors import ClusterError
from devtools.process import output_of

from . import host_settings

REPOSITORY = Path(__file__).resolve().parent.parent.parent
IN_CACHE = (
    "docker",
    "clusters",
    "scratch",
    "tools",
    "bin",
)  # folders that command lines of a cluster's processes contain
COMMAND_LENGTH = 140  # columns of a command line in a message


@dataclass(frozen=True, slots=True)
class Process:
    """A process as shown in /proc."""

    pid: int
    parent: int
    words: Sequence[str]
    executable: str


def find() -> list[str]:
    """Return a line for each leftover."""
    # Not the whole cache: engines of other checkouts read its models.
    roots = (*(str(cache_root() / name) for name in IN_CACHE), str(REPOSITORY))
    found = [*_containers(), *mounts(Path("/proc/self/mounts").read_text(), roots)]
    pid = docker_cli.own_pid()
    if pid is not None:
        found.append(f"daemon: dockerd, pid {pid}")
    everything = list(processes())
    found += [
        f"process: {process.pid} {' '.join(process.words)[:COMMAND_LENGTH]}"
        for process in matching(everything, roots, ancestors(everything, os.getpid()))
    ]
    found += host_settings.not_restored()
    return found


def _containers() -> list[str]:
    docker = docker_cli.find()
    if docker is None:
        return []
    try:
        listed = output_of(
            ["docker", "ps", "--all", "--format", '{{.Names}} {{.Image}} {{.Label "io.x-k8s.kind.cluster"}}'],
            environment=docker,
        )
    except ClusterError as error:
        return [f"containers: docker ps failed: {error}"]
    own = docker.get("DOCKER_HOST") == docker_cli.own_host()
    return [f"container: {line}" for line in listed.splitlines() if own or "trimtab" in line]


def mounts(table: str, roots: Sequence[str]) -> list[str]:
    """Return mount points below the folders."""
    points = [line.split()[1] for line in table.splitlines() if len(line.split()) > 1]
    return [f"mount: {point}" for point in points if any(point.startswith(f"{root}/") for root in roots)]


def processes() -> Iterator[Process]:
    """Yield all accessible processes, without those that exit meanwhile."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = folder.joinpath("cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            parent = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            executable = os.readlink(folder / "exe")
        except (OSError, ValueError, IndexError):
            continue
        yield Process(int(folder.name), parent, words, executable)


def ancestors(found: Sequence[Process], pid: int) -> frozenset[int]:
    """Return `pid` and its ancestors, such as make, a shell and CI."""
    parents = {process.pid: process.parent for process in found}
    line = set()
    while pid in parents and pid not in line:
        line.add(pid)
        pid = parents[pid]
    return frozenset(line)


def matching(found: Sequence[Process], roots: Sequence[str], excluded: frozenset[int]) -> list[Process]:
    """Return processes whose executable or arguments are in one of the folders, except `excluded`."""
    pattern = re.compile("(?:" + "|".join(re.escape(root.rstrip("/")) for root in roots) + r")(?![\w.-])")
    return [
        process
        for process in found
        if process.pid not in excluded and any(map(pattern.search, (process.executable, *process.words)))
    ]
