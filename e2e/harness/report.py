"""Progress lines, shown by pytest's terminal reporter, by the demo with rich, and otherwise on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Sink = Callable[[str], None]

_started = time.monotonic()


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Reporter:
    """The destination of progress lines and the measured values; one per process."""

    def __init__(self) -> None:
        self.sink: Sink = _to_stderr
        self.facts: list[str] = []  # measured values, repeated at the end of a run


_reporter = _Reporter()


def log_line(text: str) -> None:
    """Print one line with the time since the process started."""
    elapsed = int(time.monotonic() - _started)
    _reporter.sink(f"[{elapsed // 60:2d}:{elapsed % 60:02d}] {text}")


def forward(line: str) -> None:
    """Print a line of another program, which has its own timestamp."""
    _reporter.sink(line)


def report_measurement(text: str) -> None:
    """Report a measured value now and in the summary of the run."""
    _reporter.facts.append(text)
    log_line(f"measured: {text}")


def facts() -> list[str]:
    return list(_reporter.facts)


def add_facts(measured_elsewhere: list[str]) -> None:
    """Add values measured and reported by another process."""
    _reporter.facts.extend(measured_elsewhere)


@contextmanager
def redirected_to(sink: Sink) -> Iterator[None]:
    """Send lines to `sink` within the block."""
    before = _reporter.sink
    _reporter.sink = sink
    try:
        yield
    finally:
        _reporter.sink = before


def set_sink(sink: Sink) -> None:
    _reporter.sink = sink
