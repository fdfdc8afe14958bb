"""Search strategy: the next trial, from the results of earlier ones: vLLM's auto_tune script with bisection. Pure.

A search is a generator that yields a Trial and is sent its result. It has no clock, engine or file: the same results
lead to the same trials, so a search resumes by replaying the recorded results.

    memory the largest utilization that serves the largest candidate under load, by bisection
    alone one request at a time: upper bounds of all candidates, and whether the limits can be met at all
    load per candidate, the highest request rate within the limits: all at once first, then by bisection; if
             another candidate is the best so far, first the rate that would beat it, which most fail in one trial
    final the best again with more requests; while it violates a limit, at a lower rate

Candidates are climbed, not swept: from the best so far to neighbors on the grid, in steps that halve.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from enum import Enum

from trimtab_engine.bench.autotune.bounds import Bounds
from trimtab_engine.bench.autotune.limits import HIT_RATE, Figures, Limits
from trimtab_engine.bench.autotune.space import HUNDREDTHS, Candidate, Setting, Space

RESOLUTION = 0.025  # of a rate: bisection ends when the interval is smaller
MIN_GAIN = 0.02  # required improvement over the best so far; less is noise
MIN_COMPLETED_SHARE = 0.95  # of the arrival rate: below it the queue grows
MAX_NEAR_EXCESS = 1.1  # times its limit: at slightly more than the best rate, this is not a local minimum
MIN_RATE_SHARE = 1 / 16  # of the throughput all at once: lower rates are not searched
FINAL_RUNS = 4  # of the best, each at a rate lower by FINAL_STEP
FINAL_STEP = 0.95


class Purpose(Enum):
    """Purpose of a trial, which determines its number of requests."""

    MEMORY = "memory"
    SINGLE_REQUEST = "alone"
    LOAD = "load"
    FINAL = "final"


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial: values, and requests per second (infinite: all at once)."""

    purpose: Purpose
    setting: Setting
    rate: float = math.inf


@dataclass(frozen=True, slots=True)
class TrialResult:
    """Result of a trial. `refused` is the reason if the engine rejected the values or ended with them."""

    figures: Figures
    refused: str | None = None

    @property
    def throughput(self) -> float:
        """Requests per second."""
        return self.figures.get("request_throughput") or 0.0


NUM_SEQS, BUDGET = (-1, 0), (0, -1)
DIRECTIONS = (NUM_SEQS, BUDGET, (1, 0), (0, 1), (-1, -1), (1, 1), (-1, 1), (1, -1))
"""Directions on the grid of max_num_seqs and budgets."""

Steps = Generator[Trial, TrialResult, None]


