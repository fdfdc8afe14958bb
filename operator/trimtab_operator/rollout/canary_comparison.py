"""Comparison of a change's first replica with the replicas of the previous revision. Pure.

Compares the requests that finished since the first replica serves, each reported once by its engine. Only clear
regressions count: a slower change may be intended, one with failing requests is not. Times are compared only between
equal models, and only for requests whose prompts were computed, because a new engine's prefix cache is empty.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from trimtab_operator.observed.engines import EngineObservation
from trimtab_operator.tuner.samples import Finished

MIN_REQUESTS = 30  # on either side
MIN_ERRORS = 3
MIN_ERROR_SHARE_INCREASE = 0.05
MIN_TIME_RATIO = 2.0  # to the median of the previous revision …
MIN_TTFT_INCREASE_SECONDS = 0.1  # … and an increase that users notice
MIN_ITL_INCREASE_SECONDS = 0.01
MIN_PREEMPTION_INCREASE = 0.5  # per request, in addition to MIN_TIME_RATIO
MAX_CACHED_SHARE = 0.1  # of a prompt: with more of it cached, its TTFT does not measure the engine
MAX_KEPT_REQUESTS = 2000  # of either side


@dataclass(frozen=True, slots=True)
class CanaryComparison:
    """Requests that finished since the first replica of `change` serves: its own and those of the other replicas."""

    change: str
    new: tuple[Finished, ...] = ()
    old: tuple[Finished, ...] = ()

    def with_finished(
        self, engines: Mapping[str, EngineObservation], new: Collection[str], old: Collection[str]
    ) -> CanaryComparison:
        """Return the comparison extended by the finished requests that these groups reported in one observation."""
        return replace(
            self,
            new=(*self.new, *_finished(engines, new))[-MAX_KEPT_REQUESTS:],
            old=(*self.old, *_finished(engines, old))[-MAX_KEPT_REQUESTS:],
        )


def _finished(engines: Mapping[str, EngineObservation], names: Collection[str]) -> Iterable[Finished]:
    for name in sorted(names):
        sample = engines[name].sample if name in engines else None
        if sample is not None and sample.requests is not None:
            yield from sample.requests.finished


def find_regression(found: CanaryComparison, *, is_same_model: bool) -> str | None:
    """Return a description of the clearest regression of the change, with its numbers, or None."""
    if min(len(found.new), len(found.old)) < MIN_REQUESTS:
        return None
    failures = _error_regression(found) or _preemption_regression(found)
    return failures or (_ttft_regression(found) or _itl_regression(found) if is_same_model else None)


def _error_regression(found: CanaryComparison) -> str | None:
    new, old = _share_of_errors(found.new), _share_of_errors(found.old)
    if new * len(found.new) >= MIN_ERRORS and new > old + MIN_ERROR_SHARE_INCREASE:
        return f"{new:.0%} of its {len(found.new)} requests failed; other replicas: {old:.0%}"
    return None


def _share_of_errors(rows: Sequence[Finished]) -> float:
    return sum(row.reason == "error" for row in rows) / len(rows)


def _preemption_regression(found: CanaryComparison) -> str | None:
    new, old = (sum(row.preemptions for row in rows) / len(rows) for rows in (found.new, found.old))
    if new > old + MIN_PREEMPTION_INCREASE and new > MIN_TIME_RATIO * old:
        return f"its requests were preempted {new:.1f} times each; other replicas: {old:.1f} times"
    return None


def _ttft_regression(found: CanaryComparison) -> str | None:
    new, old = _ttfts(found.new), _ttfts(found.old)
    return _time_regression(new, old, MIN_TTFT_INCREASE_SECONDS, "the median TTFT is")


def _ttfts(rows: Iterable[Finished]) -> list[float]:
    computed = (row for row in rows if row.cached_tokens <= MAX_CACHED_SHARE * row.prompt_tokens)
    return [row.ttft_seconds for row in computed if row.ttft_seconds is not None]


def _itl_regression(found: CanaryComparison) -> str | None:
    new, old = ([row.mean_gap for row in rows if row.mean_gap is not None] for rows in (found.new, found.old))
    return _time_regression(new, old, MIN_ITL_INCREASE_SECONDS, "the median ITL is")


def _time_regression(new: Sequence[float], old: Sequence[float], min_increase: float, what: str) -> str | None:
    if min(len(new), len(old)) < MIN_REQUESTS:
        return None
    after, before = median(new), median(old)
    if after > MIN_TIME_RATIO * before and after > before + min_increase:
        return f"{what} {after:.3f} s; other replicas: {before:.3f} s"
    return None
