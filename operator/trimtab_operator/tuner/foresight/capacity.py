"""How much load a candidate holds, and what it would do under a given one: predictions kept as long as they hold.

A capacity is the highest rate at which the promises are predicted to be kept by the wanted share of the requests. Of
many replicas it is that of a few, scaled: beyond FEW more of them smooth the load no further that matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trimtab_operator.tuner.foresight.prediction import (
    Candidate,
    Found,
    Load,
    Prediction,
    predict,
    requests_for,
)
from trimtab_operator.tuner.load.lengths import Pair
from trimtab_operator.tuner.objectives import Objectives
from trimtab_operator.tuner.twin import StepCost

FEW = 4  # replicas that are simulated at most
TOLERANCE = 0.03  # of a capacity: bisection ends there
FIRST_STRIDE = 1.15  # from a guess outwards, then ever further
KNOWN_STRIDE = 1.06  # from what it was before the state of knowledge changed
RUNS_AFTER_SHIFT = 12  # predictions in the turn that finds another mix of requests: what was known is wrong
RUNS_PER_TURN = 2  # predictions that may be put off: a turn that makes all of them at once would take seconds
RATE_STEP = 0.02  # rates within this share of each other are predicted once
TYPICAL_BATCH = 32
LEAST_RATE = 1e-4  # requests a second and replica: below that a candidate holds nothing


Find = Callable[[], Sequence[Found]]
"""Asks what runs and waits now."""


class _EnoughForNow(Exception):
    """This turn has computed as much as a turn may."""


@dataclass(slots=True)
class Foresight:
    """Predictions under one state of knowledge: step times, lengths, unevenness, promises.

    It remembers what it has computed, and nothing else: asked the same, it answers the same.
    """

    cost: StepCost
    pairs: tuple[Pair, ...]
    objectives: Objectives
    variation: float = 1.0
    level: float = 0.99
    """Share of the requests that must keep their promises at capacity."""
    guesses: Mapping[Candidate, float] = field(default_factory=dict)
    """Capacities under the state of knowledge before: where to look first."""
    stride: float = KNOWN_STRIDE
    """From a guess outwards at first."""
    find: Find = tuple
    """What runs and waits now, oldest first: where predictions of what users would feel begin. It is asked for once in
    a turn, where at all. Capacities begin with nothing."""
    runs: int = 0
    """Predictions that were computed, for those who watch the time."""
    runs_left: int = RUNS_PER_TURN
    """How many more predictions that may be put off this turn makes."""
    _loads: dict[int, Load] = field(default_factory=dict)
    _predictions: dict[tuple[Candidate, int], Prediction] = field(default_factory=dict)
    _capacities: dict[Candidate, float] = field(default_factory=dict)
    _found: Sequence[Found] | None = None
    _work: tuple[float, float] | None = None
    _attained: dict[tuple[Candidate, float], bool] = field(default_factory=dict)

    def at(self, candidate: Candidate, rate: float) -> Prediction:
        """What its users would feel at so many requests a second in all, from how its replicas are found now."""
        few = self._few(candidate)
        step = round(math.log(max(rate, LEAST_RATE) * few.replicas / candidate.replicas) / math.log1p(RATE_STEP))
        key = (few, step)
        if key not in self._predictions:
            own = math.exp(step * math.log1p(RATE_STEP))
            self._predictions[key] = predict(
                few, self.cost, self._load(own), own, self.objectives, self.found_by(few, candidate)
            )
            self.runs += 1
        return self._predictions[key]

    def begin_turn(self, find: Find = tuple) -> None:
        """Allow some more of the predictions that may be put off; what is found now is found anew."""
        self.runs_left = RUNS_PER_TURN
        self.find, self._found = find, None
        self._predictions.clear()

    def found_by(self, few: Candidate, candidate: Candidate) -> list[Found]:
        """What is found in as many replicas as are simulated: each of them gets as many as it has now."""
        if self._found is None:
            self._found = self.find()
        count = len(self._found) * few.replicas // candidate.replicas
        return [self._found[index * candidate.replicas // few.replicas] for index in range(count)]

    @property
    def capacities(self) -> Mapping[Candidate, float]:
        """What is known so far; what was not searched anew yet is as it was."""
        return {**self.guesses, **self._capacities}

    def capacity(self, candidate: Candidate) -> float:
        """Requests a second that it holds in all.

        Searched for one replica and for FEW; between them what each holds grows as evenness does, by 1 - 1/n.
        """
        count = candidate.replicas
        most = self._searched(replace(candidate, replicas=FEW)) / FEW if count > 1 else 0.0
        if count >= FEW:
            return most * count
        alone = self._searched(replace(candidate, replicas=1))
        return count * (alone + (most - alone) * (1 - 1 / count) / (1 - 1 / FEW))

    def attains_later(self, candidate: Candidate, rate: float) -> bool | None:
        """Whether it holds the rate; None: it is not known yet, and this turn has computed enough. Ask next turn."""
        few = self._few(candidate)
        try:
            return self._attains(few, rate * few.replicas / candidate.replicas, is_urgent=False)
        except _EnoughForNow:
            return None

    def _searched(self, candidate: Candidate) -> float:
        """The capacity; while it is searched anew, over some turns, what it was before."""
        if candidate not in self._capacities:
            try:
                self._capacities[candidate] = self._bisected(candidate)
            except _EnoughForNow:
                return self.guesses[candidate]
        return self._capacities[candidate]

    @property
    def sampling_error(self) -> float:
        """Standard error of a request's mean work, as a share: few pairs may have been short ones by chance."""
        return self._measured_work()[1]

    @property
    def mean_work(self) -> float:
        """What a request costs on average, in seconds of a well-filled replica: a capacity changes as it does, about,
        until it is searched anew."""
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

    def holds(self, candidate: Candidate, rate: float) -> bool:
        """Whether its users' promises are predicted to be kept at that rate by the wanted share."""
        return self.at(candidate, rate).attainment >= self.level

    def needed(self, candidate: Candidate, rate: float, counts: Iterable[int]) -> int | None:
        """The fewest of these replica counts, in rising order, that hold the rate; None: none does."""
        return next((n for n in counts if self.capacity(replace(candidate, replicas=n)) >= rate), None)

    def _few(self, candidate: Candidate) -> Candidate:
        return candidate if candidate.replicas <= FEW else replace(candidate, replicas=FEW)

    def _load(self, rate: float) -> Load:
        count = requests_for(rate)
        if count not in self._loads:
            self._loads[count] = Load.drawn(self.pairs, variation=self.variation, count=count)
        return self._loads[count]

    def _bisected(self, candidate: Candidate) -> float:
        """The highest rate that is held: from a guess outwards, then inwards, in shares. Where nothing is known of it,
        it is searched at once."""
        is_urgent = candidate not in self.guesses

        def holds(rate: float) -> bool:
            return self._attains(candidate, rate, is_urgent=is_urgent)

        low = high = self._guess(candidate)
        stride = self.stride if candidate in self.guesses else FIRST_STRIDE
        if holds(low):
            high = low * stride
            while holds(high):
                stride *= stride
                low, high = high, high * stride
        else:
            while not holds(low):
                high, low = low, low / stride
                stride *= stride
                if low < LEAST_RATE * candidate.replicas:
                    return 0.0
        while high / low > 1 + TOLERANCE:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low

    def _attains(self, candidate: Candidate, rate: float, *, is_urgent: bool) -> bool:
        """Whether it holds the rate. Raises _EnoughForNow where that can wait and this turn has computed enough."""
        key = (candidate, rate)
        if key not in self._attained:
            if self.runs_left <= 0 and not is_urgent:
                raise _EnoughForNow
            self.runs += 1
            self.runs_left -= 1
            prediction = predict(candidate, self.cost, self._load(rate), rate, self.objectives)
            self._attained[key] = prediction.attainment >= self.level
        return self._attained[key]

    def _guess(self, candidate: Candidate) -> float:
        """What it was before; else from the capacity of a cousin with other values; else from the work alone: prompts
        at the prefill's rate, and each token's share of a well-filled step."""
        known = self.guesses.get(candidate)
        if known:
            return known
        cousins = [
            (abs(c.replicas - candidate.replicas), rate / c.replicas) for c, rate in self._capacities.items() if rate
        ]
        if cousins:
            return min(cousins)[1] * candidate.replicas
        cost = self.cost
        prompt, output = self._means()
        seconds = cost.per_token * prompt + output * self._token_seconds(candidate.max_num_seqs) + cost.per_step
        return 0.6 * candidate.replicas / max(seconds, 1e-9)

    def _means(self) -> tuple[float, float]:
        count = max(1, len(self.pairs))
        prompt = sum(pair.prompt - pair.cached for pair in self.pairs) / count
        return prompt, sum(pair.output for pair in self.pairs) / count

    def _token_seconds(self, seats: int = TYPICAL_BATCH) -> float:
        """What one token of an answer costs, its share of a well-filled step."""
        cost = self.cost
        prompt, output = self._means()
        batch = max(1.0, min(seats, TYPICAL_BATCH))
        return cost.per_step / batch + cost.per_token + cost.per_sequence + cost.per_context * (prompt + output / 2)
