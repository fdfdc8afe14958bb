"""Comparison of a change's first replica with the replicas of the previous revision. Pure.

Compares the requests that finished since the first replica serves, each reported once by its engine. Only clear
regressions count: a slower change may be intended, one with failing requests is not. Times are compared only between
equal models, and only between requests that met the same work: a new engine's prefix cache is empty, so it computes
more tokens for the same requests, and its queue is longer. Requests are therefore grouped by the prompt tokens that
their engine had to compute until their first token, or by the sequences and prompt tokens that shared their steps.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import median

from trimtab_operator.observed.engines import EngineObservation
from trimtab_operator.tuner.samples import Finished

MIN_REQUESTS = 30  # on either side
MIN_BUCKET_REQUESTS = 3  # on either side of a bucket: fewer have no meaningful median
MIN_ERRORS = 3
MIN_ERROR_SHARE_INCREASE = 0.05
MIN_TIME_RATIO = 2.0  # to the median of the previous revision …
MIN_TTFT_INCREASE_SECONDS = 0.1  # … and an increase that users notice
MIN_ITL_INCREASE_SECONDS = 0.01
MIN_PREEMPTION_INCREASE = 0.5  # per request, in addition to MIN_TIME_RATIO
MAX_KEPT_REQUESTS = 2000  # of either side
Bucket = tuple[int, ...]
BUCKETS_PER_OCTAVE = 2  # of equal work: times within a bucket differ by a fifth on average


@dataclass(frozen=True, slots=True)
class CanaryComparison:
    """Requests that finished since the first replica of `change` serves, by replica: new and old ones."""

    change: str
    new: Mapping[str, tuple[Finished, ...]] = field(default_factory=dict)
    old: Mapping[str, tuple[Finished, ...]] = field(default_factory=dict)

    def with_finished(
        self, engines: Mapping[str, EngineObservation], new: Collection[str], old: Collection[str]
    ) -> CanaryComparison:
        """Return the comparison extended by the finished requests that these groups reported in one observation."""
        return replace(self, new=_extended(self.new, engines, new), old=_extended(self.old, engines, old))


def _extended(
    known: Mapping[str, tuple[Finished, ...]], engines: Mapping[str, EngineObservation], names: Collection[str]
) -> Mapping[str, tuple[Finished, ...]]:
    found = dict(known)
    for name in sorted(names):
        sample = engines[name].sample if name in engines else None
        if sample is not None and sample.requests is not None and sample.requests.finished:
            found[name] = (*found.get(name, ()), *sample.requests.finished)
    if sum(map(len, found.values())) <= MAX_KEPT_REQUESTS:
        return found
    most = MAX_KEPT_REQUESTS // len(found)
    return {name: rows[-most:] for name, rows in found.items()}


def find_regression(found: CanaryComparison, *, is_same_model: bool) -> str | None:
    """Return a description of the clearest regression of the change, with its numbers, or None."""
    new, old = ([row for rows in side.values() for row in rows] for side in (found.new, found.old))
    if min(len(new), len(old)) < MIN_REQUESTS:
        return None
    failures = _error_regression(new, old) or _preemption_regression(found)
    return failures or (_ttft_regression(found) or _itl_regression(found) if is_same_model else None)


def _error_regression(new: Sequence[Finished], old: Sequence[Finished]) -> str | None:
    after, before = _share_of_errors(new), _share_of_errors(old)
    if after * len(new) >= MIN_ERRORS and after > before + MIN_ERROR_SHARE_INCREASE:
        return f"{after:.0%} of its {len(new)} requests failed; other replicas: {before:.0%}"
    return None


def _share_of_errors(rows: Sequence[Finished]) -> float:
    return sum(row.reason == "error" for row in rows) / len(rows)


def _preemption_regression(found: CanaryComparison) -> str | None:
    matched = _match(found, lambda row, load: (load.concurrency_bucket(row), row.preemptions))
    if matched is None:
        return None
    new, old = matched.mean_of_new, matched.mean_of_old
    if new > old + MIN_PREEMPTION_INCREASE and new > MIN_TIME_RATIO * old:
        return f"its requests were preempted {new:.1f} times each; other replicas: {old:.1f} times"
    return None


def _ttft_regression(found: CanaryComparison) -> str | None:
    matched = _match(found, lambda row, load: (load.prefill_bucket(row), row.ttft_seconds))
    if matched is None:
        return _overload_regression(found)
    return _time_regression(matched, MIN_TTFT_INCREASE_SECONDS, "the median TTFT with equal prefill work is")


def _overload_regression(found: CanaryComparison) -> str | None:
    """Return the regression of a replica whose queue is longer than any other replica's, without equal work to compare.

    Its seconds per prompt token are compared with the others' at their longest queues. More work takes less time per
    token, so an equal engine is not worse.
    """
    new, old = (_buckets(side, lambda row, load: ((), load.prefill_rate(row))) for side in (found.new, found.old))
    by_work = _buckets(found.old, lambda row, load: (load.prefill_bucket(row), load.prefill_rate(row)))
    most = max((bucket for bucket, values in by_work.items() if len(values) >= MIN_BUCKET_REQUESTS), default=None)
    if most is None or min(len(new.get((), ())), len(old.get((), ()))) < MIN_REQUESTS:
        return None
    after, before = 1000 * median(new[()]), 1000 * median(by_work[most])
    if after <= MIN_TIME_RATIO * before:
        return None
    return f"the median TTFT per 1,000 prompt tokens to compute is {after:.3f} s; other replicas: {before:.3f} s"


def _itl_regression(found: CanaryComparison) -> str | None:
    matched = _match(found, lambda row, load: (load.decode_bucket(row), row.mean_gap))
    return _time_regression(matched, MIN_ITL_INCREASE_SECONDS, "the median ITL with equal load is")


def _time_regression(matched: _Matched | None, min_increase: float, what: str) -> str | None:
    if matched is None:
        return None
    new, old = matched.median_of_new, matched.median_of_old
    if matched.ratio > MIN_TIME_RATIO and new > old + min_increase:
        return f"{what} {new:.3f} s; other replicas: {old:.3f} s"
    return None


# --- requests that met the same work ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Matched:
    """Values of requests in the same buckets, as (new, old) of each bucket; both have MIN_BUCKET_REQUESTS."""

    buckets: tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]

    def _weighted(self, value: Callable[[Sequence[float], Sequence[float]], float]) -> float:
        """Return the median of a value of all buckets, weighted by the requests that both sides have."""
        rows = sorted((value(new, old), min(len(new), len(old))) for new, old in self.buckets)
        half, count = sum(weight for _, weight in rows) / 2, 0
        for found, weight in rows:
            count += weight
            if count >= half:
                return found
        return 0.0

    @property
    def ratio(self) -> float:
        return self._weighted(lambda new, old: median(new) / max(median(old), 1e-9))

    @property
    def median_of_new(self) -> float:
        return self._weighted(lambda new, _: median(new))

    @property
    def median_of_old(self) -> float:
        return self._weighted(lambda _, old: median(old))

    @property
    def mean_of_new(self) -> float:
        return self._mean(lambda new, _: sum(new) / len(new))

    @property
    def mean_of_old(self) -> float:
        return self._mean(lambda _, old: sum(old) / len(old))

    def _mean(self, value: Callable[[Sequence[float], Sequence[float]], float]) -> float:
        weights = [min(len(new), len(old)) for new, old in self.buckets]
        return sum(value(*bucket) * weight for bucket, weight in zip(self.buckets, weights, strict=True)) / sum(weights)


def _match(
    found: CanaryComparison, describe: Callable[[Finished, _Load], tuple[Bucket, float | None]]
) -> _Matched | None:
    """Return the values of requests whose buckets both sides have; None if fewer than MIN_REQUESTS match.

    `describe` returns the bucket of a request and its value; None excludes the request.
    """
    new, old = (_buckets(side, describe) for side in (found.new, found.old))
    pairs = [(tuple(new[key]), tuple(old[key])) for key in new if key in old]
    pairs = [pair for pair in pairs if min(map(len, pair)) >= MIN_BUCKET_REQUESTS]
    if min(sum(len(pair[0]) for pair in pairs), sum(len(pair[1]) for pair in pairs)) < MIN_REQUESTS:
        return None
    return _Matched(tuple(pairs))


def _buckets(
    side: Mapping[str, tuple[Finished, ...]], describe: Callable[[Finished, _Load], tuple[Bucket, float | None]]
) -> dict[Bucket, list[float]]:
    found: dict[Bucket, list[float]] = {}
    for rows in side.values():
        load = _Load(rows)
        for row in rows:
            if row.ttft_seconds is None:
                continue
            bucket, value = describe(row, load)
            if value is not None:
                found.setdefault(bucket, []).append(value)
    return found


class _Load:
    """Work that one replica did at any time, from its finished requests.

    Prompt tokens that were not cached are taken as computed evenly between arrival and first token.
    """

    def __init__(self, rows: Iterable[Finished]) -> None:
        rows = [row for row in rows if row.ttft_seconds is not None]
        firsts = [(row.arrived_at + (row.ttft_seconds or 0.0), row) for row in rows]
        self._arrived = _Steps((row.arrived_at, _computed(row)) for row in rows)
        self._begun = _Steps((first, _computed(row)) for first, row in firsts)
        rates = [(first, row, _computed(row) / max(row.ttft_seconds or 0.0, 1e-6)) for first, row in firsts]
        self._prefill = _Ramps((row.arrived_at, rate) for _, row, rate in rates)
        self._prefill_ends = _Ramps((first, rate) for first, _, rate in rates)
        self._decode = _Ramps((first, 1.0) for first, _ in firsts)
        self._decode_ends = _Ramps((first + (row.decode_seconds or 0.0), 1.0) for first, row in firsts)

    def prefill_bucket(self, row: Finished) -> Bucket:
        """Return the bucket of the prompt tokens to compute until the first token, including earlier requests."""
        return _bucket(self._prefill_work(row), BUCKETS_PER_OCTAVE)

    def prefill_rate(self, row: Finished) -> float | None:
        """Return the TTFT in seconds per prompt token to compute."""
        return None if row.ttft_seconds is None else row.ttft_seconds / max(self._prefill_work(row), 1.0)

    def _prefill_work(self, row: Finished) -> float:
        return self._arrived.at(row.arrived_at) - self._begun.at(row.arrived_at)

    def concurrency_bucket(self, row: Finished) -> Bucket:
        """Return the bucket of the mean number of sequences that were decoded together with this one."""
        first, seconds = row.arrived_at + (row.ttft_seconds or 0.0), max(row.decode_seconds or 0.0, 1e-6)
        return _bucket(self._between(self._decode, self._decode_ends, first, first + seconds) / seconds, 1)

    def decode_bucket(self, row: Finished) -> Bucket:
        """Return the buckets of the concurrency and of the prompt tokens computed per decoded token."""
        first, seconds = row.arrived_at + (row.ttft_seconds or 0.0), max(row.decode_seconds or 0.0, 1e-6)
        tokens = self._between(self._prefill, self._prefill_ends, first, first + seconds) / max(1, row.output_tokens)
        return (*self.concurrency_bucket(row), *_bucket(tokens, 1))

    @staticmethod
    def _between(begins: _Ramps, ends: _Ramps, since: float, until: float) -> float:
        return (begins.at(until) - ends.at(until)) - (begins.at(since) - ends.at(since))


def _computed(row: Finished) -> float:
    return float(max(1, row.prompt_tokens - row.cached_tokens))


def _bucket(value: float, per_octave: int) -> Bucket:
    return (math.floor(per_octave * math.log2(max(value, 1.0))),)


class _Steps:
    """Sum of weights by time: `at(t)` includes those at t."""

    def __init__(self, rows: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(rows)
        self._times = [time for time, _ in ordered]
        self._sums = [0.0, *accumulate(weight for _, weight in ordered)]

    def at(self, time: float) -> float:
        return self._sums[bisect_right(self._times, time)]


class _Ramps:
    """Sum of weight × (t - time) over all earlier times."""

    def __init__(self, rows: Iterable[tuple[float, float]]) -> None:
        rows = list(rows)
        self._weights = _Steps(rows)
        self._moments = _Steps((time, weight * time) for time, weight in rows)

    def at(self, time: float) -> float:
        return self._weights.at(time) * time - self._moments.at(time)
