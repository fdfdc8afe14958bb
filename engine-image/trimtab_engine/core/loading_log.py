"""Log lines of the loading progress: one per stage, and periodic ones within a long stage."""

import logging
from collections.abc import Callable

LOG_INTERVAL_SECONDS = 5.0  # between two lines of one stage

logger = logging.getLogger("trimtab_engine.core")


class LoadingLog:
    """Logs few lines of frequent progress updates. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stage = ""
        self._said = clock()

    def note(self, stage: str, percent: float) -> None:
        """`percent` is of the whole start-up."""
        now = self._clock()
        if stage == self._stage and now - self._said < LOG_INTERVAL_SECONDS:
            return
        if stage not in ("starting", "ready"):  # covered by the lines before and after
            logger.info("loading: %s, %.0f%%", stage, percent)
        self._stage, self._said = stage, now
