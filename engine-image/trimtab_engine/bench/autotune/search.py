"""Which run to make next, from what the runs before it showed: the guide's script with bisection. Pure.

A search is a generator that yields a Trial and is sent what was Seen. It knows no clock, engine or file: the same
answers lead to the same questions, so a search resumes by being asked again with the answers that are kept.

    memory   the largest utilisation that serves the largest candidate under load, by bisection
    alone    one request at a time: what no candidate can exceed, and whether the limits can be kept at all
    load     per candidate, the highest request rate that keeps the limits: all at once first, then by bisection; where
             another candidate is the best so far, first the rate that would beat it, which most fail in one run
    final    the best once more, with more requests; while it misses a limit, at a lower rate

Candidates are climbed, not swept: from the best so far to neighbours on the grid, in steps that halve.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from enum import Enum

from trimtab_engine.bench.autotune.bounds import Bounds
from trimtab_engine.bench.autotune.limits import HIT_RATE, Figures, Limits
from trimtab_engine.bench.autotune.space import HUNDREDTHS, Candidate, Setting, Space

RESOLUTION = 0.025  # of a rate: bisection ends when it holds here and fails so little above
GAIN = 0.02  # by which a candidate must beat the best so far; less is noise, and not worth a change
KEEPS_UP = 0.95  # of the rate at which requests come: an engine that answers fewer has a queue that grows
NEARLY = 1.1  # times its limit: at a rate that the best holds and a little more, this is no valley
LOWEST_SHARE = 1 / 16  # of what a candidate does at once: a rate below it is not looked for
FINAL_RUNS = 4  # of the best, each at a rate lower by FINAL_STEP
FINAL_STEP = 0.95


class Purpose(Enum):
    """What a run is for; the shell knows by it how many requests to send."""

    MEMORY = "memory"
    ALONE = "alone"
    LOAD = "load"
    FINAL = "final"


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: these values, this many requests a second (infinite: all at once)."""

    purpose: Purpose
    setting: Setting
    rate: float = math.inf


@dataclass(frozen=True, slots=True)
class Seen:
    """What a run showed. `refused`: the engine did not take the values, or ended under them, and why."""

    figures: Figures
    refused: str | None = None

    @property
    def throughput(self) -> float:
        """Requests per second."""
        return self.figures.get("request_throughput") or 0.0


SEATS, BUDGET = (-1, 0), (0, -1)
AROUND = (SEATS, BUDGET, (1, 0), (0, 1), (-1, -1), (1, 1), (-1, 1), (1, -1))
"""Ways on the grid of seats and budgets."""

Steps = Generator[Trial, Seen, None]


