"""Why a stage runs later than it should: what else wants the cores, or that nothing here explains it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from .stage_log import duration

LATE_FACTOR = 1.15  # a stage is late from here on: expected times are of two idle cores, to about a tenth
GRACE_SECONDS = 10.0  # and by at least this much: a short stage is not worth a reason
BUSY_LOAD = 1.3  # processes that want a core, per core: from here on a stage shares its cores


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a stage that runs now shares the machine with."""

    cores: int
    load: float  # processes that want a core, over the last minute
    beside: Sequence[str]  # our other stages that run now
    last_words: str  # the last line of the output of the program that the stage runs; may be empty


def is_late(seconds: float, expected_seconds: float) -> bool:
    """Whether a stage that has run for `seconds` is later than its expected time explains."""
    return seconds > max(expected_seconds * LATE_FACTOR, expected_seconds + GRACE_SECONDS)


def why(surroundings: Surroundings) -> str:
    """The reason as far as it can be seen from here, in words for the one who waits."""
    if surroundings.load > BUSY_LOAD * surroundings.cores:
        cores = "1 core" if surroundings.cores == 1 else f"{surroundings.cores} cores"
        shared = f", {_several(len(surroundings.beside))} of ours beside it" if surroundings.beside else ""
        return f"{surroundings.load:.0f} processes want {cores}{shared}"
    said = f"; its program said last: {surroundings.last_words}" if surroundings.last_words else ""
    return f"the cores are not busy, so it waits for the network or the disk{said}"


def line(seconds: float, expected_seconds: float, surroundings: Surroundings) -> str:
    """How far a stage is: its time beside the expected one, and the reason once it is late."""
    progress = f"{duration(seconds)} of about {duration(expected_seconds)}"
    return f"{progress}; late: {why(surroundings)}" if is_late(seconds, expected_seconds) else progress


def load_now() -> tuple[int, float]:
    """The cores this process may use, and the load of the last minute."""
    return len(os.sched_getaffinity(0)), os.getloadavg()[0]


def _several(count: int) -> str:
    return "another stage" if count == 1 else f"{count} other stages"
