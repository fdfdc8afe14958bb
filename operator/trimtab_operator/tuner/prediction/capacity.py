"""Predictions for candidates under a given load, and their capacity; results are cached while their inputs hold.

Replica counts are decided by one question: from the requests in flight on, at this rate, with this many replicas, are
the objectives attained once a new replica could serve (`attains_after`)? Token budgets are compared by their capacity,
the highest rate at which the wanted share of requests attains the objectives in equilibrium. That of many replicas is
extrapolated from a few: beyond FEW replicas, more of them smooth the load no further.

A search for a capacity continues over steps, because one step with all predictions would take seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.load.lengths import Pair, Survival
from trimtab_operator.tuner.objectives import Objectives
from trimtab_operator.tuner.prediction.prediction import (
    Candidate,
    InFlightRequest,
    Load,
    Prediction,
    attains,
    attains_after,
    predict,
    predict_clients,
    requests_for,
)

FEW = 4  # maximum number of simulated replicas
TOLERANCE = 0.03  # of a capacity: bisection ends there
FIRST_STRIDE = 1.15  # first factor outwards from a guess
KNOWN_STRIDE = 1 + TOLERANCE  # from the previous capacity: if it is unchanged, two probes suffice
WORK_PER_STEP = 9000  # requests that a step simulates in searches, plus one prediction: about 150 ms
WORK_AFTER_SHIFT = 12_000  # in the step that detects another mix of requests
WORK_AT_FIRST = 15_000  # in the first step
AHEAD_REQUESTS = 1500  # drawn for the question whether a candidate attains the objectives from here
ANSWER_STEPS = 4  # steps for which an answer is reused, because a simulation takes some tens of milliseconds
ANSWER_MARGIN = 1.05  # factor of the tokens in flight within which an answer is reused
RATE_STEP = 0.02  # rates within this share of each other are predicted once
TYPICAL_BATCH = 32
LEAST_RATE = 1e-4  # requests a second and replica below which the capacity is 0


ReadInFlight = Callable[[], Sequence[InFlightRequest]]
"""Function that returns the requests in flight."""


@dataclass(slots=True)
class Bracket:
    """Search state of one capacity: the highest rate that was held, and the lowest that was not."""

    stride: float
    """Factor to the next rate outwards; it grows."""
    held: float = 0.0
    failed: float = math.inf

    @property
    def is_narrow(self) -> bool:
        """True if the search has ended."""
        return self.failed <= self.held * (1 + TOLERANCE) or self.failed <= LEAST_RATE

    def holds(self, rate: float) -> bool | None:
        """Return True if the rate is held, False if not; None if unknown."""
        if rate <= self.held:
            return True
        return False if rate >= self.failed else None

    def next_rate(self, guess: float) -> float:
        """Return the next rate to probe: outwards from the guess, then inwards by bisection in logarithms."""
        if self.held > 0 and self.failed < math.inf:
            return math.sqrt(self.held * self.failed)
        if self.held > 0:
            return self.held * self.stride
        return guess if self.failed == math.inf else max(self.failed / self.stride, LEAST_RATE)

    def record(self, rate: float, *, is_held: bool) -> None:
        """Record the result of a probe."""
        if is_held:
            self.held = max(self.held, rate)
        else:
            self.failed = min(self.failed, rate)

    def widen(self) -> None:
        """Increase the stride while only one side is known."""
        if (self.held > 0) != (self.failed < math.inf):
            self.stride *= self.stride

    def best(self, guess: float) -> float:
        """Return the best estimate of the capacity."""
        if self.held > 0:
            return max(self.held, min(guess, self.failed / (1 + TOLERANCE)))
        if self.failed == math.inf:
            return guess
        return 0.0 if self.is_narrow else min(guess, self.failed / self.stride)


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer whether a candidate attains the objectives at a rate, from requests in flight with this many tokens on."""

    candidate: Candidate
    rate_step: int
    tokens: int
    is_attained: bool
    share: float
    """Predicted attainment."""
    steps: int

    def decides(self, tokens: int, rate_step: int) -> bool:
        """Return True if it also holds for this load: not harder if attained, not easier otherwise."""
        if self.is_attained:
            return rate_step <= self.rate_step and tokens <= ANSWER_MARGIN * self.tokens
        return rate_step >= self.rate_step and tokens * ANSWER_MARGIN >= self.tokens


