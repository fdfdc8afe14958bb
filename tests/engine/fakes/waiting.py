"""What another process does is waited for: for long, since machines are slow when much is built on them."""

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
    """Ended, be it that nobody has asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until_gone(pids: Iterable[int]) -> None:
    """A process ends a moment after whoever killed it, and after the parent that it is tied to."""
    left = list(pids)
    until(lambda: all(is_gone(pid) for pid in left), f"the end of {left}")
