"""Timer for heartbeat checks. Pure.

A late check proves nothing about peers: this process was busy, and their heartbeats are still unread.
"""


class HeartbeatTimer:
    """Time of the last check, in seconds of the local clock. `every_seconds` is the intended interval."""

    def __init__(self, now: float, *, every_seconds: float) -> None:
        self._last, self._late_seconds = now, 2 * every_seconds

    def is_on_time(self, now: float) -> bool:
        """Return True if the check at `now` is recent enough to judge peers. Restarts the interval in any case."""
        on_time = now - self._last <= self._late_seconds
        self._last = now
        return on_time
