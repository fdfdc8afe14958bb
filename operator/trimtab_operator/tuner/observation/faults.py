"""Faults of a replica's metrics, which become condition reasons, and their limits."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.samples import Config, Ledger, Sample, Work

MAX_CLOCK_AHEAD_SECONDS = 5.0  # a sample further in the future has a wrong clock


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of one replica, with a message that stays equal while the cause does."""

    fault: Reason
    """A reason of the condition MetricsAvailable."""
    message: str


def find_contradiction(sample: Sample, ledger: Ledger | None, *, now: float) -> str | None:
    """Return the impossible value of a sample, or None."""
    counters, gauges = sample.counters, sample.gauges
    numbers = [
        sample.at,
        gauges.running,
        gauges.waiting,
        gauges.kv_usage,
        counters.generated_tokens,
        counters.prompt_tokens,
        counters.finished,
        counters.rejected,
        *counters.preemptions.values(),
        *counters.blocked_seconds.values(),
        *_given(counters.arrived, counters.arrived_prompt_tokens, counters.recomputed_tokens),
        *_given(gauges.waiting_tokens, gauges.oldest_waiting_seconds),
        *_numbers(counters.decode),
        *_numbers(counters.prefill),
    ]
    if not all(math.isfinite(number) for number in numbers):
        return "a metric is not a number"
    if any(number < 0 for number in numbers):
        return "a count is negative"
    if gauges.kv_usage > 1.0 + 1e-6:
        return "KV cache usage is above 100%"
    if sample.at > now + MAX_CLOCK_AHEAD_SECONDS:
        return "the sample's timestamp is in the future"
    if ledger is not None and min(ledger.device_bytes, ledger.blocks_total, ledger.block_size) <= 0:
        return "the memory ledger is empty"
    for histogram in (sample.ttft, sample.itl, sample.mean_itl):
        if histogram is not None and not _is_cumulative(histogram.counts):
            return "a histogram's bucket counts are not cumulative"
    return None


def has_generation_mismatch(sample: Sample, config: Config) -> bool:
    """Return True if metrics and configuration are of different generations, as briefly after every change."""
    return sample.gauges.config_generation not in (None, config.generation)


def _given(*values: float | None) -> list[float]:
    return [value for value in values if value is not None]


def _numbers(work: Work | None) -> list[float]:
    if work is None:
        return []
    return [work.steps, work.tokens, work.sequences, work.context, work.attended, work.seconds]


def _is_cumulative(counts: Iterable[float]) -> bool:
    before = 0.0
    for count in counts:
        if not math.isfinite(count) or count < before:
            return False
        before = count
    return True
