"""What loading says in the log: each stage as it begins, and now and then how far a long one is."""

import logging
from collections.abc import Callable

SAY_SECONDS = 5.0  # between two lines of one stage

logger = logging.getLogger("trimtab_engine.core")


class LoadingLog:
    """Told of every bit of progress, writes few lines. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stage = ""
        self._said = clock()

    def note(self, stage: str, percent: float) -> None:
        """`percent` is of the whole start-up."""
        now = self._clock()
        if stage == self._stage and now - self._said < SAY_SECONDS:
            return
        if stage not in ("starting", "ready"):  # the line before and the line after say these
            logger.info("loading: %s, %.0f%%", stage, percent)
        self._stage, self._said = stage, now
