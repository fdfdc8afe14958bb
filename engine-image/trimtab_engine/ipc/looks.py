"""Looks at whether others still speak, one a heartbeat: which of them may judge. Pure.

A look that comes late says nothing of the others: this process was busy itself, and what they sent lies unread.
"""


class Looks:
    """When this process last looked, in seconds of its own clock. `every_seconds`: how often it means to."""

    def __init__(self, now: float, *, every_seconds: float) -> None:
        self._last, self._late_seconds = now, 2 * every_seconds

    def is_on_time(self, now: float) -> bool:
        """Whether the look at `now` may judge; the next one is measured from here in any case."""
        on_time = now - self._last <= self._late_seconds
        self._last = now
        return on_time
