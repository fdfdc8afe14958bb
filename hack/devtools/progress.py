"""Progress lines: each stage reports its start, expected duration, periodic status and end."""

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

HEARTBEAT_SECONDS = 30.0  # keeps CI logs readable
LAST_OUTPUT_BYTES = 4096  # of a log, to find its last line in
LAST_OUTPUT_LENGTH = 120  # columns

_print_lock = threading.Lock()


@dataclass(slots=True)
class _Running:
    """A running stage. `log` is the log file of its program."""

    name: str
    log: Path | None = None


_running: list[_Running] = []  # of all threads of this process
_of_thread = threading.local()


def log_line(text: str) -> None:
    """Print one line on stderr (stdout is for results), with the time since the make command started."""
    with _print_lock:
        print(f"[{duration(stage_log.elapsed()):>6}] {text}", file=sys.stderr, flush=True)


def set_stage_log(log: Path) -> None:
    """Set the log file of this thread's stage, whose last line is shown if the stage is late."""
    current: _Running | None = getattr(_of_thread, "stage", None)
    if current is not None:
        current.log = log


@contextlib.contextmanager
def stage(name: str, expected_seconds: float, *, quietly: bool = False) -> Iterator[None]:
    """Report start, periodic status and end of a stage. Exceptions are reported with its name and re-raised.

    `quietly` omits the status lines, for a program that shows its own progress.
    """
    at_seconds, begin = stage_log.elapsed(), time.monotonic()
    log_line(f"{name} … (about {duration(expected_seconds)})")
    running, outer = _Running(name), getattr(_of_thread, "stage", None)
    _running.append(running)
    _of_thread.stage = running
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            log_line(f"{name}: {slow_stage.status_line(time.monotonic() - begin, expected_seconds, _context(running))}")

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
        context = _context(running)
        _running.remove(running)
        seconds = time.monotonic() - begin
        stage_log.record(stage_log.FinishedStage(name, at_seconds, seconds, expected_seconds))
    late = f", about {duration(expected_seconds)} expected" if slow_stage.is_late(seconds, expected_seconds) else ""
    busy = f": {slow_stage.delay_reason(context)}" if late and quietly else ""
    log_line(f"{name}: done in {duration(seconds)}{late}{busy}")


def _context(running: _Running) -> slow_stage.StageContext:
    cores, load = slow_stage.load_now()
    others = [other.name for other in list(_running) if other is not running]
    return slow_stage.StageContext(cores, load, others, _last_output(running.log))


def _last_output(log: Path | None) -> str:
    """Return the last non-empty line of a log, or an empty string."""
    if log is None:
        return ""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LAST_OUTPUT_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:LAST_OUTPUT_LENGTH] for line in reversed(lines) if line.strip()), "")


def in_parallel(*steps: Callable[[], object]) -> None:
    """Run independent steps in parallel, wait for all, and raise the first failure in order of the arguments."""
    with ThreadPoolExecutor(max_workers=len(steps)) as pool:
        futures = [pool.submit(step) for step in steps]
        wait_for(futures)
    for future in futures:
        future.result()


def wait_until(what: str, deadline_seconds: float, probe: Callable[[], bool], *, every_seconds: float = 1.0) -> bool:
    """Poll `probe` until it returns True. Return False after the deadline, with a line that names `what`."""
    end = time.monotonic() + deadline_seconds
    while True:
        if probe():
            return True
        if time.monotonic() >= end:
            log_line(f"{what}: not within {duration(deadline_seconds)}")
            return False
        time.sleep(every_seconds)


def as_list(names: Sequence[str]) -> str:
    """Return the names as "a, b and c"."""
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)
