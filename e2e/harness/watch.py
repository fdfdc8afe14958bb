"""Every state of an object, from a kubectl watch: polling would miss short ones."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from harness.kube import Kube, Manifest


class Watched:
    """The states seen so far, oldest first; grows while the watch runs."""

    def __init__(self) -> None:
        self._states: list[Manifest] = []
        self._lock = threading.Lock()

    def add(self, state: Manifest) -> None:
        with self._lock:
            self._states.append(state)

    @property
    def states(self) -> list[Manifest]:
        with self._lock:
            return list(self._states)


@contextmanager
def watch(kube: Kube, kind: str, name: str, namespace: str) -> Iterator[Watched]:
    """Watch an existing object. The first state is the current one."""
    process = subprocess.Popen(
        [kube.kubectl, "get", kind, name, "-n", namespace, "--watch", "-o", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=kube.full_environment(),
    )
    watched = Watched()
    reader = threading.Thread(target=_read, args=(process, watched), daemon=True)
    reader.start()
    try:
        yield watched
    finally:
        process.terminate()
        process.wait(timeout=60.0)
        reader.join(timeout=60.0)
        assert process.stdout is not None
        process.stdout.close()


def _read(process: subprocess.Popen[str], watched: Watched) -> None:
    """Read kubectl's stream of indented JSON documents, each of which ends with a brace in the first column."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("}"):
            watched.add(json.loads("".join(lines)))
            lines = []
