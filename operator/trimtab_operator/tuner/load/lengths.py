"""Request lengths: pairs of prompt and output tokens by arrival time; unfinished requests count as censored.

Recently finished requests under-represent long outputs, the more so the faster the load grows. A pair therefore belongs
to its arrival time, and an unfinished request contributes a lower bound: its length is drawn from the longer ones
(product-limit estimate of Kaplan and Meier, 1958).
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trimtab_operator.tuner.load.arrivals import arrival, merge_by_arrival, since
from trimtab_operator.tuner.load.draws import Draws
from trimtab_operator.tuner.samples import Finished, Unfinished

KEEP_PAIRS = 6000  # capacities over six cohorts of 2,000 differ by 13 to 38 %, so more pairs help
LAG_SECONDS = 45.0  # younger cohorts are mostly unfinished
LAGS_SECONDS = (LAG_SECONDS, 15.0, 0.0)  # in order of preference
RECENTS_SECONDS = (120.0, 60.0, 30.0)  # cohorts that are compared with earlier ones to detect a shift
COMPARED_PAIRS = 1500  # of the earlier requests
LEAST_RECENT = 60  # requests in a cohort
LEAST_PAIRS = 30  # to predict anything from
LEAST_FINISHED = 5  # of them, after a start
LEAST_OF_EPOCH = 800  # pairs to predict with; otherwise younger cohorts count too
LEAST_SINCE_SHIFT = 300  # fewer pairs are filled up with older ones
SHIFT = 0.15  # relative change of a mean that counts as a shift
SHIFT_DEVIATIONS = 4.0  # standard errors: three cohorts and both lengths are tested repeatedly
SHIFT_PAUSE_SECONDS = 120.0  # between two shifts, so that fluctuations do not reset the model
UNEVEN_SECONDS = 600.0  # over which dispersion is measured
BIN_SECONDS = 2.5  # in which arrivals are counted
LEAST_BINS = 12  # with arrivals
KEEP_BINS = 2 * int(UNEVEN_SECONDS / BIN_SECONDS)
MAX_DISPERSION = 25.0  # of counts: gaps with a coefficient of variation of 5
RECHECK_SECONDS = 30.0  # between two checks without a shift: half of their requests overlap
COUNTED_REASONS = frozenset({"stop", "length"})  # finish reasons of complete outputs


@dataclass(frozen=True, slots=True)
class Pair:
    """Lengths of one request; `cached` prompt tokens were in the prefix cache."""

    arrived_at: float
    prompt: int
    output: int
    cached: int = 0


Cohort = tuple[Sequence[Pair], Sequence[Unfinished]]
"""Requests that arrived in one period: the finished ones and the others."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Known lengths. Immutable; `with_requests` returns the next state."""

    pairs: tuple[Pair, ...] = ()
    """Finished requests by arrival."""
    unfinished: tuple[Unfinished, ...] = ()
    lost: tuple[Unfinished, ...] = ()
    """Requests in flight on replicas that were removed: permanent lower bounds. Without them a scale-in would keep the
    short outputs and drop the long ones."""
    epoch: float = 0.0
    """Start of the present mix; earlier requests only fill up small samples."""
    version: int = 0
    """Number of the epoch; predictions are kept while it is unchanged."""
    checked_at: float = 0.0
    ended_in: Mapping[int, int] = field(default_factory=dict)
    """Finished requests per time bin of arrival, for the dispersion."""

    def with_requests(
        self, finished: Iterable[Finished], unfinished: Iterable[Unfinished], lost: Iterable[Unfinished] = ()
    ) -> Lengths:
        """Return the lengths with the requests of one sample. `lost` ran on replicas that have been removed."""
        new = [
            Pair(f.arrived_at, f.prompt_tokens, f.output_tokens, min(f.cached_tokens, f.prompt_tokens - 1))
            for f in finished
            if f.reason in COUNTED_REASONS and f.output_tokens > 0 and f.prompt_tokens > 0
        ]
        running = tuple(u for u in unfinished if u.prompt_tokens > 0)
        gone = merge_by_arrival(self.lost, (u for u in lost if u.prompt_tokens > 0))[-KEEP_PAIRS:]
        known = replace(self, unfinished=running, lost=gone)
        if not new:
            return known
        pairs = merge_by_arrival(self.pairs, new)[-KEEP_PAIRS:]
        return replace(known, pairs=pairs, ended_in=self._with_bins(new))

    def _with_bins(self, new: Iterable[Pair]) -> dict[int, int]:
        """Return the counts with these requests; the latest bins are kept."""
        bins = dict(self.ended_in)
        for pair in new:
            index = _bin(pair.arrived_at)
            bins[index] = bins.get(index, 0) + 1
        if len(bins) <= 2 * KEEP_BINS:
            return bins
        return {index: bins[index] for index in sorted(bins)[-KEEP_BINS:]}

    @property
    def is_known(self) -> bool:
        """True if there are enough requests to predict from. The prompts of unfinished ones are known, and a few
        finished ones show how long outputs may become.
        """
        return len(self.pairs) >= LEAST_FINISHED and len(self.pairs) + len(self.unfinished) >= LEAST_PAIRS

    @property
    def num_of_epoch(self) -> int:
        """Pairs since the present mix began."""
        return len(self.pairs) - bisect_right(self.pairs, self.epoch, key=arrival)

    def with_shift_check(self, now: float) -> Lengths:
        """Return the lengths, with a new epoch if the mix has shifted; it starts with the recent cohort that differs
        most.
        """
        if now - max(self.epoch, self.checked_at) < SHIFT_PAUSE_SECONDS or not self.is_known:
            return self
        found = [(self._deviation(now - seconds, now), seconds) for seconds in RECENTS_SECONDS]
        deviations, seconds = max(found)
        if deviations < SHIFT_DEVIATIONS:
            return replace(self, checked_at=now - SHIFT_PAUSE_SECONDS + RECHECK_SECONDS)
        return replace(self, epoch=now - seconds, version=self.version + 1, checked_at=now)

    def _deviation(self, start: float, end: float) -> float:
        """Return by how many standard errors arrivals from `start` on differ from this epoch before; 0 if by less than
        SHIFT.

        Prompts are known on arrival. Outputs are compared by the number of finished requests and the number expected
        with the earlier lengths (log-rank test), which needs no finished output.
        """
        recent, before = self._cohort(start, end), self._cohort(self.epoch, start)
        newest = before[0][-COMPARED_PAIRS:]
        before = (newest, [u for u in before[1] if newest and u.arrived_at >= newest[0].arrived_at])
        if min(len(ended) + len(running) for ended, running in (recent, before)) < LEAST_RECENT or not before[0]:
            return 0.0
        return max(_of_prompts(recent, before), _of_outputs(recent, before))

    def _cohort(self, start: float, end: float) -> Cohort:
        """Return the requests that arrived from `start` to `end`: finished, and running or lost."""
        first = bisect_right(self.pairs, start, key=arrival)
        last = bisect_right(self.pairs, end, key=arrival)
        predict_outputs = (*self.lost, *self.unfinished)
        return self.pairs[first:last], [u for u in predict_outputs if start < u.arrived_at <= end]

    def predict_outputs(self, survival: Survival) -> tuple[tuple[Unfinished, int], ...]:
        """Return unfinished requests in order of arrival, each with an output length drawn from the longer ones."""
        draws = Draws(len(survival.lengths))
        ordered = sorted(self.unfinished, key=arrival)
        return tuple((u, survival.sample_longer_than(u.output_tokens, draws.share())) for u in ordered)

    def sample(self, now: float) -> tuple[Pair, ...]:
        """Return the pairs to predict with: complete cohorts of this epoch if there are enough; otherwise younger ones
        with many unfinished requests, filled up with older ones if still too few.
        """
        current: list[Pair] = []
        for lag in LAGS_SECONDS:
            current = self._complete_cohort(self.epoch, now - lag)
            if len(current) >= LEAST_OF_EPOCH:
                break
        if len(current) < LEAST_SINCE_SHIFT:
            current = self._complete_cohort(self._start_of_last(LEAST_SINCE_SHIFT, now), now)
        if len(current) < LEAST_PAIRS:
            current = list(self.pairs)
        return tuple(current)

    def _start_of_last(self, count: int, now: float) -> float:
        """Return the time since which `count` requests have arrived, finished or not. Finished ones alone would make
        every new mix look shorter than it is.
        """
        times = [pair.arrived_at for pair in self.pairs[-count:]]
        times += [predict_outputs.arrived_at for predict_outputs in (*self.lost[-count:], *self.unfinished)]
        came = sorted(at for at in times if at <= now)
        return came[-count] - 1e-6 if len(came) >= count else -math.inf

    def dispersion(self, now: float) -> float:
        """Return the index of dispersion of arrival counts: 1 for independent arrivals, more for bursts.

        Counted over about a TTFT objective, which is what a queue has to absorb. Longer bins would count load changes
        within minutes, which replicas follow, as bursts. Computed from differences of adjacent counts, whose mean
        square is twice the variance.
        """
        first, last = _bin(now - UNEVEN_SECONDS) + 1, _bin(now)  # whole bins
        counts = [self.ended_in.get(index, 0) for index in range(first, last)]
        for running in (*self.unfinished, *since(self.lost, now - UNEVEN_SECONDS)):
            index = _bin(running.arrived_at) - first
            if 0 <= index < len(counts):
                counts[index] += 1
        counts = list(itertools.dropwhile(operator.not_, counts))  # bins before the observation began
        total = sum(counts)
        if sum(1 for count in counts if count) < LEAST_BINS or total < LEAST_PAIRS:
            return 1.0
        squares = sum((b - a) ** 2 for a, b in itertools.pairwise(counts))
        dispersion = squares / (2 * (len(counts) - 1)) / (total / len(counts))
        return min(MAX_DISPERSION, max(1.0, dispersion))

    def _complete_cohort(self, start: float, end: float) -> list[Pair]:
        """Return the requests that arrived from `start` to `end`; unfinished ones with an output length drawn from the
        longer ones.
        """
        ended, censored = self._cohort(start, end)
        known = list(ended)
        if not censored or not known:
            return known
        survival = Survival.of([pair.output for pair in known], [u.output_tokens for u in censored])
        draws = Draws(len(known))
        imputed = [
            Pair(
                u.arrived_at,
                u.prompt_tokens,
                survival.sample_longer_than(u.output_tokens, draws.share()),
                u.cached_tokens,
            )
            for u in censored
        ]
        return known + imputed


