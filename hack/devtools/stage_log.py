"""Stage durations of one make command, across all programs that it runs.

make exports TRIMTAB_BEGAN, its start time in seconds since the epoch. All programs measure elapsed time from it and
append finished stages to one file in the cache, named after it. Without the variable each program has its own record.
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
KEPT_RECORDS = 20  # make commands whose stages stay in the cache

_loaded = time.time()


@dataclass(frozen=True, slots=True)
class FinishedStage:
    """A finished stage: its start relative to the make command's, and its actual and expected duration."""

    name: str
    at_seconds: float
    seconds: float
    expected_seconds: float


def began(environment: Mapping[str, str] = os.environ) -> float:
    """Return the start time of the make command, in seconds since the epoch."""
    text = environment.get(VARIABLE, "")
    if not text:
        return _loaded
    try:
        return float(text)
    except ValueError as error:
        raise UsageError(f"{VARIABLE}: {text!r} is not a number of seconds; unset it, since make sets it") from error


def elapsed() -> float:
    """Return the seconds since the make command started."""
    return max(0.0, time.time() - began())


def _record() -> Path:
    return cache_root() / "logs" / "stages" / f"{began():.0f}.jsonl"


def record(stage: FinishedStage) -> None:
    """Record a finished stage. Write errors are ignored, since the record is only used for the final summary."""
    path = _record()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:  # one write of one line: programs that run at once do not mix
            file.write(json.dumps(asdict(stage)) + "\n")


def recorded() -> list[FinishedStage]:
    """Return the finished stages of this make command by start time."""
    try:
        lines = _record().read_text().splitlines()
    except OSError:
        return []
    return sorted((FinishedStage(**json.loads(line)) for line in lines), key=lambda stage: stage.at_seconds)


def remove_old_records() -> None:
    """Remove the records of all but the newest make commands."""
    records = sorted(_record().parent.glob("*.jsonl"))
    for path in records[:-KEPT_RECORDS]:
        path.unlink(missing_ok=True)


def group_durations(stages: Iterable[FinishedStage]) -> list[tuple[str, float]]:
    """Return seconds per group of stages by start time. The group is the part of a name before its colon.

    Parallel stages of a group are not counted twice: the result is the time during which any of them ran.
    """
    groups: dict[str, list[tuple[float, float]]] = {}
    for stage in sorted(stages, key=lambda stage: stage.at_seconds):
        group = stage.name.partition(":")[0]
        groups.setdefault(group, []).append((stage.at_seconds, stage.at_seconds + stage.seconds))
    return [(group, _union(spans)) for group, spans in groups.items()]


def _union(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals, given in order of their start."""
    total, reached = 0.0, float("-inf")
    for begin, end in spans:
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def duration(seconds: float) -> str:
    """Format a duration as 7 s or 1m05s."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60}m{whole % 60:02d}s"


def summary(stages: Iterable[FinishedStage], total_seconds: float) -> str:
    """Return the final line: the duration of each group of stages and the total. Omits groups below a second."""
    parts = [f"{group} {duration(seconds)}" for group, seconds in group_durations(stages) if seconds >= 1.0]
    return f"{duration(total_seconds)} in total" + (f": {', '.join(parts)}" if parts else "")