class Outcome(Enum):
    """What became of a candidate."""

    HOLDS = "holds"
    MISSES = "misses a limit"
    BEATEN = "does less than the best"
    PRUNED = "skipped"
    REFUSED = "refused"
    NOT_TRIED = "not tried"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`value`: requests per second within the limits; `excess`: how many times its limit the worst figure was."""

    outcome: Outcome
    why: str
    rate: float = 0.0
    value: float = 0.0
    excess: float = math.inf
    figures: Figures = field(default_factory=dict)

    @property
    def rank(self) -> tuple[float, float]:
        """Larger is better: what it does, and where nothing holds, how near it came."""
        return self.value, -self.excess


@dataclass(slots=True)
class Search:
    """A search over a space. Its fields say at any moment what is known: whoever stops early reads them."""

    space: Space
    limits: Limits
    tries_all: bool = False
    """Every candidate that a bound does not exclude, rather than those that a climb meets."""
    utilization: float | None = None
    verdicts: dict[Candidate, Verdict] = field(default_factory=dict)
    best: Candidate | None = None
    final: Verdict | None = None
    """The best once more; its outcome is HOLDS or MISSES."""
    refused: dict[int, str] = field(default_factory=dict)
    """Hundredths of utilisation that do not work, and why."""
    _bounds: Bounds | None = None
    _alone: Seen | None = None
    _served: Seen | None = None
    """The largest candidate at the utilisation that was found, all at once: its first run is made already."""

    def steps(self) -> Steps:
        """The whole search."""
        yield from self.find_utilization()
        if self.utilization is None:
            return
        yield from self.find_candidate()
        if self.best is not None and self.verdicts[self.best].value:
            yield from self.confirm()

    # --- memory ------------------------------------------------------------------------------------------------

    def find_utilization(self) -> Steps:
        """The largest one at which the largest candidate serves all requests; stays None where none does."""
        low, high = self.space.utilization
        works, fails, tried = low - 1, high + 1, high
        while fails - works > 1:
            seen = yield Trial(Purpose.MEMORY, Setting(self.space.largest(), tried / HUNDREDTHS))
            if (reason := _unserved(seen)) is None:
                works, self._served = tried, seen
            else:
                fails, self.refused[tried] = tried, reason
            tried = (works + fails) // 2
        if works >= low:
            self.utilization = works / HUNDREDTHS

    # --- seats and budget --------------------------------------------------------------------------------------

    def find_candidate(self) -> Steps:
        """Fill `verdicts` and `best`."""
        start = self.space.largest()
        self._alone = alone = yield self._trial(Purpose.ALONE, start)
        self._bounds = bounds_of(alone.figures)
        yield from self._judge(start)
        yield from self._sweep() if self.tries_all else self._climb(start)
        for candidate in self.space.candidates():
            self.verdicts.setdefault(candidate, Verdict(Outcome.NOT_TRIED, "it lies beyond candidates that were worse"))

    def _sweep(self) -> Steps:
        for candidate in sorted(self.space.candidates(), reverse=True):
            if candidate not in self.verdicts:
                yield from self._judge(candidate)

    def _climb(self, start: Candidate) -> Steps:
        """Fewer seats with the largest budget, smaller budgets with most seats: what runs at once is bounded by one or
        the other, so one of the two lines has its best. Then around the best so far, while something there is better.
        """
        yield from self._line(start, SEATS)
        yield from self._line(start, BUDGET)
        for candidate in sorted(self.space.candidates()):  # nothing holds where it was looked: look everywhere
            if self.best is not None and not self.verdicts[self.best].value:
                yield from self._judge_new(candidate)
        if self.best is not None and self.limits.latencies:  # then most candidates cost one run, and valleys are common
            yield from self._line(self.best, SEATS)
            yield from self._line(self.best, BUDGET)
        at = None
        while at != self.best and self.best is not None:
            at = self.best
            for way in AROUND:
                if (neighbour := self._from(at, way, 1)) is not None:
                    yield from self._judge_new(neighbour)

    def _line(self, start: Candidate, way: tuple[int, int]) -> Steps:
        """From `start` along a line to its best, in steps that halve. Where the next one is as good, the one after it
        is tried as well: a plateau is no top.
        """
        at, step = start, max(1, (max(len(self.space.seats), len(self.space.budgets)) - 1) // 2)
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
    ) -> Generator[Trial, Seen, Candidate | None]:
        """The first that is better. The walk goes on while what it meets is as good, or misses by less and less."""
        last = math.inf
        for other in self._ahead(at, way, distance):
            yield from self._judge_new(other)
            verdict = self.verdicts[other]
            if verdict.rank > self.verdicts[at].rank:
                return other
            comes_nearer = verdict.outcome is Outcome.MISSES and verdict.excess <= last
            if abs(distance) == 1 or not (comes_nearer or self._is_as_good(other, at)):
                return None
            last = verdict.excess
        return None

    def _ahead(self, at: Candidate, way: tuple[int, int], distance: int) -> list[Candidate]:
        """Every so many candidates from `at`, and the last one."""
        one = 1 if distance > 0 else -1
        line: list[Candidate] = []
        while (other := self._from(at, way, one * (len(line) + 1))) is not None:
            line.append(other)
        taken = line[abs(distance) - 1 :: abs(distance)]
        return taken if not line or line[-1] in taken else [*taken, line[-1]]

    def _judge_new(self, candidate: Candidate) -> Steps:
        if candidate not in self.verdicts:
            yield from self._judge(candidate)

    def _is_as_good(self, one: Candidate, other: Candidate) -> bool:
        """Within what counts as a gain, or all but within the limits at a rate that the other one holds."""
        verdict, known = self.verdicts[one], self.verdicts[other]
        if known.value == 0:
            return verdict.outcome is Outcome.MISSES and verdict.excess <= known.excess * (1 + GAIN)
        return verdict.value * (1 + GAIN) >= known.value or (
            verdict.outcome is Outcome.MISSES and verdict.excess <= NEARLY
        )

    def _from(self, at: Candidate, way: tuple[int, int], distance: int) -> Candidate | None:
        """The candidate so far away on the grid; None: there is none."""
        seats, budgets = self.space.seats, self.space.budgets
        s = seats.index(at.max_num_seqs) + way[0] * distance
        b = budgets.index(at.max_num_batched_tokens) + way[1] * distance
        if not (0 <= s < len(seats) and 0 <= b < len(budgets)) or budgets[b] < seats[s]:
            return None
        return Candidate(seats[s], budgets[b])

    # --- one candidate -----------------------------------------------------------------------------------------

    def _judge(self, candidate: Candidate) -> Steps:
        """Its verdict, by as few runs as tell whether it beats the best, and how far."""
        best = self.verdicts[self.best] if self.best is not None else None
        to_beat = best.value * (1 + GAIN) if best else 0.0
        bound = self._bounds.of(candidate) if self._bounds else None
        if bound and bound[0] < to_beat:
            why = f"at most {bound[0]:.3g} requests/s ({bound[1]}), the best has {best.value if best else 0:.3g}"
            self.verdicts[candidate] = Verdict(Outcome.PRUNED, why)
            return
        if best and best.value and math.isfinite(best.rate):
            yield from self._challenge(candidate, to_beat)
        else:
            yield from self._explore(candidate, to_beat)
        verdict = self.verdicts[candidate]
        if self.best is None or verdict.rank > self.verdicts[self.best].rank:
            self.best = candidate

    def _challenge(self, candidate: Candidate, to_beat: float) -> Steps:
        """First at the rate that beats the best: most candidates end here."""
        seen = yield self._trial(Purpose.LOAD, candidate, to_beat)
        if self._note(candidate, to_beat, seen):
            top = yield self._trial(Purpose.LOAD, candidate)
            if self.limits.excess(top.figures) <= 1 or top.throughput < to_beat:
                # What it does at once is what it does: a short run outlives a rate beyond it.
                self.verdicts[candidate] = self._at_once(top)
            else:
                yield from self._bisect(candidate, to_beat, top.throughput)

    def _at_once(self, top: Seen) -> Verdict:
        verdict = self._verdict(math.inf, top)
        if verdict.outcome is Outcome.HOLDS:
            return verdict
        return Verdict(Outcome.BEATEN, _even_so(top), figures=top.figures)

    def _explore(self, candidate: Candidate, to_beat: float) -> Steps:
        """First all at once: what it does then bounds what it does within the limits."""
        known = self._served if candidate == self.space.largest() else None
        top = known or (yield self._trial(Purpose.LOAD, candidate))
        if self._note(candidate, math.inf, top) or top.refused or top.figures.get("failed"):
            return
        if top.throughput < to_beat:
            self.verdicts[candidate] = Verdict(Outcome.BEATEN, _even_so(top), figures=top.figures)
            return
        if to_beat:
            seen = yield self._trial(Purpose.LOAD, candidate, to_beat)
            holds = self._note(candidate, to_beat, seen)
        else:
            known = self._alone if candidate == self.space.largest() else None
            seen = known or (yield self._trial(Purpose.ALONE, candidate))
            holds = self.limits.excess(seen.figures) <= 1 or self._note(candidate, 0.0, seen)
        if holds:
            yield from self._bisect(candidate, to_beat, top.throughput)

    def _bisect(self, candidate: Candidate, holds: float, fails: float) -> Steps:
        """Between a rate that holds and one that does not."""
        lowest = max(fails * LOWEST_SHARE, holds)
        while fails - holds > RESOLUTION * fails and fails > lowest:
            rate = (holds + fails) / 2
            seen = yield self._trial(Purpose.LOAD, candidate, rate)
            holds, fails = (rate, fails) if self._note(candidate, rate, seen) else (holds, rate)

    def _note(self, candidate: Candidate, rate: float, seen: Seen) -> bool:
        """Whether the run held; the verdict is the best of the candidate's runs."""
        verdict = self._verdict(rate, seen)
        known = self.verdicts.get(candidate)
        if known is None or verdict.rank > known.rank:
            self.verdicts[candidate] = verdict
        return verdict.outcome is Outcome.HOLDS

    def _verdict(self, rate: float, seen: Seen) -> Verdict:
        if seen.refused is not None:
            return Verdict(Outcome.REFUSED, seen.refused)
        excess, at = self.limits.excess(seen.figures), _at(rate)
        if excess > 1:
            why = f"{at}: {'; '.join(self.limits.misses(seen.figures))}"
            return Verdict(Outcome.MISSES, why, rate, 0.0, excess, seen.figures)
        if (served := _served_rate(seen.figures)) is not None and served < rate * KEEPS_UP and math.isfinite(rate):
            why = f"{at}: it does not keep up, {served:.3g} are answered"
            return Verdict(Outcome.MISSES, why, rate, 0.0, rate / served, seen.figures)
        value = seen.throughput if math.isinf(rate) else rate
        return Verdict(Outcome.HOLDS, "keeps every limit", rate, value, excess, seen.figures)

    def _trial(self, purpose: Purpose, candidate: Candidate, rate: float = math.inf) -> Trial:
        assert self.utilization is not None  # steps() goes on only with one
        return Trial(purpose, Setting(candidate, self.utilization), rate)

    # --- the best once more ------------------------------------------------------------------------------------

    def confirm(self) -> Steps:
        """The final profile, at a rate that holds once more."""
        assert self.best is not None
        rate = self.verdicts[self.best].rate
        for _ in range(FINAL_RUNS):
            seen = yield self._trial(Purpose.FINAL, self.best, rate)
            self.final = self._verdict(rate, seen)
            if self.final.outcome is not Outcome.MISSES:
                return
            rate = (seen.throughput if math.isinf(rate) else rate) * FINAL_STEP


