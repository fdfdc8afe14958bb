"""Aggregation of one engine's statistics: /metrics and the statistics log line, for any number of API servers.

The core's StepStats arrive directly; request observations arrive from the API servers. One process owns it, so that
each counter exists once and never decreases.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from prometheus_client import generate_latest

from trimtab_engine.api.metrics.factory import Buckets
from trimtab_engine.api.metrics.families import EngineMetrics, MergedRegistry
from trimtab_engine.api.metrics.observations import FinishedSequence, Observations
from trimtab_engine.api.metrics.request_log import RequestLog
from trimtab_engine.api.metrics.stats_line import StatisticsLine
from trimtab_engine.engine_client.start_clock import StartClock
from trimtab_engine.messages.admin import EngineState
from trimtab_engine.messages.lifecycle import CoreReady
from trimtab_engine.messages.requests import StepStats

TICK_SECONDS = 0.5  # poll interval of the live statistics interval

logger = logging.getLogger("trimtab_engine.api")


class Exporter(Protocol):
    """Metrics access for the whole engine, from any of its processes."""

    async def exposition(self) -> bytes:
        """Return the text of /metrics."""

    async def server_load(self, own: int) -> int:
        """Return the generation requests in progress in all servers; `own` are those of the calling server."""


class EngineExporter:
    """Counts and logs for one engine; an Observer of requests. `metrics` is set when the cores are ready: that of the
    first core, whose data-parallel rank is `first_rank`. Other cores get theirs with their first step. Live
    disable_log_stats hides all of it.
    """

    def __init__(
        self, model_name: str, custom_buckets: Buckets | None = None, first_rank: int = 0, device: str = "cuda"
    ) -> None:
        self._device = device
        self._model_name, self._custom_buckets, self._first_rank = model_name, custom_buckets, first_rank
        self.metrics: EngineMetrics | None = None
        self.requests = RequestLog()
        self.silences: Callable[[], Mapping[int, float]] = dict
        """Returns the seconds since the last message of each core, by core index."""
        self.start_clock: StartClock | None = None
        """The clock of the engine's start; the first core's metrics show it."""
        self._of_cores: dict[int, EngineMetrics] = {}
        self._lines: dict[int, StatisticsLine] = {}
        self._facts: CoreReady | None = None
        self._state = EngineState()
        if custom_buckets:
            EngineMetrics(
                model_name, 1, custom_buckets=custom_buckets
            )  # raises ConfigError at startup instead of when the core is ready

    def begin(self, facts: CoreReady) -> None:
        """Create the first core's metrics with its buckets and labels, now that it is ready."""
        self._facts = facts
        self.metrics = self._metrics_of(self._first_rank, facts)

    def _metrics_of(self, core: int, facts: CoreReady) -> EngineMetrics:
        if core not in self._of_cores:
            metrics = EngineMetrics(self._model_name, facts.max_model_len, str(core), self._custom_buckets)
            metrics.cache_config(facts.cache_config)
            metrics.layout(facts.num_ranks)
            self._of_cores[core] = metrics
        return self._of_cores[core]

    def on_state(self, state: EngineState) -> None:
        self._state = state
        if self.metrics is not None:
            self.metrics.sleep_level(state.sleep_level)

    def on_step(self, stats: StepStats) -> None:
        core = stats.engine_index
        if core not in self._lines:
            self._lines[core] = StatisticsLine(core, self._device)
        self._lines[core].add(stats)
        if self._facts is not None:
            metrics = self._metrics_of(core, self._facts)
            metrics.is_gone = False
            metrics.on_step(stats)

    def core_gone(self, core: int) -> None:
        """Handle the end of one of several cores: keep its counters, hide its gauges."""
        self._lines.pop(core, None)
        if core in self._of_cores:
            self._of_cores[core].is_gone = True

    def add(self, observations: Observations) -> None:
        observations.replay(self)

    def first_token(self, seconds: float, engine: int) -> None:
        if self.start_clock is not None:
            self.start_clock.first_token(seconds)
        if self._facts is not None:
            self._metrics_of(engine, self._facts).first_token(seconds)

    def next_tokens(self, seconds: Sequence[float], engine: int) -> None:
        if self._facts is not None:
            self._metrics_of(engine, self._facts).next_tokens(seconds)

    def finished(self, sequence: FinishedSequence) -> None:
        if not sequence.is_pooled:  # the log only has generation requests, with their times and lengths
            self.requests.add(sequence)
        if self._facts is not None:
            self._metrics_of(sequence.engine, self._facts).finished(sequence)

    def request_finished(self, n: int, max_num_generation_tokens: int, engine: int) -> None:
        if self._facts is not None:
            self._metrics_of(engine, self._facts).request_finished(n, max_num_generation_tokens)

    def rejected(self, reason: str) -> None:
        """Count a rejection; no core has seen the request, so the first core's counter is used."""
        if self.metrics is not None:
            self.metrics.rejected(reason)

    def media_looked_up(self, queries: int, hits: int) -> None:
        """Count lookups of the servers' processor cache in the first core's counters."""
        if self.metrics is not None:
            self.metrics.media_looked_up(queries, hits)

    async def exposition(self) -> bytes:
        return self.text()

    async def server_load(self, own: int) -> int:
        """Return `own`: this exporter has no other servers."""
        return own

    def text(self) -> bytes:
        if self.metrics is None or self._facts is None or self._state.disable_log_stats:
            return b""
        for core, seconds in self.silences().items():
            self._metrics_of(core, self._facts).silent_for(seconds)
        if self.start_clock is not None:
            self.metrics.start_stages(self.start_clock.seconds)
        if len(self._of_cores) == 1:
            return self.metrics.exposition()
        return generate_latest(MergedRegistry(list(self._of_cores.values())))

    async def log_statistics(self) -> None:
        """Log vLLM's line for each core every stats_interval_seconds, unless the engine is idle."""
        since = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            seconds = time.monotonic() - since
            if seconds < self._state.stats_interval_seconds:
                continue
            since += seconds
            for line in self._lines.values():
                texts, is_quiet = line.take(seconds)
                for text in () if self._state.disable_log_stats else texts:
                    logger.log(logging.DEBUG if is_quiet else logging.INFO, "%s", text)
