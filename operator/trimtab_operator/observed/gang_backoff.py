"""Gang-scheduling back-off of a group: its reason and when the group's pods are created again. Pure.

`rollout/gang_placement.py` decides on back-offs; each is stored as an annotation of the leader's StatefulSet.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta

from trimtab_operator.builders.stateful_set import GANG_BACKOFF_ANNOTATION
from trimtab_operator.observed.groups import Group
from trimtab_operator.resource.time import parse_time, timestamp

MAX_BACKOFF_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class GangBackoff:
    """Back-off of a group whose pods were removed because only some of them could be scheduled.

    `count` is the number of consecutive attempts. The pods are created again at `retry_at`.
    """

    count: int
    retry_at: datetime
    reason: str
    change_id: str = ""
    """Generation and revision that the group had when it backed off."""

    def is_active(self, now: datetime) -> bool:
        """Return True while the group has to wait.

        A time beyond the longest back-off was not written by the operator and is ignored.
        """
        return now < self.retry_at <= now + timedelta(seconds=2 * MAX_BACKOFF_SECONDS)

    def to_json(self) -> str:
        """Return the value of the annotation."""
        retry_at = timestamp(self.retry_at)
        stored = {"change": self.change_id, "count": self.count, "retryAt": retry_at, "reason": self.reason}
        return json.dumps(stored, sort_keys=True)

    @property
    def message(self) -> str:
        when = timestamp(self.retry_at)
        return f"released its pods because not all of them could be scheduled ({self.reason}); retries at {when}"


def gang_backoff_of(group: Group) -> GangBackoff | None:
    """Return the back-off stored at the group; None if there is none or it cannot be parsed."""
    text = (group.stateful_set["metadata"].get("annotations") or {}).get(GANG_BACKOFF_ANNOTATION)
    if not text:
        return None
    try:
        stored = json.loads(text)
        retry_at = parse_time(stored["retryAt"])
        if retry_at is None:
            return None
        return GangBackoff(int(stored["count"]), retry_at, str(stored["reason"]), str(stored.get("change", "")))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
