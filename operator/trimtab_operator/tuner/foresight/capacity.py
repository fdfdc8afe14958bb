"""How much load a candidate holds, and what it would do under a given one: predictions kept as long as they hold.

A capacity is the highest rate at which the promises are predicted to be kept by the wanted share of the requests. Of
many replicas it is that of a few, scaled: beyond FEW more of them smooth the load no further that matters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from trimtab_operator.tuner.foresight.prediction import Candidate, Load, Prediction, predict, requests_for
from trimtab_operator.tuner.load.lengths import Pair
from trimtab_operator.tuner.objectives import Objectives
from trimtab_operator.tuner.twin import StepCost

FEW = 4  # replicas that are simulated at most
TOLERANCE = 0.03  # of a capacity: bisection ends there
FIRST_STRIDE = 1.15  # from a guess outwards, then ever further
RATE_STEP = 0.02  # rates within this share of each other are predicted once
LEAST_RATE = 1e-4  # requests a second and replica: below that a candidate holds nothing


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
    runs: int = 0
    """Predictions that were computed, for those who watch the time."""
    _loads: dict[int, Load] = field(default_factory=dict)
    _predictions: dict[tuple[Candidate, int], Prediction] = field(default_factory=dict)
    _capacities: dict[Candidate, float] = field(default_factory=dict)

    def at(self, candidate: Candidate, rate: float) -> Prediction:
        """What its users would feel at so many requests a second in all."""
        few = self._few(candidate)
        step = round(math.log(max(rate, LEAST_RATE) * few.replicas / candidate.replicas) / math.log1p(RATE_STEP))
        key = (few, step)
        if key not in self._predictions:
            own = math.exp(step * math.log1p(RATE_STEP))
            self._predictions[key] = predict(few, self.cost, self._load(own), own, self.objectives)
            self.runs += 1
        return self._predictions[key]

    def capacity(self, candidate: Candidate) -> float:
        """Requests a second that it holds in all."""
        few = self._few(candidate)
        if few not in self._capacities:
            self._capacities[few] = self._bisected(few)
        return self._capacities[few] * candidate.replicas / few.replicas

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
        """The highest rate that is held: from a guess outwards, then inwards, in shares."""
        low = high = self._guess(candidate)
        stride = FIRST_STRIDE
        if self._attains(candidate, low):
            high = low * stride
            while self._attains(candidate, high):
                stride *= stride
                low, high = high, high * stride
        else:
            while not self._attains(candidate, low):
                high, low = low, low / stride
                stride *= stride
                if low < LEAST_RATE * candidate.replicas:
                    return 0.0
        while high / low > 1 + TOLERANCE:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self._attains(candidate, middle) else (low, middle)
        return low

    def _attains(self, candidate: Candidate, rate: float) -> bool:
        self.runs += 1
        return predict(candidate, self.cost, self._load(rate), rate, self.objectives).attainment >= self.level

    def _guess(self, candidate: Candidate) -> float:
        """From the capacity of a cousin with other values; else from the work alone: prompts at the
        prefill's rate, and each token's share of a well-filled step."""
        cousins = [
            (abs(c.replicas - candidate.replicas), rate / c.replicas) for c, rate in self._capacities.items() if rate
        ]
        if cousins:
            return min(cousins)[1] * candidate.replicas
        cost, count = self.cost, max(1, len(self.pairs))
        prompt = sum(pair.prompt - pair.cached for pair in self.pairs) / count
        output = sum(pair.output for pair in self.pairs) / count
        batch = max(1.0, min(candidate.max_num_seqs, 32))
        token = cost.per_step / batch + cost.per_token + cost.per_sequence + cost.per_context * (prompt + output / 2)
        seconds = cost.per_token * prompt + output * token + cost.per_step
        return 0.6 * candidate.replicas / max(seconds, 1e-9)