@dataclass(slots=True)
class Predictor:
    """Predictions for fixed step times, lengths, dispersion and objectives.

    Deterministic: it only caches what it has computed.
    """

    cost: StepCost
    pairs: tuple[Pair, ...]
    objectives: Objectives
    variation: float = 1.0
    level: float = 0.99
    """Share of requests that must attain the objectives at capacity."""
    sharing: float = 0.0
    """Share of the cached prompt tokens that several running requests hold."""
    guesses: Mapping[Candidate, float] = field(default_factory=dict)
    """Capacities of the previous predictor: where searches start."""
    stride: float = KNOWN_STRIDE
    """First factor outwards from a guess."""
    find: ReadInFlight = tuple
    """Returns the requests in flight, oldest first; predictions start with them. Called at most once per step.
    Capacities start with empty replicas."""
    is_closed_loop: bool = False
    """True if clients are closed-loop; predictions then simulate such clients."""
    runs: int = 0
    """Number of computed predictions, for measurements."""
    work_left: int = WORK_AT_FIRST
    """Requests that this step may still simulate in searches."""
    _loads: dict[int, Load] = field(default_factory=dict)
    _answers: list[Answer] = field(default_factory=list)
    _predictions: dict[tuple[Candidate, int], Prediction] = field(default_factory=dict)
    _brackets: dict[Candidate, Bracket] = field(default_factory=dict)
    _found: Sequence[InFlightRequest] | None = None
    _work: tuple[float, float] | None = None
    _means: tuple[float, float, float] | None = None
    _survival: Survival | None = None

    def at(self, candidate: Candidate, rate: float) -> Prediction:
        """Return the prediction at this total rate, starting with the requests in flight."""
        few = self._few(candidate)
        step = round(math.log(max(rate, LEAST_RATE) * few.replicas / candidate.replicas) / math.log1p(RATE_STEP))
        key = (few, step)
        if key not in self._predictions:
            own = math.exp(step * math.log1p(RATE_STEP))
            found = self.found_by(few, candidate)
            serve = predict_clients if self.is_closed_loop and found else predict
            self._predictions[key] = serve(few, self.cost, self._load(own), own, self.objectives, found)
            self.runs += 1
        return self._predictions[key]

    def attains_after(self, candidate: Candidate, rate: float, seconds: float, level: float) -> Answer:
        """Return whether `level` of the requests attain the objectives that arrive in the second half of the next
        `seconds`, at this total rate and from the requests in flight on. An answer is reused for some steps while load
        and requests in flight are about the same.
        """
        tokens = sum(one.prompt + one.num_generated for one in self._all_found())
        step = self._rate_step(rate)
        for known in reversed(self._answers):
            if known.candidate == candidate and known.decides(tokens, step):
                return known
        few = self._few(candidate)
        own = self._rate_of_step(step) * few.replicas / candidate.replicas
        found = self.found_by(few, candidate)
        if self.is_closed_loop and found:
            share = predict_clients(few, self.cost, self._load(own), own, self.objectives, found).attainment
            is_attained = share >= level
        else:
            is_attained, share = attains_after(
                few, self.cost, self._ahead_load(), own, self.objectives, level, found, seconds=seconds
            )
        self.runs += 1
        answer = Answer(candidate, step, tokens, is_attained, share, ANSWER_STEPS)
        self._answers.append(answer)
        return answer

    def _rate_step(self, rate: float) -> int:
        return round(math.log(max(rate, LEAST_RATE)) / math.log1p(RATE_STEP))

    def _rate_of_step(self, step: int) -> float:
        return math.exp(step * math.log1p(RATE_STEP))

    def _ahead_load(self) -> Load:
        if AHEAD_REQUESTS not in self._loads:
            self._loads[AHEAD_REQUESTS] = Load.drawn(
                self.pairs, variation=self.variation, count=AHEAD_REQUESTS, sharing=self.sharing
            )
        return self._loads[AHEAD_REQUESTS]

    def begin_step(self, find: ReadInFlight = tuple, *, is_closed_loop: bool = False) -> None:
        """Allow more search work, and read the requests in flight again."""
        self.work_left = WORK_PER_STEP
        self.find, self._found, self.is_closed_loop = find, None, is_closed_loop
        self._predictions.clear()
        self._answers = [replace(one, steps=one.steps - 1) for one in self._answers if one.steps > 0]

    def found_by(self, few: Candidate, candidate: Candidate) -> list[InFlightRequest]:
        """Return the requests in flight of as many replicas as are simulated, each with its real share."""
        found = self._all_found()
        count = len(found) * few.replicas // candidate.replicas
        return [found[index * candidate.replicas // few.replicas] for index in range(count)]

    def _all_found(self) -> Sequence[InFlightRequest]:
        if self._found is None:
            self._found = self.find()
        return self._found

    @property
    def capacities(self) -> Mapping[Candidate, float]:
        """Best known capacities; those not searched again keep their guess."""
        return {**self.guesses, **{one: bracket.best(self._guess(one)) for one, bracket in self._brackets.items()}}

    def searched_capacity(self, candidate: Candidate) -> float | None:
        """Return the total rate that it holds in equilibrium; None while it is being searched. More than FEW replicas
        hold as much each.
        """
        few = self._few(candidate)
        capacity = self._searched(few) * candidate.replicas / few.replicas
        return capacity if self._bracket(few).is_narrow else None

    def known_capacity(self, candidate: Candidate) -> float:
        """Return the best known capacity without searching, to order candidates."""
        few = self._few(candidate)
        return self._bracket(few).best(self._guess(few)) * candidate.replicas / few.replicas

    def holds_rate(self, candidate: Candidate, rate: float) -> bool | None:
        """Return True if it holds the rate, False if not; None if unknown and this step's work is used up."""
        few = self._few(candidate)
        own = rate * few.replicas / candidate.replicas
        if self._bracket(few).holds(own) is None and self.work_left > 0:
            self._probe(few, own)
        return self._bracket(few).holds(own)

    @property
    def survival(self) -> Survival:
        """Length distribution of unfinished outputs."""
        if self._survival is None:
            self._survival = Survival.of([pair.output for pair in self.pairs], [])
        return self._survival

    def _searched(self, candidate: Candidate) -> float:
        """Return the capacity after as much search as this step allows."""
        bracket, guess = self._bracket(candidate), self._guess(candidate)
        while not bracket.is_narrow and self.work_left > 0:
            rate = bracket.next_rate(guess)
            if rate != guess:
                bracket.widen()
            self._probe(candidate, rate)
        return bracket.best(guess)

    def _probe(self, candidate: Candidate, rate: float) -> None:
        """Simulate that rate, and record whether it is held."""
        is_held, served = attains(candidate, self.cost, self._load(rate), rate, self.objectives, self.level)
        self._bracket(candidate).record(rate, is_held=is_held)
        self.runs += 1
        self.work_left -= served

    def _bracket(self, candidate: Candidate) -> Bracket:
        if candidate not in self._brackets:
            self._brackets[candidate] = Bracket(self.stride if candidate in self.guesses else FIRST_STRIDE)
        return self._brackets[candidate]

    @property
    def sampling_error(self) -> float:
        """Relative standard error of a request's mean work: few pairs may be short by chance."""
        return self._measured_work()[1]

    @property
    def mean_work(self) -> float:
        """Mean cost of a request, in seconds of a well-filled replica; a capacity changes about inversely."""
        return self._measured_work()[0]

    def _measured_work(self) -> tuple[float, float]:
        if self._work is None:
            self._work = self._work_and_error()
        return self._work

    def _work_and_error(self) -> tuple[float, float]:
        count = len(self.pairs)
        token = self._token_seconds()
        work = [self.cost.per_token * (pair.prompt - pair.cached) + token * pair.output for pair in self.pairs]
        mean = max(math.fsum(work) / max(1, count), 1e-9)
        if count < 2:
            return mean, 1.0
        variance = math.fsum((each - mean) ** 2 for each in work) / (count - 1)
        return mean, math.sqrt(variance / count) / mean

    def _few(self, candidate: Candidate) -> Candidate:
        return candidate if candidate.replicas <= FEW else replace(candidate, replicas=FEW)

    def _load(self, rate: float) -> Load:
        count = requests_for(rate)
        if count not in self._loads:
            self._loads[count] = Load.drawn(self.pairs, variation=self.variation, count=count, sharing=self.sharing)
        return self._loads[count]

    def _guess(self, candidate: Candidate) -> float:
        """Return the previous capacity; else that of another candidate; else an estimate from the work: prompts at the
        prefill rate and each output token's share of a well-filled step.
        """
        known = self.guesses.get(candidate)
        if known:
            return known
        others = [
            (abs(c.replicas - candidate.replicas), bracket.held / c.replicas)
            for c, bracket in self._brackets.items()
            if bracket.held and bracket.is_narrow
        ]
        if others:
            return min(others)[1] * candidate.replicas
        cost = self.cost
        computed, _, output = self._mean_lengths()
        seconds = cost.per_token * computed + output * self._token_seconds(candidate.max_num_seqs) + cost.per_step
        return 0.6 * candidate.replicas / max(seconds, 1e-9)

    def _mean_lengths(self) -> tuple[float, float, float]:
        """Return mean computed prompt tokens, prompt tokens and output tokens."""
        if self._means is None:
            count = max(1, len(self.pairs))
            prompt = sum(pair.prompt for pair in self.pairs) / count
            cached = sum(pair.cached for pair in self.pairs) / count
            self._means = prompt - cached, prompt, sum(pair.output for pair in self.pairs) / count
        return self._means

    @property
    def typical_context(self) -> float:
        """Tokens of a request half-way through its output."""
        _, prompt, output = self._mean_lengths()
        return prompt + output / 2

    def _token_seconds(self, slots: int = TYPICAL_BATCH) -> float:
        """Return the cost of one output token: its share of a well-filled step."""
        cost = self.cost
        batch = max(1.0, min(slots, TYPICAL_BATCH))
        return cost.per_step / batch + cost.per_token + cost.per_sequence + cost.per_context * self.typical_context
