"""The hold that stands at a group which gave its pods back: since when, why, and when it tries again. Pure.

Who gets one is decided in rollout/gang_placement.py; it is kept as an annotation of the leader's StatefulSet.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta

from trimtab_operator.builders.stateful_set import GAVE_BACK_ANNOTATION
from trimtab_operator.observed.groups import Group
from trimtab_operator.resource.time import parse_time, timestamp

MAX_BACKOFF_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Hold:
    """A group that gave its pods back, for the `count`th time in a row. Its pods come back at `retry_at`."""

    count: int
    retry_at: datetime
    why: str
    asked: str = ""
    """What was asked for when they were given back."""

    def is_on(self, now: datetime) -> bool:
        """Whether it waits still. A time that no back-off reaches was written by somebody else."""
        return now < self.retry_at <= now + timedelta(seconds=2 * MAX_BACKOFF_SECONDS)

    def to_json(self) -> str:
        """For the annotation."""
        retry_at = timestamp(self.retry_at)
        stored = {"asked": self.asked, "count": self.count, "retryAt": retry_at, "why": self.why}
        return json.dumps(stored, sort_keys=True)

    @property
    def sentence(self) -> str:
        when = timestamp(self.retry_at)
        return f"gave its pods back, since not all of them could be had ({self.why}); tries again at {when}"


def hold_of(group: Group) -> Hold | None:
    """What stands at the group; None when nothing does, or nothing that can be read."""
    text = (group.stateful_set["metadata"].get("annotations") or {}).get(GAVE_BACK_ANNOTATION)
    if not text:
        return None
    try:
        stored = json.loads(text)
        retry_at = parse_time(stored["retryAt"])
        if retry_at is None:
            return None
        return Hold(int(stored["count"]), retry_at, str(stored["why"]), str(stored.get("asked", "")))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
