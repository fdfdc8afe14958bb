"""Waiting for other processes, with long timeouts because machines may be busy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

DEADLINE_SECONDS = 120.0
LOOK_SECONDS = 0.01


def until(condition: Callable[[], bool], what: str) -> None:
    """Look until it is so; fails after DEADLINE_SECONDS."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(LOOK_SECONDS)


def is_gone(pid: int) -> bool:
    """Return True if the process has ended, even if its exit code has not been collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until_gone(pids: Iterable[int]) -> None:
    """Wait until the processes have ended, which takes a moment after their killer or parent."""
    left = list(pids)
    until(lambda: all(is_gone(pid) for pid in left), f"the end of {left}")
