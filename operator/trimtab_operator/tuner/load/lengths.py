"""How long requests are: pairs of prompt and answer by the time of arrival, those that still run counted as censored.

What has finished lately says too little of long answers, the less the faster load grows. So a pair belongs to the
moment at which its request came, and a request that still runs says "longer than this": its length is drawn from those
that came further (the product-limit estimate of Kaplan and Meier, 1958).
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trimtab_operator.tuner.load.arrivals import arrival, since, with_new
from trimtab_operator.tuner.load.draws import Draws
from trimtab_operator.tuner.samples import Finished, Unfinished

KEEP_PAIRS = 6000  # capacities over six cohorts of 2,000 differ by 13 to 38 %: keep as many as are cheap
LAG_SECONDS = 45.0  # younger cohorts are mostly unfinished
LAGS_SECONDS = (LAG_SECONDS, 15.0, 0.0)  # first first: what came in the last seconds only where little else is known
RECENTS_SECONDS = (120.0, 60.0, 30.0)  # cohorts that are compared with what came before, to see a shift
COMPARED_PAIRS = 1500  # of what came before
LEAST_RECENT = 60  # requests in a cohort
LEAST_PAIRS = 30  # to predict anything from
LEAST_OF_EPOCH = 800  # pairs to predict with: where older cohorts of an epoch are fewer, younger ones count too
LEAST_SINCE_SHIFT = 300  # fewer new pairs than these are filled up with older ones
SHIFT = 0.15  # relative change of a mean that is one
SHIFT_DEVIATIONS = 4.0  # and no accident: three cohorts and both sides of a request are looked at, time and again
SHIFT_PAUSE_SECONDS = 120.0  # between two shifts: else every swing relearns everything
UNEVEN_SECONDS = 600.0  # over which unevenness is measured
BIN_SECONDS = 2.5  # in which arrivals are counted
LEAST_BINS = 12  # with arrivals
KEEP_BINS = 2 * int(UNEVEN_SECONDS / BIN_SECONDS)
MAX_DISPERSION = 25.0  # of counts: gaps with a coefficient of variation of 5
RECHECK_SECONDS = 30.0  # between two checks that find none: half of them would look at the same requests
COUNTED_REASONS = frozenset({"stop", "length"})  # how a request ends when it ends by itself


@dataclass(frozen=True, slots=True)
class Pair:
    """One request's lengths. `cached` of its prompt's tokens were found in the prefix cache."""

    arrived_at: float
    prompt: int
    output: int
    cached: int = 0


Cohort = tuple[Sequence[Pair], Sequence[Unfinished]]
"""Requests that came in a time: those that have ended, and those that have not as far as is known."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """What is known of lengths. Immutable; `with_news` gives the next state."""

    pairs: tuple[Pair, ...] = ()
    """Finished ones, by arrival."""
    unfinished: tuple[Unfinished, ...] = ()
    lost: tuple[Unfinished, ...] = ()
    """What ran in replicas when they went: longer than it was then, and nobody tells how much. Without these a scale-in
    would leave the short answers that had ended by then, and take the long ones away."""
    epoch: float = 0.0
    """When the present mix began: what came before is only used to fill up."""
    version: int = 0
    """Counts epochs; predictions are kept as long as it holds."""
    checked_at: float = 0.0
    ended_in: Mapping[int, int] = field(default_factory=dict)
    """How many of those that have ended came in each bin of time, as far as it counts for unevenness."""

    def with_news(
        self, finished: Iterable[Finished], unfinished: Iterable[Unfinished], lost: Iterable[Unfinished] = ()
    ) -> Lengths:
        """After what was told in one look. `lost` ran in replicas that have gone since."""
        new = [
            Pair(f.arrived_at, f.prompt_tokens, f.output_tokens, min(f.cached_tokens, f.prompt_tokens - 1))
            for f in finished
            if f.reason in COUNTED_REASONS and f.output_tokens > 0 and f.prompt_tokens > 0
        ]
        running = tuple(u for u in unfinished if u.prompt_tokens > 0)
        gone = with_new(self.lost, (u for u in lost if u.prompt_tokens > 0))[-KEEP_PAIRS:]
        known = replace(self, unfinished=running, lost=gone)
        if not new:
            return known
        pairs = with_new(self.pairs, new)[-KEEP_PAIRS:]
        return replace(known, pairs=pairs, ended_in=self._with_bins(new))

    def _with_bins(self, new: Iterable[Pair]) -> dict[int, int]:
        """The counts with these too; of many bins the latest are kept."""
        bins = dict(self.ended_in)
        for pair in new:
            index = _bin(pair.arrived_at)
            bins[index] = bins.get(index, 0) + 1
        if len(bins) <= 2 * KEEP_BINS:
            return bins
        return {index: bins[index] for index in sorted(bins)[-KEEP_BINS:]}

    @property
    def is_known(self) -> bool:
        """Whether there is enough to predict from."""
        return len(self.pairs) >= LEAST_PAIRS

    @property
    def num_of_epoch(self) -> int:
        """How many pairs came since the present mix began."""
        return len(self.pairs) - bisect_right(self.pairs, self.epoch, key=arrival)

    def checked(self, now: float) -> Lengths:
        """Look whether the mix has shifted: then a new epoch begins, with the recent cohort that differs most."""
        if now - max(self.epoch, self.checked_at) < SHIFT_PAUSE_SECONDS or not self.is_known:
            return self
        found = [(self._deviation(now - seconds, now), seconds) for seconds in RECENTS_SECONDS]
        deviations, seconds = max(found)
        if deviations < SHIFT_DEVIATIONS:
            return replace(self, checked_at=now - SHIFT_PAUSE_SECONDS + RECHECK_SECONDS)
        return replace(self, epoch=now - seconds, version=self.version + 1, checked_at=now)

    def _deviation(self, start: float, end: float) -> float:
        """By how many standard errors what came from `start` on differs from this epoch before; 0: by less than SHIFT.

        Prompts are known on arrival. Of answers it is counted how many have ended, and how many would have if they
        were as those before (the log-rank test): it needs no answer to be waited for.
        """
        recent, before = self._came(start, end), self._came(self.epoch, start)
        newest = before[0][-COMPARED_PAIRS:]
        before = (newest, [u for u in before[1] if newest and u.arrived_at >= newest[0].arrived_at])
        if min(len(ended) + len(running) for ended, running in (recent, before)) < LEAST_RECENT or not before[0]:
            return 0.0
        return max(_of_prompts(recent, before), _of_outputs(recent, before))

    def _came(self, start: float, end: float) -> Cohort:
        """Those that arrived from `start` to `end`: ended, and running or lost."""
        first = bisect_right(self.pairs, start, key=arrival)
        last = bisect_right(self.pairs, end, key=arrival)
        going_on = (*self.lost, *self.unfinished)
        return self.pairs[first:last], [u for u in going_on if start < u.arrived_at <= end]

    def going_on(self, survival: Survival) -> tuple[tuple[Unfinished, int], ...]:
        """What runs and waits, in the order of arrival, each with an answer as long as those that came further."""
        draws = Draws(len(survival.lengths))
        ordered = sorted(self.unfinished, key=arrival)
        return tuple((u, survival.beyond(u.output_tokens, draws.share())) for u in ordered)

    def sample(self, now: float) -> tuple[Pair, ...]:
        """The pairs to predict with: this epoch's, of whole cohorts where there are enough of them; else of younger
        ones too, whose unfinished requests are many; filled up with older ones where all of them are few."""
        current: list[Pair] = []
        for lag in LAGS_SECONDS:
            current = self._complete(self.epoch, now - lag)
            if len(current) >= LEAST_OF_EPOCH:
                break
        if len(current) < LEAST_SINCE_SHIFT:
            current = self._complete(self._since_when(LEAST_SINCE_SHIFT, now), now)
        if len(current) < LEAST_PAIRS:
            current = list(self.pairs)
        return tuple(current)

    def _since_when(self, count: int, now: float) -> float:
        """Since when so many have come, whether they have ended or not: of those that came lately the short ones have,
        and alone they would make every new mix look shorter than it is."""
        times = [pair.arrived_at for pair in self.pairs[-count:]]
        times += [going_on.arrived_at for going_on in (*self.lost[-count:], *self.unfinished)]
        came = sorted(at for at in times if at <= now)
        return came[-count] - 1e-6 if len(came) >= count else -math.inf

    def dispersion(self, now: float) -> float:
        """Variance of the counts of arrivals over their mean: 1 for independent arrivals, more for bursts.

        Counted over as long as a first token may take, about: that is what a queue has to swallow. Counts over longer
        times would take a load that comes and goes within minutes, which replicas follow, for bursts.
        From differences of neighbours, whose mean square is twice the variance.
        """
        first, last = _bin(now - UNEVEN_SECONDS) + 1, _bin(now)  # whole bins
        counts = [self.ended_in.get(index, 0) for index in range(first, last)]
        for running in (*self.unfinished, *since(self.lost, now - UNEVEN_SECONDS)):
            index = _bin(running.arrived_at) - first
            if 0 <= index < len(counts):
                counts[index] += 1
        counts = list(itertools.dropwhile(operator.not_, counts))  # before it was watched nothing is known to have come
        total = sum(counts)
        if sum(1 for count in counts if count) < LEAST_BINS or total < LEAST_PAIRS:
            return 1.0
        squares = sum((b - a) ** 2 for a, b in itertools.pairwise(counts))
        dispersion = squares / (2 * (len(counts) - 1)) / (total / len(counts))
        return min(MAX_DISPERSION, max(1.0, dispersion))

    def _complete(self, start: float, end: float) -> list[Pair]:
        """All that arrived from `start` to `end`; unfinished ones with an answer as long as those that came further."""
        ended, censored = self._came(start, end)
        known = list(ended)
        if not censored or not known:
            return known
        survival = Survival.of([pair.output for pair in known], [u.output_tokens for u in censored])
        draws = Draws(len(known))
        imputed = [
            Pair(u.arrived_at, u.prompt_tokens, survival.beyond(u.output_tokens, draws.share()), u.cached_tokens)
            for u in censored
        ]
        return known + imputed


def _bin(at: float) -> int:
    return int(at // BIN_SECONDS)


def _of_prompts(recent: Cohort, before: Cohort) -> float:
    """By how many standard errors the mean prompts differ."""
    one, one_error = _mean(_prompts(recent))
    other, other_error = _mean(_prompts(before))
    change = abs(one - other)
    return change / max(math.hypot(one_error, other_error), 1e-9) if change > SHIFT * max(other, 1e-9) else 0.0


def _prompts(cohort: Cohort) -> list[float]:
    ended, running = cohort
    return [float(p.prompt - p.cached) for p in ended] + [float(u.prompt_tokens - u.cached_tokens) for u in running]


def _of_outputs(recent: Cohort, before: Cohort) -> float:
    """By how many standard errors the answers that have ended are more, or fewer, than those before would be."""
    survival = Survival.of([p.output for p in before[0]], [u.output_tokens for u in before[1]])
    ended, running = recent
    count = len(ended)
    expected = math.fsum(survival.hazard(p.output) for p in ended)
    expected += math.fsum(survival.hazard(u.output_tokens) for u in running)
    change = abs(count - expected)
    return change / math.sqrt(max(expected, 1.0)) if change > SHIFT * max(expected, 1.0) else 0.0


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    count = len(values)
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / max(1, count - 1)
    return mean, math.sqrt(variance / count)


@dataclass(frozen=True, slots=True)
class Survival:
    """The share of answers that are longer than each length at which one ended."""

    lengths: tuple[int, ...]
    shares: tuple[float, ...]
    hazards: tuple[float, ...]
    """How many would have ended by then, of one that went on and on (Nelson and Aalen's estimate)."""
    mean: float
    """Tokens for each answer that ended, those of the others included: the mean length were all tokens alike."""

    @classmethod
    def of(cls, ended: Sequence[int], censored: Sequence[int]) -> Survival:
        """The product-limit estimate: at each length, of those still at risk, the share that went on."""
        at_risk = len(ended) + len(censored)
        ends, stops = sorted(ended), sorted(censored)
        lengths: list[int] = []
        shares: list[float] = []
        hazards: list[float] = []
        share, hazard, gone, num_stops = 1.0, 0.0, 0, len(stops)
        for length, count in Counter(ends).items():  # in their order
            while gone < num_stops and stops[gone] < length:  # who was last seen shorter is not at risk any more
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
        """How many would have ended in as many tokens; beyond what was seen, by the mean."""
        index = bisect_right(self.lengths, length)
        known = self.hazards[index - 1] if index else 0.0
        if index < len(self.lengths):
            return known
        return known + (length - self.lengths[-1]) / max(1.0, self.mean)

    def beyond(self, length: int, draw: float) -> int:
        """A length of those that are longer than `length`: the one at share `draw` of them. Beyond the longest that
        was seen to end, answers go on as if every token might be the last alike."""
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