class Outcome(Enum):
    """Outcome of a candidate."""

    HOLDS = "holds"
    MISSES = "violates a limit"
    BEATEN = "below the best"
    PRUNED = "skipped"
    REFUSED = "refused"
    NOT_TRIED = "not tried"


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """Result of a candidate. `value` is requests per second within the limits; `excess` the worst figure divided by its
    limit.
    """

    outcome: Outcome
    why: str
    rate: float = 0.0
    value: float = 0.0
    excess: float = math.inf
    figures: Figures = field(default_factory=dict)

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key, larger is better: throughput, then closeness to the limits."""
        return self.value, -self.excess


@dataclass(slots=True)
class Search:
    """A search over a space. Its fields hold the current results, also if it is stopped early."""

    space: Space
    limits: Limits
    tries_all: bool = False
    """True to measure every candidate that no bound excludes, instead of a climb."""
    utilization: float | None = None
    verdicts: dict[Candidate, CandidateResult] = field(default_factory=dict)
    best: Candidate | None = None
    final: CandidateResult | None = None
    """Result of the final trial of the best; its outcome is HOLDS or MISSES."""
    refused: dict[int, str] = field(default_factory=dict)
    """Hundredths of utilization that do not work, with the reason."""
    _bounds: Bounds | None = None
    _alone: TrialResult | None = None
    _served: TrialResult | None = None
    """Result of the largest candidate at the chosen utilization, all at once, reused as its first trial."""

    def steps(self) -> Steps:
        """Run the whole search."""
        yield from self.find_utilization()
        if self.utilization is None:
            return
        yield from self.find_candidate()
        if self.best is not None and self.verdicts[self.best].value:
            yield from self.confirm()

    # --- memory ------------------------------------------------------------------------------------------------------

    def find_utilization(self) -> Steps:
        """Find the largest utilization at which the largest candidate serves all requests; stays None if there is
        none.
        """
        low, high = self.space.utilization
        works, fails, tried = low - 1, high + 1, high
        while fails - works > 1:
            seen = yield Trial(Purpose.MEMORY, Setting(self.space.largest(), tried / HUNDREDTHS))
            if (reason := _failure_reason(seen)) is None:
                works, self._served = tried, seen
            else:
                fails, self.refused[tried] = tried, reason
            tried = (works + fails) // 2
        if works >= low:
            self.utilization = works / HUNDREDTHS

    # --- max_num_seqs and budget -------------------------------------------------------------------------------------

    def find_candidate(self) -> Steps:
        """Fill `verdicts` and `best`."""
        start = self.space.largest()
        self._alone = alone = yield self._trial(Purpose.SINGLE_REQUEST, start)
        self._bounds = bounds_of(alone.figures)
        yield from self._measure_candidate(start)
        yield from self._sweep() if self.tries_all else self._climb(start)
        for candidate in self.space.candidates():
            self.verdicts.setdefault(candidate, CandidateResult(Outcome.NOT_TRIED, "neighbors were worse"))

    def _sweep(self) -> Steps:
        for candidate in sorted(self.space.candidates(), reverse=True):
            if candidate not in self.verdicts:
                yield from self._measure_candidate(candidate)

    def _climb(self, start: Candidate) -> Steps:
        """Climb: first fewer sequences with the largest budget, and smaller budgets with the most sequences, because
        concurrency is bounded by one of both; then around the best while a neighbor improves it.
        """
        yield from self._line(start, NUM_SEQS)
        yield from self._line(start, BUDGET)
        for candidate in sorted(self.space.candidates()):  # no candidate meets the limits so far: try all
            if self.best is not None and not self.verdicts[self.best].value:
                yield from self._measure_new(candidate)
        if (
            self.best is not None and self.limits.latencies
        ):  # with limits most candidates cost one trial, and local minima are common
            yield from self._line(self.best, NUM_SEQS)
            yield from self._line(self.best, BUDGET)
        at = None
        while at != self.best and self.best is not None:
            at = self.best
            for way in DIRECTIONS:
                if (neighbor := self._neighbor(at, way, 1)) is not None:
                    yield from self._measure_new(neighbor)

    def _line(self, start: Candidate, way: tuple[int, int]) -> Steps:
        """Climb from `start` along a line to its best, in steps that halve. On a plateau the next candidate is tried as
        well.
        """
        at, step = start, max(1, (max(len(self.space.num_seqs), len(self.space.budgets)) - 1) // 2)
        while step:
            for distance in (step, -step):
                found = yield from self._better_along(at, way, distance)
                if found is not None:
                    at = found
                    break
            else:
                step //= 2

    def _better_along(
        self, at: Candidate, way: tuple[int, int], distance: int
    ) -> Generator[Trial, TrialResult, Candidate | None]:
        """Return the first better candidate. Continues while candidates are as good, or closer to the limits."""
        last = math.inf
        for other in self._candidates_along(at, way, distance):
            yield from self._measure_new(other)
            verdict = self.verdicts[other]
            if verdict.rank > self.verdicts[at].rank:
                return other
            comes_nearer = verdict.outcome is Outcome.MISSES and verdict.excess <= last
            if abs(distance) == 1 or not (comes_nearer or self._is_as_good(other, at)):
                return None
            last = verdict.excess
        return None

    def _candidates_along(self, at: Candidate, way: tuple[int, int], distance: int) -> list[Candidate]:
        """Return every `distance`-th candidate from `at`, and the last one."""
        one = 1 if distance > 0 else -1
        line: list[Candidate] = []
        while (other := self._neighbor(at, way, one * (len(line) + 1))) is not None:
            line.append(other)
        taken = line[abs(distance) - 1 :: abs(distance)]
        return taken if not line or line[-1] in taken else [*taken, line[-1]]

    def _measure_new(self, candidate: Candidate) -> Steps:
        if candidate not in self.verdicts:
            yield from self._measure_candidate(candidate)

    def _is_as_good(self, one: Candidate, other: Candidate) -> bool:
        """Return True if both differ by less than a gain, or nearly meet the limits at a rate that the other one
        holds.
        """
        verdict, known = self.verdicts[one], self.verdicts[other]
        if known.value == 0:
            return verdict.outcome is Outcome.MISSES and verdict.excess <= known.excess * (1 + MIN_GAIN)
        return verdict.value * (1 + MIN_GAIN) >= known.value or (
            verdict.outcome is Outcome.MISSES and verdict.excess <= MAX_NEAR_EXCESS
        )

    def _neighbor(self, at: Candidate, way: tuple[int, int], distance: int) -> Candidate | None:
        """Return the candidate at this distance on the grid, or None."""
        num_seqs, budgets = self.space.num_seqs, self.space.budgets
        s = num_seqs.index(at.max_num_seqs) + way[0] * distance
        b = budgets.index(at.max_num_batched_tokens) + way[1] * distance
        if not (0 <= s < len(num_seqs) and 0 <= b < len(budgets)) or budgets[b] < num_seqs[s]:
            return None
        return Candidate(num_seqs[s], budgets[b])

    # --- one candidate -----------------------------------------------------------------------------------------------

    def _measure_candidate(self, candidate: Candidate) -> Steps:
        """Measure a candidate with as few trials as needed to compare it with the best."""
        best = self.verdicts[self.best] if self.best is not None else None
        to_beat = best.value * (1 + MIN_GAIN) if best else 0.0
        bound = self._bounds.of(candidate) if self._bounds else None
        if bound and bound[0] < to_beat:
            why = f"at most {bound[0]:.3g} requests/s ({bound[1]}), the best reaches {best.value if best else 0:.3g}"
            self.verdicts[candidate] = CandidateResult(Outcome.PRUNED, why)
            return
        if best and best.value and math.isfinite(best.rate):
            yield from self._challenge(candidate, to_beat)
        else:
            yield from self._explore(candidate, to_beat)
        verdict = self.verdicts[candidate]
        if self.best is None or verdict.rank > self.verdicts[self.best].rank:
            self.best = candidate

    def _challenge(self, candidate: Candidate, to_beat: float) -> Steps:
        """Try the rate that beats the best first: most candidates end here."""
        seen = yield self._trial(Purpose.LOAD, candidate, to_beat)
        if self._record(candidate, to_beat, seen):
            top = yield self._trial(Purpose.LOAD, candidate)
            if self.limits.excess(top.figures) <= 1 or top.throughput < to_beat:
                # The throughput all at once is the maximum: a short trial can pass at a higher rate.
                self.verdicts[candidate] = self._at_once(top)
            else:
                yield from self._bisect(candidate, to_beat, top.throughput)

    def _at_once(self, top: TrialResult) -> CandidateResult:
        verdict = self._verdict(math.inf, top)
        if verdict.outcome is Outcome.HOLDS:
            return verdict
        return CandidateResult(Outcome.BEATEN, _unlimited_throughput_text(top), figures=top.figures)

    def _explore(self, candidate: Candidate, to_beat: float) -> Steps:
        """Measure all at once first: an upper bound of the throughput within the limits."""
        known = self._served if candidate == self.space.largest() else None
        top = known or (yield self._trial(Purpose.LOAD, candidate))
        if self._record(candidate, math.inf, top) or top.refused or top.figures.get("failed"):
            return
        if top.throughput < to_beat:
            self.verdicts[candidate] = CandidateResult(
                Outcome.BEATEN, _unlimited_throughput_text(top), figures=top.figures
            )
            return
        if to_beat:
            seen = yield self._trial(Purpose.LOAD, candidate, to_beat)
            holds = self._record(candidate, to_beat, seen)
        else:
            known = self._alone if candidate == self.space.largest() else None
            seen = known or (yield self._trial(Purpose.SINGLE_REQUEST, candidate))
            holds = self.limits.excess(seen.figures) <= 1 or self._record(candidate, 0.0, seen)
        if holds:
            yield from self._bisect(candidate, to_beat, top.throughput)

    def _bisect(self, candidate: Candidate, holds: float, fails: float) -> Steps:
        """Bisect between a rate that holds and one that does not."""
        lowest = max(fails * MIN_RATE_SHARE, holds)
        while fails - holds > RESOLUTION * fails and fails > lowest:
            rate = (holds + fails) / 2
            seen = yield self._trial(Purpose.LOAD, candidate, rate)
            holds, fails = (rate, fails) if self._record(candidate, rate, seen) else (holds, rate)

    def _record(self, candidate: Candidate, rate: float, seen: TrialResult) -> bool:
        """Record a trial and return True if it held; the verdict is the best of the candidate's trials."""
        verdict = self._verdict(rate, seen)
        known = self.verdicts.get(candidate)
        if known is None or verdict.rank > known.rank:
            self.verdicts[candidate] = verdict
        return verdict.outcome is Outcome.HOLDS

    def _verdict(self, rate: float, seen: TrialResult) -> CandidateResult:
        if seen.refused is not None:
            return CandidateResult(Outcome.REFUSED, seen.refused)
        excess, at = self.limits.excess(seen.figures), _rate_text(rate)
        if excess > 1:
            why = f"{at}: {'; '.join(self.limits.violations(seen.figures))}"
            return CandidateResult(Outcome.MISSES, why, rate, 0.0, excess, seen.figures)
        if (
            (served := _served_rate(seen.figures)) is not None
            and served < rate * MIN_COMPLETED_SHARE
            and math.isfinite(rate)
        ):
            why = f"{at}: does not keep up, {served:.3g} requests/s completed"
            return CandidateResult(Outcome.MISSES, why, rate, 0.0, rate / served, seen.figures)
        value = seen.throughput if math.isinf(rate) else rate
        return CandidateResult(Outcome.HOLDS, "meets every limit", rate, value, excess, seen.figures)

    def _trial(self, purpose: Purpose, candidate: Candidate, rate: float = math.inf) -> Trial:
        assert self.utilization is not None  # steps() only continues with a value
        return Trial(purpose, Setting(candidate, self.utilization), rate)

    # --- final trials
    # --------------------------------------------------------------------------------------------------

    def confirm(self) -> Steps:
        """Confirm the best at a rate that holds again."""
        assert self.best is not None
        rate = self.verdicts[self.best].rate
        for _ in range(FINAL_RUNS):
            seen = yield self._trial(Purpose.FINAL, self.best, rate)
            self.final = self._verdict(rate, seen)
            if self.final.outcome is not Outcome.MISSES:
                return
            rate = (seen.throughput if math.isinf(rate) else rate) * FINAL_STEP


