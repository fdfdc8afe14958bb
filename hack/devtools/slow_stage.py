"""Explanation of stages that take longer than expected: busy cores, or waiting for the network or the disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from .stage_log import duration

LATE_FACTOR = 1.15  # expected durations were measured on two idle cores and vary by about 10 %
GRACE_SECONDS = 10.0  # short stages are late only if they exceed the expected duration by this much
BUSY_LOAD = 1.3  # runnable processes per core above which the machine counts as busy


@dataclass(frozen=True, slots=True)
class StageContext:
    """The state of the machine while a stage runs."""

    cores: int
    load: float  # load average of the last minute
    other_stages: Sequence[str]  # of this process, running in parallel
    last_output: str  # the last line of output of the stage's program; may be empty


def is_late(seconds: float, expected_seconds: float) -> bool:
    """Return True if `seconds` exceeds the expected duration by more than its usual variation."""
    return seconds > max(expected_seconds * LATE_FACTOR, expected_seconds + GRACE_SECONDS)


def delay_reason(context: StageContext) -> str:
    """Return the probable reason of a delay, for the user."""
    if context.load > BUSY_LOAD * context.cores:
        cores = "1 core" if context.cores == 1 else f"{context.cores} cores"
        shared = f", with {_several(len(context.other_stages))} running in parallel" if context.other_stages else ""
        return f"{context.load:.0f} runnable processes on {cores}{shared}"
    last = f"; last output: {context.last_output}" if context.last_output else ""
    return f"the cores are not busy, so it waits for the network or the disk{last}"


def status_line(seconds: float, expected_seconds: float, context: StageContext) -> str:
    """Return elapsed and expected duration, and the probable reason if the stage is late."""
    progress = f"{duration(seconds)} of about {duration(expected_seconds)}"
    return f"{progress}; late: {delay_reason(context)}" if is_late(seconds, expected_seconds) else progress


def load_now() -> tuple[int, float]:
    """Return the number of cores this process may use, and the load average of the last minute."""
    return len(os.sched_getaffinity(0)), os.getloadavg()[0]


def _several(count: int) -> str:
    return "another stage" if count == 1 else f"{count} other stages"