def _bin(at: float) -> int:
    return int(at // BIN_SECONDS)


def _of_prompts(recent: Cohort, before: Cohort) -> float:
    """Return by how many standard errors the mean prompts differ."""
    one, one_error = _mean(_prompts(recent))
    other, other_error = _mean(_prompts(before))
    change = abs(one - other)
    return change / max(math.hypot(one_error, other_error), 1e-9) if change > SHIFT * max(other, 1e-9) else 0.0


def _prompts(cohort: Cohort) -> list[float]:
    ended, running = cohort
    return [float(p.prompt - p.cached) for p in ended] + [float(u.prompt_tokens - u.cached_tokens) for u in running]


def _of_outputs(recent: Cohort, before: Cohort) -> float:
    """Return by how many standard errors the number of finished outputs differs from that expected with the earlier
    lengths.
    """
    survival = Survival.of([p.output for p in before[0]], [u.output_tokens for u in before[1]])
    ended, running = recent
    count = len(ended)
    expected = math.fsum(survival.hazard(p.output) for p in ended)
    expected += math.fsum(survival.hazard(u.output_tokens) for u in running)
    change = abs(count - expected)
    return change / math.sqrt(max(expected, 1.0)) if change > SHIFT * max(expected, 1.0) else 0.0


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    count = len(values)
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / max(1, count - 1)
    return mean, math.sqrt(variance / count)


@dataclass(frozen=True, slots=True)
class Survival:
    """Share of outputs that are longer than each observed length."""

    lengths: tuple[int, ...]
    shares: tuple[float, ...]
    hazards: tuple[float, ...]
    """Cumulative hazard at each length (Nelson-Aalen estimate)."""
    mean: float
    """Tokens per finished output, including those of unfinished ones: the mean length with a constant hazard."""

    @classmethod
    def of(cls, ended: Sequence[int], censored: Sequence[int]) -> Survival:
        """Return the product-limit estimate: at each length, the surviving share of the requests still at risk."""
        at_risk = len(ended) + len(censored)
        ends, stops = sorted(ended), sorted(censored)
        lengths: list[int] = []
        shares: list[float] = []
        hazards: list[float] = []
        share, hazard, gone, num_stops = 1.0, 0.0, 0, len(stops)
        for length, count in Counter(ends).items():  # in their order
            while gone < num_stops and stops[gone] < length:  # censored below this length: no longer at risk
                gone += 1
                at_risk -= 1
            share *= 1.0 - count / at_risk
            hazard += count / at_risk
            at_risk -= count
            lengths.append(length)
            shares.append(share)
            hazards.append(hazard)
        mean = (sum(ends) + sum(stops)) / max(1, len(ends))
        return cls(tuple(lengths), tuple(shares), tuple(hazards), mean)

    def hazard(self, length: int) -> float:
        """Return the cumulative hazard at a length; extrapolated by the mean beyond the observed lengths."""
        index = bisect_right(self.lengths, length)
        known = self.hazards[index - 1] if index else 0.0
        if index < len(self.lengths):
            return known
        return known + (length - self.lengths[-1]) / max(1.0, self.mean)

    def sample_longer_than(self, length: int, draw: float) -> int:
        """Return a length from those longer than `length`, at quantile `draw`. Beyond the longest finished output a
        constant hazard is assumed.
        """
        index = bisect_right(self.lengths, length)
        left = self.shares[index - 1] if index else 1.0
        wanted = left * (1.0 - draw)
        last = self.shares[-1] if self.shares else 1.0
        if index < len(self.lengths) and wanted >= last:
            while self.shares[index] > wanted:
                index += 1
            return self.lengths[index]
        longest = max(length, self.lengths[-1] if self.lengths else 0)
        beyond = 1.0 - draw if index >= len(self.lengths) else wanted / last
        return longest + 1 + int(-self.mean * math.log(max(beyond, 1e-6)))
