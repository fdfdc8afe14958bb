"""Limits on failures: a circuit breaker for each replica, and a budget of retries for all requests."""

from __future__ import annotations

from collections import deque

FAILURES_TO_OPEN = 3
FAILURE_WINDOW_SECONDS = 10.0
OPEN_SECONDS = 2.0
REQUESTS_PER_RETRY = 5
"""When everything fails, the load rises by a fifth at most."""
START_RETRIES = 100
MAX_SAVED_RETRIES = 1000
"""Retries that past requests have earned: enough for all requests of a replica that is killed."""


class Breaker:
    """Stops requests to a replica whose transport fails. Statuses are neutral: a busy or draining replica is alive."""

    __slots__ = ("_failures", "_is_probing", "_open_until")

    def __init__(self) -> None:
        self._failures: deque[float] = deque(maxlen=FAILURES_TO_OPEN)
        self._open_until: float | None = None
        self._is_probing = False

    @property
    def is_open(self) -> bool:
        """True until a request has succeeded after the breaker opened."""
        return self._open_until is not None

    def allows(self, now: float) -> bool:
        """Return True if a request may be sent: the breaker is closed, or half open without another probe."""
        return self._open_until is None or (now >= self._open_until and not self._is_probing)

    def sent(self) -> None:
        """Record that a request was sent; while the breaker is open it is the only probe."""
        self._is_probing = self._open_until is not None

    def succeeded(self) -> None:
        """Record a response head: the replica's transport works."""
        self._open_until, self._is_probing = None, False
        self._failures.clear()

    def abandoned(self) -> None:
        """Record that a request ended without a verdict: its client left."""
        self._is_probing = False

    def failed(self, now: float) -> bool:
        """Record a transport error; return True if it opened the breaker."""
        self._failures.append(now)
        was_probe, self._is_probing = self._is_probing, False
        full = len(self._failures) == FAILURES_TO_OPEN and now - self._failures[0] <= FAILURE_WINDOW_SECONDS
        if not (was_probe or full):
            return False
        was_open = self._open_until is not None
        self._open_until = now + OPEN_SECONDS
        return not was_open


class RetryBudget:
    """Limits retries to a share of requests."""

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests = START_RETRIES * REQUESTS_PER_RETRY
        """Requests that have not been used for a retry."""

    def earn(self) -> None:
        """Record a request."""
        self._requests = min(self._requests + 1, MAX_SAVED_RETRIES * REQUESTS_PER_RETRY)

    def spend(self) -> bool:
        """Take one retry; return False if none is left."""
        if self._requests < REQUESTS_PER_RETRY:
            return False
        self._requests -= REQUESTS_PER_RETRY
        return True
