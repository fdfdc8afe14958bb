"""Progress lines: each stage says when it starts, how long it should take, that it lives, and how it ended."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path

from . import slow_stage, stage_log
from .stage_log import duration

HEARTBEAT_SECONDS = 30.0  # often enough to see life, rarely enough to keep a CI log readable
LAST_WORDS_BYTES = 4096  # of a log, to find its last line in
LAST_WORDS_LENGTH = 120  # columns

_print_lock = threading.Lock()


@dataclass(slots=True)
class _Running:
    """A stage that runs now. `log` is where the program that it runs writes."""

    name: str
    log: Path | None = None


_running: list[_Running] = []  # in any thread of this process
_of_thread = threading.local()


def log_line(text: str) -> None:
    """One line on stderr (stdout is for results), with the time since the journey began."""
    with _print_lock:
        print(f"[{duration(stage_log.elapsed()):>6}] {text}", file=sys.stderr, flush=True)


def writes_to(log: Path) -> None:
    """Tell the stage that this thread is in where the program it runs writes, for its last words should it be late."""
    current: _Running | None = getattr(_of_thread, "stage", None)
    if current is not None:
        current.log = log


@contextlib.contextmanager
def stage(name: str, expected_seconds: float, *, quietly: bool = False) -> Iterator[None]:
    """Announce, watch and close one stage; an exception passes through after a line that says which stage it was.

    `quietly`: no lines while it runs, for a stage whose program shows its own progress.
    """
    at_seconds, begin = stage_log.elapsed(), time.monotonic()
    log_line(f"{name} … (about {duration(expected_seconds)})")
    running, outer = _Running(name), getattr(_of_thread, "stage", None)
    _running.append(running)
    _of_thread.stage = running
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            log_line(f"{name}: {slow_stage.line(time.monotonic() - begin, expected_seconds, _surroundings(running))}")

    watcher = threading.Thread(target=(lambda: None) if quietly else beat, daemon=True)
    watcher.start()
    try:
        yield
    except BaseException:
        log_line(f"{name}: failed after {duration(time.monotonic() - begin)}")
        raise
    finally:
        ended.set()
        watcher.join()
        _of_thread.stage = outer
        around = _surroundings(running)
        _running.remove(running)
        seconds = time.monotonic() - begin
        stage_log.note(stage_log.Ended(name, at_seconds, seconds, expected_seconds))
    late = f", about {duration(expected_seconds)} expected" if slow_stage.is_late(seconds, expected_seconds) else ""
    busy = f": {slow_stage.why(around)}" if late and quietly else ""
    log_line(f"{name}: done in {duration(seconds)}{late}{busy}")


def _surroundings(running: _Running) -> slow_stage.Surroundings:
    cores, load = slow_stage.load_now()
    beside = [other.name for other in list(_running) if other is not running]
    return slow_stage.Surroundings(cores, load, beside, _last_words(running.log))


def _last_words(log: Path | None) -> str:
    """The last line of a log that says something; empty without one."""
    if log is None:
        return ""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LAST_WORDS_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:LAST_WORDS_LENGTH] for line in reversed(lines) if line.strip()), "")


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
            log_line(f"{what}: not within {duration(deadline_seconds)}")
            return False
        time.sleep(every_seconds)


def as_list(names: Sequence[str]) -> str:
    """a, b and c"""
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)
