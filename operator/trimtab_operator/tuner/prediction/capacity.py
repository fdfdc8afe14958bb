"""How much load a candidate holds, and what it would do under a given one: predictions kept as long as they hold.

A capacity is the highest rate at which the promises are predicted to be kept by the wanted share of the requests. Of
many replicas it is that of a few, scaled: beyond FEW more of them smooth the load no further that matters.

A search goes on from look to look, as a turn that made all predictions at once would take seconds: until it has ended,
the best that is known of a capacity is told, and rules that need it whole wait for it.
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
    Found,
    Load,
    Prediction,
    attains,
    predict,
    predict_clients,
    requests_for,
)

FEW = 4  # replicas that are simulated at most
TOLERANCE = 0.03  # of a capacity: bisection ends there
FIRST_STRIDE = 1.15  # from a guess outwards, then ever further
KNOWN_STRIDE = 1 + TOLERANCE  # from what it was before the state of knowledge changed: where it still is, two looks do
WORK_PER_TURN = 9000  # requests that a turn serves in its searches, and one prediction more: some 150 ms
WORK_AFTER_SHIFT = 12_000  # in the turn that finds another mix of requests: what was known is wrong
WORK_AT_FIRST = 15_000  # in the turn that searches first: nothing is known
KEPT_LOOKS = 2  # more, for which it holds that promises are kept from here, while no more is there and comes
KEPT_MARGIN = 1.05  # times as much is no more: between two looks requests come and end
RATE_STEP = 0.02  # rates within this share of each other are predicted once
BELIEF_PAIRS = 300  # lengths that what was believed before counts as
TYPICAL_BATCH = 32
LEAST_RATE = 1e-4  # requests a second and replica: below that a candidate holds nothing


Find = Callable[[], Sequence[Found]]
"""Asks what runs and waits now."""


@dataclass(slots=True)
class Bracket:
    """What is known of one capacity: the highest rate that was seen to be held, and the lowest that was not."""

    stride: float
    """To the next rate outwards; it grows."""
    held: float = 0.0
    failed: float = math.inf

    @property
    def is_narrow(self) -> bool:
        """Whether the search has ended."""
        return self.failed <= self.held * (1 + TOLERANCE) or self.failed <= LEAST_RATE

    def holds_load(self, rate: float) -> bool | None:
        """Whether the rate is held; None: it is not known yet."""
        if rate <= self.held:
            return True
        return False if rate >= self.failed else None

    def next_rate(self, guess: float) -> float:
        """Which rate to look at: from the guess outwards, then inwards, in shares."""
        if self.held > 0 and self.failed < math.inf:
            return math.sqrt(self.held * self.failed)
        if self.held > 0:
            return self.held * self.stride
        return guess if self.failed == math.inf else max(self.failed / self.stride, LEAST_RATE)

    def told(self, rate: float, *, is_held: bool) -> None:
        """Learn what came of a rate."""
        if is_held:
            self.held = max(self.held, rate)
        else:
            self.failed = min(self.failed, rate)

    def widened(self) -> None:
        """Go further outwards the next time, where only one side is known."""
        if (self.held > 0) != (self.failed < math.inf):
            self.stride *= self.stride

    def best(self, guess: float) -> float:
        """The capacity, as far as it is known."""
        if self.held > 0:
            return max(self.held, min(guess, self.failed / (1 + TOLERANCE)))
        if self.failed == math.inf:
            return guess
        return 0.0 if self.is_narrow else min(guess, self.failed / self.stride)


@dataclass(frozen=True, slots=True)
class KeptFromHere:
    """A prediction that promises are kept from here: how much was there and came, and for how long it is believed."""

    tokens: int
    """In the KV caches, or to come there from the queue."""
    rate: float
    looks: int

    def covers(self, tokens: int, rate: float) -> bool:
        """Whether no more is there, and comes, than what would be served in time."""
        return tokens <= KEPT_MARGIN * self.tokens and rate <= KEPT_MARGIN * self.rate


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
    before: Mapping[Candidate, float] = field(default_factory=dict)
    """What was believed of capacities before, changed as the mean work of a request has."""
    stride: float = KNOWN_STRIDE
    """From a guess outwards at first."""
    find: Find = tuple
    """What runs and waits now, oldest first: where predictions of what users would feel begin. It is asked for once in
    a turn, where at all. Capacities begin with nothing."""
    clients_wait: bool = False
    """Whether those who send what is found wait for their answers: predictions of what they feel are then of them."""
    runs: int = 0
    """Predictions that were computed, for those who watch the time."""
    work_left: int = WORK_AT_FIRST
    """How many more requests this turn serves in its searches."""
    _loads: dict[int, Load] = field(default_factory=dict)
    _predictions: dict[tuple[Candidate, int], Prediction] = field(default_factory=dict)
    _kept: dict[Candidate, KeptFromHere] = field(default_factory=dict)
    _brackets: dict[Candidate, Bracket] = field(default_factory=dict)
    _found: Sequence[Found] | None = None
    _work: tuple[float, float] | None = None
    _means: tuple[float, float] | None = None
    _survival: Survival | None = None

    def at(self, candidate: Candidate, rate: float) -> Prediction:
        """What its users would feel at so many requests a second in all, from how its replicas are found now."""
        few = self._few(candidate)
        step = round(math.log(max(rate, LEAST_RATE) * few.replicas / candidate.replicas) / math.log1p(RATE_STEP))
        key = (few, step)
        if key not in self._predictions:
            own = math.exp(step * math.log1p(RATE_STEP))
            found = self.found_by(few, candidate)
            serve = predict_clients if self.clients_wait and found else predict
            self._predictions[key] = serve(few, self.cost, self._load(own), own, self.objectives, found)
            self.runs += 1
        return self._predictions[key]

    def keeps(self, candidate: Candidate, rate: float) -> bool:
        """Whether the wanted share of the requests would keep their promises from here. That it would is believed for
        some looks more, while no more is there and comes: caches that stay nearly full are not served at each look."""
        tokens = sum(one.prompt + one.num_generated for one in self._all_found())
        known = self._kept.get(candidate)
        if known is not None and known.covers(tokens, rate):
            return True
        is_kept = self.at(candidate, rate).attainment >= self.level
        if is_kept:
            self._kept[candidate] = KeptFromHere(tokens, rate, KEPT_LOOKS)
        return is_kept

    def begin_turn(self, find: Find = tuple, *, clients_wait: bool = False) -> None:
        """Allow some more of the predictions that may be put off; what is found now is found anew."""
        self.work_left = WORK_PER_TURN
        self.find, self._found, self.clients_wait = find, None, clients_wait
        self._predictions.clear()
        self._kept = {one: replace(kept, looks=kept.looks - 1) for one, kept in self._kept.items() if kept.looks > 0}

    def found_by(self, few: Candidate, candidate: Candidate) -> list[Found]:
        """What is found in as many replicas as are simulated: each of them gets as many as it has now."""
        found = self._all_found()
        count = len(found) * few.replicas // candidate.replicas
        return [found[index * candidate.replicas // few.replicas] for index in range(count)]

    def _all_found(self) -> Sequence[Found]:
        if self._found is None:
            self._found = self.find()
        return self._found

    @property
    def capacities(self) -> Mapping[Candidate, float]:
        """What is known so far; what was not searched anew yet is as it was."""
        return {**self.guesses, **{one: bracket.best(self._guess(one)) for one, bracket in self._brackets.items()}}

    def capacity(self, candidate: Candidate) -> float:
        """Requests a second that it holds in all, as far as it is known.

        Searched for one replica and for FEW; between them what each holds grows as evenness does, by 1 - 1/n.
        """
        return self._between(candidate, self._searched)

    def believed(self, candidate: Candidate) -> float:
        """The capacity, as far as few lengths can tell: of 300 requests three decide what 99 % of them feel. What was
        believed before counts beside them."""

        def both(one: Candidate) -> float:
            return self._beside_before(one, self._searched(one))

        return self._between(candidate, both)

    def beliefs(self) -> Mapping[Candidate, float]:
        """What is believed of each capacity that was asked for."""
        return {one: self._beside_before(one, rate) for one, rate in self.capacities.items()}

    def _beside_before(self, candidate: Candidate, rate: float) -> float:
        before, count = self.before.get(candidate, 0.0), len(self.pairs)
        if before <= 0 or rate <= 0:
            return rate
        own = count / (count + BELIEF_PAIRS)
        return math.exp(own * math.log(rate) + (1 - own) * math.log(before))

    def _between(self, candidate: Candidate, capacity: Callable[[Candidate], float]) -> float:
        count = candidate.replicas
        most = capacity(replace(candidate, replicas=FEW)) / FEW if count > 1 else 0.0
        if count >= FEW:
            return most * count
        alone = capacity(replace(candidate, replicas=1))
        return count * (alone + (most - alone) * (1 - 1 / count) / (1 - 1 / FEW))

    def capacity_later(self, candidate: Candidate) -> float | None:
        """The capacity; None as long as it is searched: ask next turn."""
        capacity, count = self.capacity(candidate), candidate.replicas
        searched = {FEW} if count >= FEW else {1} if count == 1 else {1, FEW}
        if all(self._bracket(replace(candidate, replicas=n)).is_narrow for n in searched):
            return capacity
        return None

    def as_known(self, candidate: Candidate) -> float:
        """The capacity as it is known without any search: for the order in which candidates are looked at."""
        few = self._few(candidate)
        return self._bracket(few).best(self._guess(few)) * candidate.replicas / few.replicas

    def attains_later(self, candidate: Candidate, rate: float) -> bool | None:
        """Whether it holds the rate; None: it is not known yet, and this turn has computed enough. Ask next turn."""
        few = self._few(candidate)
        own = rate * few.replicas / candidate.replicas
        if self._bracket(few).holds_load(own) is None and self.work_left > 0:
            self._look_at(few, own)
        return self._bracket(few).holds_load(own)

    @property
    def survival(self) -> Survival:
        """How long answers are that go on."""
        if self._survival is None:
            self._survival = Survival.of([pair.output for pair in self.pairs], [])
        return self._survival

    def _searched(self, candidate: Candidate) -> float:
        """The capacity, after as much search as this turn has left for it."""
        bracket, guess = self._bracket(candidate), self._guess(candidate)
        while not bracket.is_narrow and self.work_left > 0:
            rate = bracket.next_rate(guess)
            if rate != guess:
                bracket.widened()
            self._look_at(candidate, rate)
        return bracket.best(guess)

    def _look_at(self, candidate: Candidate, rate: float) -> None:
        """Serve that rate, and learn whether it is held."""
        is_held, served = attains(candidate, self.cost, self._load(rate), rate, self.objectives, self.level)
        self._bracket(candidate).told(rate, is_held=is_held)
        self.runs += 1
        self.work_left -= served

    def _bracket(self, candidate: Candidate) -> Bracket:
        if candidate not in self._brackets:
            self._brackets[candidate] = Bracket(self.stride if candidate in self.guesses else FIRST_STRIDE)
        return self._brackets[candidate]

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

    def _few(self, candidate: Candidate) -> Candidate:
        return candidate if candidate.replicas <= FEW else replace(candidate, replicas=FEW)

    def _load(self, rate: float) -> Load:
        count = requests_for(rate)
        if count not in self._loads:
            self._loads[count] = Load.drawn(self.pairs, variation=self.variation, count=count)
        return self._loads[count]

    def _guess(self, candidate: Candidate) -> float:
        """What it was before; else from the capacity of a cousin with other values; else from the work alone: prompts
        at the prefill's rate, and each token's share of a well-filled step."""
        known = self.guesses.get(candidate)
        if known:
            return known
        cousins = [
            (abs(c.replicas - candidate.replicas), bracket.held / c.replicas)
            for c, bracket in self._brackets.items()
            if bracket.held and bracket.is_narrow
        ]
        if cousins:
            return min(cousins)[1] * candidate.replicas
        cost = self.cost
        prompt, output = self._mean_lengths()
        seconds = cost.per_token * prompt + output * self._token_seconds(candidate.max_num_seqs) + cost.per_step
        return 0.6 * candidate.replicas / max(seconds, 1e-9)

    def _mean_lengths(self) -> tuple[float, float]:
        """Of prompts as they are computed, and of answers."""
        if self._means is None:
            count = max(1, len(self.pairs))
            prompt = sum(pair.prompt - pair.cached for pair in self.pairs) / count
            self._means = prompt, sum(pair.output for pair in self.pairs) / count
        return self._means

    @property
    def typical_context(self) -> float:
        """Tokens of a request half-way through its answer."""
        prompt, output = self._mean_lengths()
        return prompt + output / 2

    def _token_seconds(self, seats: int = TYPICAL_BATCH) -> float:
        """What one token of an answer costs, its share of a well-filled step."""
        cost = self.cost
        prompt, output = self._mean_lengths()
        batch = max(1.0, min(seats, TYPICAL_BATCH))
        return cost.per_step / batch + cost.per_token + cost.per_sequence + cost.per_context * (prompt + output / 2)
