"""What the API servers see of requests and the metrics want to know: one value per event, counted in one place.

A server in a process of its own collects them and sends them on in batches (serving/child_messages.py);
alone in its process it hands each to the metrics at once.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec


class FinishedSequence(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A sequence's life, in CLOCK_MONOTONIC seconds and tokens. None: it never came so far."""

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
    """Prompt tokens that the prefix cache had."""
    engine: int = 0
    """The data-parallel core that served it."""
    is_pooled: bool = False
    """It was to have a vector, and no tokens."""


class Observer(Protocol):
    """Takes what happens to requests, as it happens. `engine` is the data-parallel core that serves them."""

    def first_token(self, seconds: float, engine: int) -> None:
        """Seconds from arrival to the first token of one sequence."""

    def next_tokens(self, seconds: Sequence[float], engine: int) -> None:
        """Seconds between some tokens of one sequence and those before them."""

    def finished(self, life: FinishedSequence) -> None:
        """One sequence has ended."""

    def request_finished(self, n: int, max_num_generation_tokens: int, engine: int) -> None:
        """One HTTP request with its n sequences has ended; the second number is that of the longest of them, the core
        that of the last to be heard of."""

    def rejected(self, reason: str) -> None:
        """A request was refused because the queue is as long as it may be."""

    def media_looked_up(self, queries: int, hits: int) -> None:
        """So many images and videos of a request were looked up in the processor cache, and found."""


class Observations(msgspec.Struct, tag="observations"):
    """What one server has seen since its last batch, and how many generation requests it answers now."""

    num_http_requests: int = 0
    num_arrivals: int = 0
    """Requests of any kind that this server has got since it began, but for probes and scrapes."""
    first_token_seconds: dict[int, list[float]] = {}
    """Seconds to the first token of each request, by core; the next two likewise."""
    next_token_seconds: dict[int, list[float]] = {}
    sequences: list[FinishedSequence] = []
    requests: list[tuple[int, int, int]] = []
    """n, the longest sequence's tokens, and the core, per HTTP request."""
    rejections: list[str] = []
    """Why, per request that was refused at admission."""
    media_queries: int = 0
    """Images and videos that were looked up in the processor cache."""
    media_hits: int = 0

    @property
    def is_empty(self) -> bool:
        seconds = self.first_token_seconds or self.next_token_seconds
        return not (seconds or self.sequences or self.requests or self.rejections or self.media_queries)

    def tell(self, observer: Observer) -> None:
        """Hand everything to the one who counts."""
        for engine, times in self.first_token_seconds.items():
            for seconds in times:
                observer.first_token(seconds, engine)
        for engine, times in self.next_token_seconds.items():
            observer.next_tokens(times, engine)
        for life in self.sequences:
            observer.finished(life)
        for n, longest, engine in self.requests:
            observer.request_finished(n, longest, engine)
        for reason in self.rejections:
            observer.rejected(reason)
        if self.media_queries:
            observer.media_looked_up(self.media_queries, self.media_hits)


class ObservationBuffer:
    """An Observer that keeps everything until it is taken."""

    def __init__(self) -> None:
        self._batch = Observations()

    def first_token(self, seconds: float, engine: int) -> None:
        self._batch.first_token_seconds.setdefault(engine, []).append(seconds)

    def next_tokens(self, seconds: Sequence[float], engine: int) -> None:
        self._batch.next_token_seconds.setdefault(engine, []).extend(seconds)

    def finished(self, life: FinishedSequence) -> None:
        self._batch.sequences.append(life)

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
