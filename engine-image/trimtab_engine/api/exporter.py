"""The one place where an engine's statistics come together: /metrics and the periodic line, whatever serves requests.

The core's StepStats come to it directly; what requests see comes from the API servers. One process holds it, so that a
counter exists once and never goes backwards.
"""

import asyncio
import logging
import time
from typing import Protocol

from prometheus_client import generate_latest

from trimtab_engine.api.metrics import EngineMetrics, Interval, MergedRegistry, statistics_line
from trimtab_engine.api.observations import Observations
from trimtab_engine.messages import CoreReady, EngineState, StepStats
from trimtab_engine.speculative.counts import speculation_line

TICK_SECONDS = 0.5  # how often it is looked whether the interval, which is live, is over

logger = logging.getLogger("trimtab_engine.api")


class Exporter(Protocol):
    """Answers for the whole engine, in whichever process it is asked."""

    async def exposition(self) -> bytes:
        """The text of /metrics."""

    async def server_load(self, own: int) -> int:
        """Generation requests that are being answered now by all servers; `own`: by the one that asks."""


class EngineExporter:
    """Counts and logs for one engine. `metrics` comes when the cores are ready: the first core's, and what requests
    see. Other cores have theirs from their first step on. disable_log_stats hides all of it, live.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.metrics: EngineMetrics | None = None
        self._of_cores: dict[int, EngineMetrics] = {}
        self._facts: CoreReady | None = None
        self._state = EngineState()

    def begin(self, facts: CoreReady) -> None:
        """The core is ready: the families have their buckets and labels."""
        self._facts = facts
        self.metrics = self._metrics_of(0, facts)

    def _metrics_of(self, core: int, facts: CoreReady) -> EngineMetrics:
        if core not in self._of_cores:
            metrics = self._of_cores[core] = EngineMetrics(self._model_name, facts.max_model_len, str(core))
            metrics.cache_config(facts.cache_config)
            metrics.layout(facts.num_ranks)
        return self._of_cores[core]

    def on_state(self, state: EngineState) -> None:
        self._state = state
        if self.metrics is not None:
            self.metrics.sleep_level(state.sleep_level)

    def on_step(self, stats: StepStats) -> None:
        if self._facts is not None:
            self._metrics_of(stats.engine_index, self._facts).on_step(stats)

    def add(self, observations: Observations) -> None:
        if self.metrics is not None:
            observations.tell(self.metrics)

    async def exposition(self) -> bytes:
        return self.text()

    async def server_load(self, own: int) -> int:
        """There is no other server where this is asked."""
        return own

    def text(self) -> bytes:
        if self.metrics is None or self._state.disable_log_stats:
            return b""
        if len(self._of_cores) == 1:
            return self.metrics.exposition()
        return generate_latest(MergedRegistry(list(self._of_cores.values())))

    async def log_statistics(self) -> None:
        """vLLM's line every stats_interval_seconds while there is something to say."""
        was_idle, since = True, time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            seconds = time.monotonic() - since
            if seconds < self._state.stats_interval_seconds:
                continue
            since += seconds
            was_idle = self._log_line(seconds, was_idle)

    def _log_line(self, seconds: float, was_idle: bool) -> bool:
        """Log the interval's line, at DEBUG when it is the second idle one. Returns whether it was idle."""
        metrics = self.metrics
        if metrics is None or metrics.latest is None:
            return True
        interval, metrics.interval = metrics.interval, Interval()
        latest = metrics.latest
        idle = not (interval.prompt_tokens or interval.generation_tokens or latest.num_running or latest.num_waiting)
        if not self._state.disable_log_stats:
            level = logging.DEBUG if idle and was_idle else logging.INFO
            logger.log(level, "%s", statistics_line(interval, latest, seconds))
            if interval.speculation.num_drafts:
                logger.log(level, "%s", speculation_line(interval.speculation, seconds))
        return idle
