"""Work of one replica between two samples, and sums of such intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from trimtab_operator.tuner.samples import Counters, Gauges, Sample, Work


@dataclass(frozen=True, slots=True)
class Interval:
    """Counts from `start` to `end`, and the gauges at its end.

    None: the engine does not export it. `is_steady`: one configuration during the whole interval.
    """

    start: float
    end: float
    gauges: Gauges
    generated_tokens: float
    prompt_tokens: float
    finished: float
    preemptions: Mapping[str, float] = field(default_factory=dict)
    arrived: float | None = None
    arrived_prompt_tokens: float | None = None
    cached_prompt_tokens: float = 0.0
    recomputed_tokens: float | None = None
    rejected: float = 0.0
    aborted: float = 0.0
    blocked_seconds: Mapping[str, float] = field(default_factory=dict)
    decode: Work | None = None
    prefill: Work | None = None
    is_steady: bool = True

    @property
    def seconds(self) -> float:
        """Length of the interval."""
        return self.end - self.start

    @property
    def preempted_for_room(self) -> float:
        """Preemptions for lack of KV blocks, without those of a resize or a reset."""
        return self.preemptions.get("capacity", 0.0)

    @property
    def computed_tokens(self) -> float:
        """Tokens that its steps computed or recomputed."""
        if self.decode is not None and self.prefill is not None:
            return self.decode.tokens + self.prefill.tokens
        fresh = max(0.0, self.prompt_tokens - self.cached_prompt_tokens)
        return fresh + self.generated_tokens + (self.recomputed_tokens or 0.0)

    @property
    def recomputed_share(self) -> float:
        """Share of the computed tokens that were recomputed after preemption; 0 if unknown."""
        computed = self.computed_tokens
        return min(1.0, (self.recomputed_tokens or 0.0) / computed) if computed > 0 else 0.0

    def blocked_share(self, reason: str) -> float:
        """Return the share of time in which the head of the queue waited for this reason."""
        return self.blocked_seconds.get(reason, 0.0) / self.seconds if self.seconds > 0 else 0.0


def interval_between(before: Sample, after: Sample) -> Interval | None:
    """Return the interval between two samples; None when a counter fell because the engine restarted."""
    if _has_reset(before.counters, after.counters):
        return None
    old, new = before.counters, after.counters
    return Interval(
        start=before.at,
        end=after.at,
        gauges=after.gauges,
        generated_tokens=new.generated_tokens - old.generated_tokens,
        prompt_tokens=new.prompt_tokens - old.prompt_tokens,
        finished=new.finished - old.finished,
        preemptions=_difference(old.preemptions, new.preemptions),
        arrived=_less(old.arrived, new.arrived),
        arrived_prompt_tokens=_less(old.arrived_prompt_tokens, new.arrived_prompt_tokens),
        cached_prompt_tokens=new.cached_prompt_tokens - old.cached_prompt_tokens,
        recomputed_tokens=_less(old.recomputed_tokens, new.recomputed_tokens),
        rejected=new.rejected - old.rejected,
        aborted=new.aborted - old.aborted,
        blocked_seconds=_difference(old.blocked_seconds, new.blocked_seconds),
        decode=_work(old.decode, new.decode),
        prefill=_work(old.prefill, new.prefill),
        is_steady=before.gauges.config_generation == after.gauges.config_generation,
    )


def zero_sample(sample: Sample, at: float) -> Sample:
    """Return the sample that this replica would have shown at `at`, when it began to serve: all counters are zero."""
    counters = sample.counters
    zero = Counters(
        generated_tokens=0.0,
        prompt_tokens=0.0,
        finished=0.0,
        preemptions={},
        arrived=None if counters.arrived is None else 0.0,
        arrived_prompt_tokens=None if counters.arrived_prompt_tokens is None else 0.0,
        recomputed_tokens=None if counters.recomputed_tokens is None else 0.0,
        decode=None if counters.decode is None else Work(),
        prefill=None if counters.prefill is None else Work(),
    )
    return Sample(at, zero, sample.gauges, ranks=sample.ranks)


def _has_reset(old: Counters, new: Counters) -> bool:
    pairs = [
        (old.generated_tokens, new.generated_tokens),
        (old.prompt_tokens, new.prompt_tokens),
        (old.finished, new.finished),
        (old.arrived or 0.0, new.arrived or 0.0),
        (sum(old.preemptions.values()), sum(new.preemptions.values())),
    ]
    for work in ("decode", "prefill"):
        one, two = getattr(old, work), getattr(new, work)
        if one is not None and two is not None:
            pairs.append((one.steps, two.steps))
    return any(b < a for a, b in pairs)


def _less(old: float | None, new: float | None) -> float | None:
    return None if old is None or new is None else max(0.0, new - old)


def _difference(old: Mapping[str, float], new: Mapping[str, float]) -> dict[str, float]:
    return {key: max(0.0, value - old.get(key, 0.0)) for key, value in new.items()}


def _work(old: Work | None, new: Work | None) -> Work | None:
    return None if old is None or new is None else new.minus(old)


def total_of(intervals: Iterable[Interval]) -> Interval | None:
    """Return the sum of intervals; its `seconds` are replica-seconds.

    Gauges are averaged over time. None without intervals.
    """
    parts = [part for part in intervals if part.seconds > 0]
    if not parts:
        return None
    seconds = math.fsum(part.seconds for part in parts)
    end = max(part.end for part in parts)
    return Interval(
        start=end - seconds,
        end=end,
        gauges=_mean_gauges(parts, seconds),
        generated_tokens=math.fsum(part.generated_tokens for part in parts),
        prompt_tokens=math.fsum(part.prompt_tokens for part in parts),
        finished=math.fsum(part.finished for part in parts),
        preemptions=_merged(part.preemptions for part in parts),
        arrived=_sum(part.arrived for part in parts),
        arrived_prompt_tokens=_sum(part.arrived_prompt_tokens for part in parts),
        cached_prompt_tokens=math.fsum(part.cached_prompt_tokens for part in parts),
        recomputed_tokens=_sum(part.recomputed_tokens for part in parts),
        rejected=math.fsum(part.rejected for part in parts),
        aborted=math.fsum(part.aborted for part in parts),
        blocked_seconds=_merged(part.blocked_seconds for part in parts),
        decode=_all_work([part.decode for part in parts]),
        prefill=_all_work([part.prefill for part in parts]),
        is_steady=all(part.is_steady for part in parts),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if known else None


def _merged(mappings: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            total[key] = total.get(key, 0.0) + value
    return total


def _all_work(works: list[Work | None]) -> Work | None:
    known = [work for work in works if work is not None]
    total = Work() if known else None
    for work in known:
        assert total is not None
        total = total.plus(work)
    return total


def _mean_gauges(parts: list[Interval], seconds: float) -> Gauges:
    def mean(values: Iterable[float]) -> float:
        return math.fsum(value * part.seconds for value, part in zip(values, parts, strict=True)) / seconds

    oldest = [p.gauges.oldest_waiting_seconds for p in parts if p.gauges.oldest_waiting_seconds is not None]
    has_tokens = all(part.gauges.waiting_tokens is not None for part in parts)
    return Gauges(
        running=mean(part.gauges.running for part in parts),
        waiting=mean(part.gauges.waiting for part in parts),
        kv_usage=mean(part.gauges.kv_usage for part in parts),
        config_generation=parts[-1].gauges.config_generation,
        waiting_tokens=mean(part.gauges.waiting_tokens or 0.0 for part in parts) if has_tokens else None,
        oldest_waiting_seconds=max(oldest) if oldest else None,
    )