def _unserved(seen: Seen) -> str | None:
    """Why these values do not work at all; None: they do."""
    if seen.refused is not None:
        return seen.refused
    failed = seen.figures.get("failed") or 0
    return f"{failed:g} requests failed" if failed else None


def _even_so(top: Seen) -> str:
    return f"{top.throughput:.3g} requests/s even beyond the limits"


def _at(rate: float) -> str:
    return "all at once" if math.isinf(rate) else f"at {rate:.3g} requests/s" if rate else "one request alone"


def _served_rate(figures: Figures) -> float | None:
    """Requests answered per second while requests came: the last ones are answered after the last has come."""
    seconds = (figures.get("duration") or 0.0) - (figures.get("median_e2el_ms") or 0.0) / 1000
    completed = figures.get("completed") or 0.0
    return completed / seconds if completed and seconds > 0 else None


def bounds_of(alone: Figures) -> Bounds:
    """From figures of one request at a time."""
    e2e, gap = alone.get("median_e2el_ms"), alone.get("median_itl_ms")
    completed, known = alone.get("completed") or 0, alone.get(HIT_RATE) or 0.0
    tokens = (alone.get("total_input_tokens") or 0) * (1 - known) + (alone.get("total_output_tokens") or 0)
    return Bounds(e2e and e2e / 1000, gap and gap / 1000, tokens / completed if completed else None)
