"""Progress lines. pytest shows them through its terminal reporter, the demo through rich, anything else on stderr."""

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
    """Where lines go; one for the process, because a story, its waits and its load all speak to one reader."""

    def __init__(self) -> None:
        self.sink: Sink = _to_stderr
        self.facts: list[str] = []  # measured values, repeated at the end of a run


_reporter = _Reporter()


def say(text: str) -> None:
    """One line with the time since the process began."""
    elapsed = int(time.monotonic() - _started)
    _reporter.sink(f"[{elapsed // 60:2d}:{elapsed % 60:02d}] {text}")


def pass_on(line: str) -> None:
    """A line of another program, which has a time of its own in front."""
    _reporter.sink(line)


def measured(text: str) -> None:
    """A measured value: said now, and again in the summary of the run."""
    _reporter.facts.append(text)
    say(f"measured: {text}")


def facts() -> list[str]:
    return list(_reporter.facts)


def remember(measured_elsewhere: list[str]) -> None:
    """Values that another process has measured and said."""
    _reporter.facts.extend(measured_elsewhere)


@contextmanager
def speaking_to(sink: Sink) -> Iterator[None]:
    """Send lines to `sink` for a while."""
    before = _reporter.sink
    _reporter.sink = sink
    try:
        yield
    finally:
        _reporter.sink = before


def speak_to(sink: Sink) -> None:
    _reporter.sink = sink
