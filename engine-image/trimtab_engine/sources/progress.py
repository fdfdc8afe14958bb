"""Download progress and its text. The caller provides the time."""

import threading
from collections import deque
from dataclasses import dataclass

RATE_SECONDS = 20.0  # window of the rate in seconds: an earlier stall is forgotten
LEAST_SECONDS = 2.0  # no rate is reported before that
GB, MB = 10**9, 10**6


@dataclass(frozen=True, slots=True)
class Progress:
    """Downloaded part of a model; `rate` is bytes per second, None while unknown."""

    model: str
    done_bytes: int
    total_bytes: int
    rate: float | None = None
    elsewhere: bool = False
    """Another engine fetches it into the same cache; this one waits for it."""
    begun_bytes: int = 0
    """The part of done_bytes that an earlier process had fetched."""

    @property
    def percent(self) -> float:
        return 100.0 * self.done_bytes / self.total_bytes if self.total_bytes else 0.0

    @property
    def sentence(self) -> str:
        """Such as `Downloading 43 %, 12.0 GB of 28.0 GB, 2 min left`."""
        if not self.total_bytes:
            return f"Another engine downloads {self.model}" if self.elsewhere else f"Asking for {self.model}"
        begin = "Another engine downloads it:" if self.elsewhere else "Downloading"
        size = f"{self.percent:.0f} %, {format_bytes(self.done_bytes)} of {format_bytes(self.total_bytes)}"
        left = "" if not self.rate else f", {format_seconds((self.total_bytes - self.done_bytes) / self.rate)} left"
        return f"{begin} {size}{left}"


@dataclass(frozen=True, slots=True)
class Downloaded:
    """Bytes that this process has fetched of its model."""

    num_bytes: int
    seconds: float

    @property
    def sentence(self) -> str:
        """Such as `Downloaded 28.0 GB in 4 min`."""
        return f"Downloaded {format_bytes(self.num_bytes)} in {format_seconds(self.seconds)}"


def format_bytes(count: int) -> str:
    return f"{count / GB:.1f} GB" if count >= GB else f"{count / MB:.0f} MB"


def format_seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Meter:
    """Thread-safe byte counter. `begun_bytes` existed before and do not count for the rate."""

    def __init__(self, model: str, total_bytes: int, begun_bytes: int, now: float) -> None:
        self._model, self._total, self._done = model, total_bytes, begun_bytes
        self._begun = begun_bytes
        self._lock = threading.Lock()
        self._seen = deque([(now, begun_bytes)])

    def note(self, count: int) -> None:
        """More bytes are here; fewer where some were thrown away."""
        with self._lock:
            self._done += count

    def read(self, now: float) -> Progress:
        """Return the current progress and the recent rate."""
        with self._lock:
            done = self._done
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] >= RATE_SECONDS:
            self._seen.popleft()
        then, before = self._seen[0]
        rate = (done - before) / (now - then) if now - then >= LEAST_SECONDS else None
        rate = rate if rate and rate > 0 else None
        return Progress(self._model, done, self._total, rate, begun_bytes=self._begun)