def _failure_reason(seen: TrialResult) -> str | None:
    """Return the reason why these values do not work, or None."""
    if seen.refused is not None:
        return seen.refused
    failed = seen.figures.get("failed") or 0
    return f"{failed:g} requests failed" if failed else None


def _unlimited_throughput_text(top: TrialResult) -> str:
    return f"{top.throughput:.3g} requests/s even without limits"


def _rate_text(rate: float) -> str:
    return "all at once" if math.isinf(rate) else f"at {rate:.3g} requests/s" if rate else "one request at a time"


def _served_rate(figures: Figures) -> float | None:
    """Return the completed requests per second during the arrivals; the last ones complete after the last arrival."""
    seconds = (figures.get("duration") or 0.0) - (figures.get("median_e2el_ms") or 0.0) / 1000
    completed = figures.get("completed") or 0.0
    return completed / seconds if completed and seconds > 0 else None


def bounds_of(alone: Figures) -> Bounds:
    """Return bounds from the figures of one request at a time."""
    e2e, gap = alone.get("median_e2el_ms"), alone.get("median_itl_ms")
    completed, known = alone.get("completed") or 0, alone.get(HIT_RATE) or 0.0
    tokens = (alone.get("total_input_tokens") or 0) * (1 - known) + (alone.get("total_output_tokens") or 0)
    return Bounds(e2e and e2e / 1000, gap and gap / 1000, tokens / completed if completed else None)
