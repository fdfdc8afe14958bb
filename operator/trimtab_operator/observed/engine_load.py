"""Load and latencies of engines over an interval, for `trimtab top`. Pure.

Rates and percentiles come from two samples of the same engine. None means that the engine exports too little, or that
no request ended in the interval. Nothing is decided here: the tuner has its own, stricter evaluation of samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab_operator.resource.quantity import parse_seconds
from trimtab_operator.tuner.samples import Sample
from trimtab_operator.tuner.samples.sample import Histogram, histogram_quantile

DEFAULT_PERCENTILE = 95


@dataclass(frozen=True, slots=True)
class Target:
    """A latency objective: the seconds that `percentile` percent of requests must not exceed."""

    percentile: int = DEFAULT_PERCENTILE
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Parameters and objectives that the load is compared with; None if unknown."""

    max_num_seqs: float | None = None
    max_num_batched_tokens: float | None = None
    ttft: Target = Target()
    itl: Target = Target()


@dataclass(frozen=True, slots=True)
class Load:
    """Load of one or several engines. Shares are 0..1, rates are per second, latencies are in seconds."""

    running: float
    waiting: float
    kv_usage: float
    """KV cache usage; of several engines, the mean."""
    slots_used: float | None
    """Running requests divided by `max_num_seqs`."""
    budget_used: float | None
    """Mean tokens of a step divided by `max_num_batched_tokens`."""
    requests_per_second: float | None
    tokens_per_second: float
    """Generated tokens."""
    preemptions_per_minute: float
    ttft: float | None
    """Time to the first token at the objective's percentile."""
    itl: float | None
    """Inter-token latency at the objective's percentile."""


def limits_of(resource: Mapping[str, Any]) -> Limits:
    """Return the limits from the status of a resource; objectives of the spec apply before the first status."""
    status = resource.get("status") or {}
    effective = (status.get("engine") or {}).get("effective") or {}
    objectives = (status.get("tuning") or {}).get("objectives") or (resource.get("spec") or {}).get("objectives") or {}
    return Limits(
        max_num_seqs=_number(effective.get("maxNumSeqs")),
        max_num_batched_tokens=_number(effective.get("maxNumBatchedTokens")),
        ttft=_target(objectives.get("ttft")),
        itl=_target(objectives.get("itl")),
    )


def measure_load(pairs: Sequence[tuple[Sample, Sample]], limits: Limits) -> Load | None:
    """Return the load of engines, each with an earlier and a later sample. None without a usable pair.

    An engine that restarted between its samples has lower counters and is left out.
    """
    usable = [(before, after) for before, after in pairs if _is_usable(before, after)]
    if not usable:
        return None
    later = [after for _, after in usable]
    running = sum(sample.gauges.running for sample in later)
    preemptions = _rate(usable, lambda sample: sum(sample.counters.preemptions.values()))
    arrived = None if any(s.counters.arrived is None for s in later) else _rate(usable, lambda s: s.counters.arrived)
    return Load(
        running=running,
        waiting=sum(sample.gauges.waiting for sample in later),
        kv_usage=sum(sample.gauges.kv_usage for sample in later) / len(later),
        slots_used=None if not limits.max_num_seqs else running / (limits.max_num_seqs * len(later)),
        budget_used=_budget_used(usable, limits.max_num_batched_tokens),
        requests_per_second=arrived,
        tokens_per_second=_rate(usable, lambda sample: sample.counters.generated_tokens),
        preemptions_per_minute=60 * preemptions,
        ttft=percentile_of([(b.ttft, a.ttft) for b, a in usable], limits.ttft.percentile),
        itl=percentile_of([(b.itl, a.itl) for b, a in usable], limits.itl.percentile),
    )


def percentile_of(pairs: Iterable[tuple[Histogram | None, Histogram | None]], percentile: int) -> float | None:
    """Return a percentile of the observations between two readings of histograms, as PromQL estimates it.

    None without an observation, or if the histograms differ in their edges.
    """
    edges: tuple[float, ...] | None = None
    counts: list[float] = []
    for before, after in pairs:
        if before is None or after is None or before.edges != after.edges or edges not in (None, after.edges):
            return None
        edges = after.edges
        gained = [late - early for early, late in zip(before.counts, after.counts, strict=True)]
        counts = gained if not counts else [one + other for one, other in zip(counts, gained, strict=True)]
    return None if edges is None else histogram_quantile(percentile / 100, edges, counts)


def _is_usable(before: Sample, after: Sample) -> bool:
    return after.at > before.at and after.counters.generated_tokens >= before.counters.generated_tokens


def _rate(pairs: Iterable[tuple[Sample, Sample]], counter: Any) -> float:
    rates = (max(0.0, counter(after) - counter(before)) / (after.at - before.at) for before, after in pairs)
    return math.fsum(rates)


def _budget_used(pairs: Iterable[tuple[Sample, Sample]], budget: float | None) -> float | None:
    """Return the share of the token budget that the steps of the interval used; None without a step."""
    steps = tokens = 0.0
    for before, after in pairs:
        for early, late in (
            (before.counters.decode, after.counters.decode),
            (before.counters.prefill, after.counters.prefill),
        ):
            if early is not None and late is not None:
                work = late.minus(early)
                steps, tokens = steps + work.steps, tokens + work.tokens
    return None if not budget or steps <= 0 else tokens / steps / budget


def _target(objective: Mapping[str, Any] | None) -> Target:
    """Return the target. An objective that grows with the prompt has no limit that a percentile could exceed."""
    if not objective:
        return Target()
    percentile = int(objective.get("percentile", DEFAULT_PERCENTILE))
    if objective.get("perPromptToken"):
        return Target(percentile)
    try:
        return Target(percentile, parse_seconds(str(objective.get("target"))))
    except ValueError:
        return Target(percentile)


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None
