"""A limit on warnings that clients cause, so that one client cannot fill the log."""

import logging
import time

PERIOD_SECONDS = 10.0
MAX_WARNINGS_PER_PERIOD = 5
"""Per message and period; the next one states how many were left out."""
LIMITED_LOGGERS = ("uvicorn.error", "trimtab_engine.api.connections")
"""uvicorn warns of each invalid request, and the engine of each TLS connection to a plain port."""


class RepeatedWarnings(logging.Filter):
    """Passes the first warnings of each message in a period."""

    def __init__(self) -> None:
        super().__init__()
        self._periods: dict[str, tuple[float, int]] = {}
        """Message → begin of its period by the monotonic clock, and warnings in it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        message, now = str(record.msg), time.monotonic()
        begin, count = self._periods.get(message, (now, 0))
        if now - begin >= PERIOD_SECONDS:
            if count > MAX_WARNINGS_PER_PERIOD:
                omitted = count - MAX_WARNINGS_PER_PERIOD
                record.msg, record.args = f"{record.getMessage()} ({omitted} more since the last such line)", ()
            begin, count = now, 0
        self._periods[message] = (begin, count + 1)
        return count < MAX_WARNINGS_PER_PERIOD


def limit_repeated_warnings() -> None:
    """Add the filter to the loggers of both HTTP servers of this process; a second call changes nothing."""
    for name in LIMITED_LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(existing, RepeatedWarnings) for existing in logger.filters):
            logger.addFilter(RepeatedWarnings())
