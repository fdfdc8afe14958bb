"""Faults of a replica's metrics, which become condition reasons, and their limits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.samples import Config, Ledger, Sample, Work

MAX_CLOCK_AHEAD_SECONDS = 5.0  # a sample further in the future has a wrong clock

MAX_NUMBER = 1e15  # larger numbers are errors, and their products overflow
MAX_UNEXPLAINED_ARRIVALS = 1000.0  # requests that arrived and ended between two reads of one page
MAX_ARRIVALS_PER_REQUEST = 10.0  # that one request which ended or is in flight explains


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of one replica, with a message that stays equal while the cause does."""

    fault: Reason
    """A reason of the condition MetricsAvailable."""
    message: str


def find_contradiction(
    sample: Sample, ledger: Ledger | None, config: Config | None = None, *, now: float
) -> str | None:
    """Return the impossible value of a sample, or None. Every number that an engine reports is bounded here."""
    numbers = [*_numbers_of(sample)]
    if not all(map(_is_finite, numbers)):
        return "a metric is not a number"
    if any(number < 0 for number in numbers):
        return "a count is negative"
    if ledger is not None and min(ledger.device_bytes, ledger.blocks_total, ledger.block_size) <= 0:
        return "the memory ledger is empty"
    reported = [*numbers, *_numbers_of_engine(ledger, config)]
    if not all(-MAX_NUMBER <= number <= MAX_NUMBER for number in reported):
        return f"a number is beyond {MAX_NUMBER:g}"
    if sample.gauges.kv_usage > 1.0 + 1e-6:
        return "KV cache usage is above 100%"
    if sample.at > now + MAX_CLOCK_AHEAD_SECONDS:
        return "the sample's timestamp is in the future"
    for histogram in (sample.ttft, sample.itl, sample.mean_itl):
        if histogram is not None and not _is_cumulative(histogram.counts):
            return "a histogram's bucket counts are not cumulative"
    return None


def find_missing_rank(before: Sample, after: Sample) -> str | None:
    """Return which rank the newer page lacks, or None. Its sums are then not comparable with those before.

    A family without any rank is not exported, and one with other ranks comes from another source of metrics.
    """
    present = {name for name, _ in after.ranks}
    renamed = {name for name, _ in after.ranks - before.ranks}
    missing = [(name, rank) for name, rank in before.ranks - after.ranks if name in present - renamed]
    if not missing:
        return None
    name, rank = min(missing)
    return f"the metrics page lacks {name} of rank {rank}"


def has_unexplained_arrivals(before: Sample, after: Sample) -> bool:
    """Return True if many more requests arrived than ended or are in flight, as after a jump of the counter."""
    old, new = before.counters, after.counters
    if old.arrived is None or new.arrived is None:
        return False
    ended = new.finished + new.rejected - old.finished - old.rejected
    added = after.gauges.running + after.gauges.waiting - before.gauges.running - before.gauges.waiting
    explained = MAX_ARRIVALS_PER_REQUEST * (max(0.0, ended) + max(0.0, added))
    return new.arrived - old.arrived > MAX_UNEXPLAINED_ARRIVALS + explained


def _numbers_of(sample: Sample) -> Iterator[float]:
    """Yield all numbers of a sample; none of them may be negative."""
    counters, gauges = sample.counters, sample.gauges
    yield from (sample.at, gauges.running, gauges.waiting, gauges.kv_usage)
    yield from (counters.generated_tokens, counters.prompt_tokens, counters.finished, counters.rejected)
    yield from (counters.cached_prompt_tokens, counters.aborted)
    yield from counters.preemptions.values()
    yield from counters.blocked_seconds.values()
    yield from _given(counters.arrived, counters.arrived_prompt_tokens, counters.recomputed_tokens)
    yield from _given(gauges.waiting_tokens, gauges.oldest_waiting_seconds)
    yield from _numbers(counters.decode)
    yield from _numbers(counters.prefill)
    for histogram in (sample.ttft, sample.itl, sample.mean_itl):
        if histogram is not None:
            yield histogram.total
    if sample.requests is None:
        return
    for row in sample.requests.finished:
        yield from (row.prompt_tokens, row.output_tokens, row.cached_tokens, row.preemptions)
        yield from _given(row.ttft_seconds, row.decode_seconds)
        yield from (row.arrived_at, row.finished_at)
    for each in sample.requests.unfinished:
        yield from (each.arrived_at, each.prompt_tokens, each.output_tokens, each.cached_tokens)


def _numbers_of_engine(ledger: Ledger | None, config: Config | None) -> Iterator[float]:
    """Yield all numbers of the memory ledger and the configuration."""
    if ledger is not None:
        yield from (ledger.device_bytes, ledger.blocks_total, ledger.block_size, ledger.bytes_per_block)
        yield from _given(ledger.other_bytes, ledger.free_bytes, ledger.blocks_cap)
    if config is not None:
        yield from (config.generation, config.pipeline_stages, *config.applied.values())
        yield from _given(config.max_model_len)


def _is_finite(number: float) -> bool:
    """Return True for numbers. Integers may be too large for a float."""
    return isinstance(number, int) or math.isfinite(number)


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
