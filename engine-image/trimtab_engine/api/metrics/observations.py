"""Request observations of API servers for the metrics: one value per event, counted in one place.

A server process collects them and sends them in batches (serving/server_messages.py); a single server passes each to
the metrics at once.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec


class FinishedSequence(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A finished sequence: times in CLOCK_MONOTONIC seconds, lengths in tokens. None for phases that were not
    reached.
    """

    reason: str
    arrival: float
    scheduled: float | None
    first_token: float | None
    last_token: float | None
    end: float
    num_prompt_tokens: int
    num_generation_tokens: int
    max_tokens: int
    num_preemptions: int
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    engine: int = 0
    """Data-parallel core that served it."""
    is_pooled: bool = False
    """True for a pooling request, which has no output tokens."""


class Observer(Protocol):
    """Receiver of request events. `engine` is the data-parallel core that serves the request."""

    def first_token(self, seconds: float, engine: int) -> None:
        """Record the seconds from arrival to the first token of one sequence."""

    def next_tokens(self, seconds: Sequence[float], engine: int) -> None:
        """Record the seconds between consecutive tokens of one sequence."""

    def finished(self, sequence: FinishedSequence) -> None:
        """Record a finished sequence."""

    def request_finished(self, n: int, max_num_generation_tokens: int, engine: int) -> None:
        """Record a finished HTTP request with n sequences; `max_num_generation_tokens` is the longest sequence's
        length, `engine` the core of the last one.
        """

    def rejected(self, reason: str) -> None:
        """Record a request rejected because the queue is full."""

    def media_looked_up(self, queries: int, hits: int) -> None:
        """Record a request's processor cache lookups and hits of images and videos."""


class Observations(msgspec.Struct, tag="observations"):
    """Observations of one server since its last batch, and its current number of generation requests."""

    num_http_requests: int = 0
    num_arrivals: int = 0
    """Requests of any kind received by this server since its start, except probes and scrapes."""
    first_token_seconds: dict[int, list[float]] = {}
    """Seconds to the first token of each request, by core; the next two fields likewise."""
    next_token_seconds: dict[int, list[float]] = {}
    sequences: list[FinishedSequence] = []
    requests: list[tuple[int, int, int]] = []
    """n, the longest sequence's tokens, and the core, per HTTP request."""
    rejections: list[str] = []
    """Reason of each request rejected at admission."""
    media_queries: int = 0
    """Images and videos looked up in the processor cache."""
    media_hits: int = 0

    @property
    def is_empty(self) -> bool:
        seconds = self.first_token_seconds or self.next_token_seconds
        return not (seconds or self.sequences or self.requests or self.rejections or self.media_queries)

    def replay(self, observer: Observer) -> None:
        """Replay everything into an observer."""
        for engine, times in self.first_token_seconds.items():
            for seconds in times:
                observer.first_token(seconds, engine)
        for engine, times in self.next_token_seconds.items():
            observer.next_tokens(times, engine)
        for sequence in self.sequences:
            observer.finished(sequence)
        for n, longest, engine in self.requests:
            observer.request_finished(n, longest, engine)
        for reason in self.rejections:
            observer.rejected(reason)
        if self.media_queries:
            observer.media_looked_up(self.media_queries, self.media_hits)


class ObservationBuffer:
    """Observer that buffers everything until take()."""

    def __init__(self) -> None:
        self._batch = Observations()

    def first_token(self, seconds: float, engine: int) -> None:
        self._batch.first_token_seconds.setdefault(engine, []).append(seconds)

    def next_tokens(self, seconds: Sequence[float], engine: int) -> None:
        self._batch.next_token_seconds.setdefault(engine, []).extend(seconds)

    def finished(self, sequence: FinishedSequence) -> None:
        self._batch.sequences.append(sequence)

    def request_finished(self, n: int, max_num_generation_tokens: int, engine: int) -> None:
        self._batch.requests.append((n, max_num_generation_tokens, engine))

    def rejected(self, reason: str) -> None:
        self._batch.rejections.append(reason)

    def media_looked_up(self, queries: int, hits: int) -> None:
        self._batch.media_queries += queries
        self._batch.media_hits += hits

    def take(self, num_http_requests: int, num_arrivals: int) -> Observations:
        batch, self._batch = self._batch, Observations()
        batch.num_http_requests, batch.num_arrivals = num_http_requests, num_arrivals
        return batch
