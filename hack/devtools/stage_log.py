"""One command of make as its reader sees it: one clock over all of its programs, and at its end what each stage took.

make exports TRIMTAB_BEGAN, the second it began. Every program below it counts from there and writes the stages that it
ends into one file in the cache, named by that second. Without the variable a program is a journey of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .cache_root import cache_root
from .errors import UsageError

VARIABLE = "TRIMTAB_BEGAN"
KEPT_RECORDS = 20  # journeys whose stages stay in the cache

_loaded = time.time()


@dataclass(frozen=True, slots=True)
class Ended:
    """A stage that has ended: when it began after the journey's begin, how long it took and should have taken."""

    name: str
    at_seconds: float
    seconds: float
    expected_seconds: float


def began(environment: Mapping[str, str] = os.environ) -> float:
    """The second since the epoch at which the journey began."""
    text = environment.get(VARIABLE, "")
    if not text:
        return _loaded
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"{VARIABLE} is {text!r}; make sets it to the second it began, or unset it") from error


def elapsed() -> float:
    """Seconds since the journey began."""
    return max(0.0, time.time() - began())


def _record() -> Path:
    return cache_root() / "logs" / "stages" / f"{began():.0f}.jsonl"


def note(stage: Ended) -> None:
    """Write down a stage that ended. What cannot be written is not missed: it is for the last line only."""
    path = _record()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:  # one write of one line: programs that run at once do not mix
            file.write(json.dumps(asdict(stage)) + "\n")


def ended() -> list[Ended]:
    """The stages of this journey so far, in the order in which they began."""
    try:
        lines = _record().read_text().splitlines()
    except OSError:
        return []
    return sorted((Ended(**json.loads(line)) for line in lines), key=lambda stage: stage.at_seconds)


def forget_old() -> None:
    """Remove the records of all but the newest journeys."""
    records = sorted(_record().parent.glob("*.jsonl"))
    for path in records[:-KEPT_RECORDS]:
        path.unlink(missing_ok=True)


def spent(stages: Iterable[Ended]) -> list[tuple[str, float]]:
    """Seconds per group of stages, in order of their begin. A group is what stands before a name's colon.

    Stages of one group that ran at once count once: it is the time during which any of them ran.
    """
    groups: dict[str, list[tuple[float, float]]] = {}
    for stage in sorted(stages, key=lambda stage: stage.at_seconds):
        group = stage.name.partition(":")[0]
        groups.setdefault(group, []).append((stage.at_seconds, stage.at_seconds + stage.seconds))
    return [(group, _union(spans)) for group, spans in groups.items()]


def _union(spans: Sequence[tuple[float, float]]) -> float:
    """The length of the union of intervals, given in order of their begin."""
    total, reached = 0.0, float("-inf")
    for begin, end in spans:
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def duration(seconds: float) -> str:
    """7 s, 1m05s: what a reader compares at a glance."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60}m{whole % 60:02d}s"


def took(stages: Iterable[Ended], total_seconds: float) -> str:
    """The last line: how long each group of stages took, and all of it. Groups below a second are left out."""
    parts = [f"{group} {duration(seconds)}" for group, seconds in spent(stages) if seconds >= 1.0]
    return f"{duration(total_seconds)} in all" + (f": {', '.join(parts)}" if parts else "")
