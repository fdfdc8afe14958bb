"""Progress lines: each stage says when it starts, how long it should take, that it lives, and how it ended."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for

HEARTBEAT_SECONDS = 30.0  # often enough to see life, rarely enough to keep a CI log readable

_started = time.monotonic()
_print_lock = threading.Lock()


def say(text: str) -> None:
    """One line on stderr (stdout is for results), with the time since the command began."""
    with _print_lock:
        print(f"[{duration(time.monotonic() - _started):>6}] {text}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """7 s, 1m05s: what a reader compares at a glance."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60}m{whole % 60:02d}s"


@contextlib.contextmanager
def stage(name: str, expected_seconds: float) -> Iterator[None]:
    """Announce, watch and close one stage; an exception passes through after a line that says which stage it was."""
    begin = time.monotonic()
    say(f"{name} … (about {duration(expected_seconds)})")
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            say(f"{name}: {duration(time.monotonic() - begin)} of about {duration(expected_seconds)}")

    watcher = threading.Thread(target=beat, daemon=True)
    watcher.start()
    try:
        yield
    except BaseException:
        say(f"{name}: failed after {duration(time.monotonic() - begin)}")
        raise
    finally:
        ended.set()
        watcher.join()
    say(f"{name}: done in {duration(time.monotonic() - begin)}")


def in_parallel(*steps: Callable[[], object]) -> None:
    """Run independent steps at once. All are given time to end; then the first failure, in this order, is raised."""
    with ThreadPoolExecutor(max_workers=len(steps)) as pool:
        futures = [pool.submit(step) for step in steps]
        wait_for(futures)
    for future in futures:
        future.result()


def wait_until(what: str, deadline_seconds: float, probe: Callable[[], bool], *, every_seconds: float = 1.0) -> bool:
    """Poll `probe` until it holds; False when the deadline passes. `what` names it in a last line on failure."""
    end = time.monotonic() + deadline_seconds
    while True:
        if probe():
            return True
        if time.monotonic() >= end:
            say(f"{what}: not within {duration(deadline_seconds)}")
            return False
        time.sleep(every_seconds)


def as_list(names: Sequence[str]) -> str:
    """a, b and c"""
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)
