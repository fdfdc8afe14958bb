"""Looks at whether the other nodes still speak, one a heartbeat: which of them may judge. Pure.

A look that comes late says nothing of the others: this process was busy itself, and what they sent lies unread.
"""

from trimtab_engine.launch.nodes.messages import HEARTBEAT_SECONDS


class Looks:
    """When this process last looked, in seconds of its own clock."""

    def __init__(self, now: float) -> None:
        self._last = now

    def is_on_time(self, now: float) -> bool:
        """Whether the look at `now` may judge; the next one is measured from here in any case."""
        on_time = now - self._last <= 2 * HEARTBEAT_SECONDS
        self._last = now
        return on_time
