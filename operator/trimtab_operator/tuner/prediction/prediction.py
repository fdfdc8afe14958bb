"""Simulation of a candidate under a load: replicas of the engine model, sampled lengths, and the resulting latency.

Equal inputs give equal predictions: arrivals and lengths are spread evenly and drawn with a fixed seed, so that two
candidates differ only in their configuration. Load is either open-loop, which arrives whatever the engine does, or
closed-loop clients, each of which sends its next request when it has received a response.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Values
from dataclasses import dataclass, field, replace

from trimtab_operator.tuner.engine_model import EngineModel, EngineModelPolicy, KvBlocks, Sequence, StepCost
from trimtab_operator.tuner.load.draws import Draws
from trimtab_operator.tuner.load.lengths import Pair
from trimtab_operator.tuner.objectives import ItlKind, Objectives

LEAST_REQUESTS = 900  # per prediction, which takes some tens of milliseconds
MOST_REQUESTS = 2700
SECONDS = 150.0  # that a prediction covers if the number of requests allows: a queue needs time to grow
WARM_UP = 0.2  # share of the requests that only fill empty replicas
SOON_SECONDS = 300.0  # that a prediction with requests in flight covers: the duration of a trial
LEAST_SOON = 100  # requests of one
MOST_REPEATS = 6  # with other samples, because few requests differ by chance
ROUNDS = 3  # minimum requests per closed-loop client
MOST_BUSY = 0.9  # share of the time in which steps compute, for the number in equilibrium
MOST_FULL = 0.95  # of the KV cache, likewise
CLEARLY = 2.0  # standard errors of an attainment beyond which no more requests are simulated
CHECK_EVERY = 32  # requests after which a failing load may end the simulation
ROUNDING = 1e-9
MODEL_ERROR = 0.05  # median relative error of a predicted latency compared with replays
SEED = 20


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration: number of replicas and their values."""

    replicas: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_blocks: int
    block_size: int = 16
    watermark: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """Arrivals: lengths sampled for this number of requests, and their burstiness."""

    pairs: tuple[Pair, ...]
    gaps: tuple[float, ...]
    """Interarrival times of mean 1."""
    sharing: float = 0.0
    """Share of the cached prompt tokens that several running requests hold, so that they take blocks once."""

    @classmethod
    def drawn(
        cls, known: Values[Pair], *, variation: float, count: int, sharing: float = 0.0, seed: int = SEED
    ) -> Load:
        """Return a load spread evenly over the known lengths by their work, then shuffled."""
        draws = Draws(seed)
        ordered = sorted(known, key=lambda pair: (pair.prompt - pair.cached + 20 * pair.output, pair.prompt))
        chosen = [ordered[min(len(ordered) - 1, int((i + 0.5) * len(ordered) / count))] for i in range(count)]
        return cls(tuple(draws.shuffled(chosen)), tuple(draws.gaps(count, variation=variation)), sharing)


@dataclass(frozen=True, slots=True)
class InFlightRequest:
    """A request in flight: its age and its progress."""

    age: float
    prompt: int
    output: int
    """Expected total output tokens."""
    num_generated: int
    cached: int = 0
    """Prompt tokens that were in the prefix cache."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted latency and attainment. Shares are of requests (of gaps, with a token-gap objective)."""

    attainment: float
    """Share of requests that attain every objective."""
    ttft_share: float
    itl_share: float
    ttft_p50: float
    ttft_p95: float
    itl_p50: float
    """Median of the requests' mean gaps, in seconds."""
    itl_p95: float
    recomputed_share: float
    tokens_per_second: float
    running: float
    """Mean number of running sequences per replica."""
    requests: int
    good_share: float
    """Requests that attain every objective, relative to the present arrivals. Equals the attainment for open-loop load;
    closed-loop clients send more or fewer requests, so it may exceed 1."""

    @property
    def attainment_error(self) -> float:
        """Standard error of the attainment, by the number of sampled requests."""
        return math.sqrt(self.attainment * (1 - self.attainment) / max(1, self.requests))

    @property
    def good_error(self) -> float:
        """Standard error of the good share."""
        return self.attainment_error * self.good_share / self.attainment if self.attainment > 0 else 0.0

    def interval(self, value: float, uncertainty: float) -> tuple[float, float]:
        """Return the expected range of a predicted latency, about two thirds confidence: the errors of engine model and
        step-time model.
        """
        error = math.hypot(MODEL_ERROR, uncertainty)
        return value * (1 - error), value * (1 + error)


def requests_for(rate: float) -> int:
    """Return the number of requests to simulate at this rate; only two values, so that few loads are sampled."""
    wanted = min(MOST_REQUESTS, max(LEAST_REQUESTS, rate * SECONDS))
    return LEAST_REQUESTS if wanted < (LEAST_REQUESTS + MOST_REQUESTS) / 2 else MOST_REQUESTS


def predict(
    candidate: Candidate,
    cost: StepCost,
    load: Load,
    rate: float,
    objectives: Objectives,
    found: Values[InFlightRequest] = (),
) -> Prediction:
    """Simulate open-loop load of `rate` requests a second; each request goes to the replica with the fewest.

    `found`: requests in flight at the start. Requests that arrive within SOON_SECONDS are then evaluated, repeatedly as
    far as the load lasts. Without it, replicas start empty, and requests after a warm-up are evaluated. Requests longer
    than the KV cache are cut: the engine would reject them.
    """
    if not found:
        served = _serve(candidate, cost, load, range(len(load.pairs)), rate, objectives, found)
        return _stream_prediction(served.sequences[_warm_up(len(served.sequences)) :], [served], objectives)
    count = min(len(load.pairs), max(LEAST_SOON, round(rate * SOON_SECONDS)))
    starts = range(0, len(load.pairs) - count + 1, count)[:MOST_REPEATS]
    all_served = [
        _serve(candidate, cost, load, range(start, start + count), rate, objectives, found) for start in starts
    ]
    return _stream_prediction(
        [sequence for served in all_served for sequence in served.sequences], all_served, objectives
    )


def attains_after(
    candidate: Candidate,
    cost: StepCost,
    load: Load,
    rate: float,
    objectives: Objectives,
    level: float,
    found: Values[InFlightRequest],
    *,
    seconds: float,
) -> tuple[bool, float]:
    """Return whether `level` of the requests attain the objectives that arrive in the second half of the next
    `seconds`, from the requests in flight on; and the share of those that were simulated. Parts of the load are
    simulated one after another until chance cannot change the answer.
    """
    count = min(len(load.pairs), max(LEAST_SOON, round(rate * seconds)))
    judged = missed = 0
    share = 1.0
    for start in range(0, len(load.pairs) - count + 1, count):
        fleet = _Fleet(candidate, cost, load, objectives)
        fleet.place(found)
        indices = range(start, start + count)
        times = _arrivals(load, indices, rate)
        sequences = [fleet.send(load.pairs[index], at) for index, at in zip(indices, times, strict=True)]
        now = sequences[-1].arrival
        fleet.run_until(now)
        tokens = {one: done for engine in fleet.engines for one, done in engine.unfinished()}
        verdicts = [_is_met_by(one, objectives, tokens.get(one, 0), now) for one in sequences[count // 2 :]]
        judged += sum(verdict is not None for verdict in verdicts)
        missed += sum(verdict is False for verdict in verdicts)
        if not judged:
            continue
        share = 1 - missed / judged
        if abs(share - level) > CLEARLY * math.sqrt(max(share * (1 - share), level * (1 - level)) / judged):
            break
    return share >= level - ROUNDING, share


def attains(
    candidate: Candidate, cost: StepCost, load: Load, rate: float, objectives: Objectives, level: float
) -> tuple[bool, int]:
    """Return whether `level` of the requests attain the objectives in equilibrium, and the number of simulated
    requests. It stops as soon as too many violate them.
    """
    fleet = _Fleet(candidate, cost, load, objectives)
    fleet.place(equilibrium(candidate, cost, load, rate))
    count = len(load.pairs)
    first = _warm_up(count)
    undecided = _Undecided(objectives)
    for index, at in enumerate(_arrivals(load, range(count), rate)):
        sequence = fleet.send(load.pairs[index], at)
        if index >= first:
            undecided.waiting.append(sequence)
        if index % CHECK_EVERY == 0:
            fleet.run_until(at)
            undecided.decide(at)
            if 1 - undecided.missed / (count - first) < level - ROUNDING:
                return False, index + 1
    fleet.drain()
    undecided.decide(math.inf)
    return (count - first - undecided.missed) / (count - first) >= level, count


def equilibrium(candidate: Candidate, cost: StepCost, load: Load, rate: float) -> list[InFlightRequest]:
    """Return requests in flight as in equilibrium at this rate. From empty replicas, long answers would take longer
    than a simulation to fill the KV caches.

    Their number is that of Little's law. A request is found in proportion to its output length, at any point of it.
    """
    pairs, own_rate = load.pairs, rate / candidate.replicas
    outputs = sum(pair.output for pair in pairs)
    context = sum((pair.prompt + pair.output / 2) * pair.output for pair in pairs) / outputs
    computed = sum(pair.prompt - pair.cached for pair in pairs) / len(pairs)
    decode = cost.per_token + cost.per_sequence + (cost.per_context + cost.per_attended) * context
    busy = own_rate * (cost.per_token * computed + decode * outputs / len(pairs))
    gap = cost.per_step / (1 - min(busy, MOST_BUSY))
    fit = min(candidate.max_num_seqs, MOST_FULL * candidate.kv_blocks * candidate.block_size / context)
    count = round(min(own_rate * gap * outputs / len(pairs), fit) * candidate.replicas)
    draws, found, index, before = Draws(SEED), [], 0, 0
    for place in range(count):
        token = int((place + 0.5) * outputs / count)
        while before + pairs[index].output <= token:
            before += pairs[index].output
            index += 1
        pair = pairs[index]
        progress = max(1, token - before)
        found.append(InFlightRequest(progress * gap, pair.prompt, pair.output, progress, pair.cached))
    return draws.shuffled(found)


def predict_clients(
    candidate: Candidate,
    cost: StepCost,
    load: Load,
    rate: float,
    objectives: Objectives,
    found: Values[InFlightRequest],
) -> Prediction:
    """Simulate closed-loop clients: each client of the requests in `found` sends its next one when it has a response.

    Requests after all clients have sent a new one are evaluated, relative to the present `rate`.
    """
    fleet = _Fleet(candidate, cost, load, objectives)
    fleet.place(found)
    wanted = max(len(load.pairs), ROUNDS * len(found))
    ended: list[Sequence] = []
    sent = 0
    while len(ended) < wanted:
        for done in fleet.next_ended():
            assert done.finished_at is not None
            if done.arrival > 0:  # the first token times of the initial requests are unknown
                ended.append(done)
            fleet.send(load.pairs[sent % len(load.pairs)], done.finished_at)
            sent += 1
    judged = ended[_warm_up(len(ended)) :]
    times = [done.finished_at or 0.0 for done in judged]
    took = max(1e-9, times[-1] - times[0])
    busy = math.fsum(_busy_sequences(engine) for engine in fleet.engines)
    lived = math.fsum(engine.now for engine in fleet.engines)
    prediction = _build_prediction(judged, fleet.engines, objectives, took=took, running=busy / max(1e-9, lived))
    return replace(prediction, good_share=prediction.attainment * (len(judged) - 1) / took / max(1e-9, rate))


def _warm_up(count: int) -> int:
    """Return the number of requests that only fill the replicas."""
    return int(WARM_UP * count)


def _arrivals(load: Load, indices: range, rate: float) -> Iterator[float]:
    """Yield arrival times."""
    now = 0.0
    for index in indices:
        now += load.gaps[index] / rate
        yield now


class _Fleet:
    """Simulated replicas of the candidate. Requests must be sent in order of time."""

    def __init__(self, candidate: Candidate, cost: StepCost, load: Load, objectives: Objectives) -> None:
        slots, budget = candidate.max_num_seqs, candidate.max_num_batched_tokens
        policy = EngineModelPolicy(slots, budget, candidate.watermark, objectives.allowance)
        size = candidate.block_size
        self._longest = candidate.kv_blocks * size
        self.engines = [
            EngineModel(
                cost,
                policy,
                KvBlocks(candidate.kv_blocks, size, sharing=load.sharing),
                slow_gap=objectives.slow_gap,
            )
            for _ in range(candidate.replicas)
        ]
        self._counts = [0] * candidate.replicas
        self._quiet = [-math.inf] * candidate.replicas
        """Time until which each count is valid, so that the engine need not be simulated for other arrivals."""

    def place(self, found: Values[InFlightRequest]) -> None:
        """Distribute the requests in flight over the replicas, in turns."""
        for index, there in enumerate(found):
            engine = self.engines[index % len(self.engines)]
            prompt = min(max(1, there.prompt), self._longest - 1)
            output = min(max(there.output, there.num_generated + 1), self._longest - prompt)
            sequence = Sequence(-there.age, prompt, output, num_hit=min(there.cached, prompt - 1))
            if 0 < there.num_generated < output:
                engine.add_in_progress(sequence, there.num_generated)
            else:
                engine.add(sequence)

    def send(self, pair: Pair, at: float) -> Sequence:
        """Send one more request."""
        prompt = min(max(1, pair.prompt), self._longest - 1)
        output = min(pair.output, self._longest - prompt)
        sequence = Sequence(at, prompt, output, num_hit=min(pair.cached, prompt - 1))
        index = self._least_busy(at) if len(self.engines) > 1 else 0
        engine = self.engines[index]
        engine.run_until(at)
        engine.add(sequence)
        self._counts[index] += 1
        self._quiet[index] = -math.inf
        return sequence

    def _least_busy(self, now: float) -> int:
        """Return the replica with the fewest requests; real routers are not clearly better."""
        counts, quiet = self._counts, self._quiet
        for index, engine in enumerate(self.engines):
            if quiet[index] > now:
                continue
            engine.run_until(now)
            counts[index] = engine.in_flight(now)
            # Requests that end in the current step count until that step is over.
            has_ended = counts[index] != engine.in_flight(engine.now)
            quiet[index] = engine.now if has_ended else engine.quiet_until()
        return counts.index(min(counts))

    def next_ended(self) -> list[Sequence]:
        """Advance time until requests end, and return them in order. Requests must be in flight."""
        while not any(engine.finished for engine in self.engines):
            engine = min(self.engines, key=EngineModel.quiet_until)
            engine.run_until(math.nextafter(engine.quiet_until(), math.inf))
        ended = [sequence for engine in self.engines for sequence in engine.finished]
        for engine in self.engines:
            engine.finished.clear()
        return sorted(ended, key=lambda sequence: sequence.finished_at or 0.0)

    def run_until(self, at: float) -> None:
        """Advance time in all replicas."""
        for engine in self.engines:
            engine.run_until(at)

    def drain(self) -> None:
        """Serve all requests that were sent."""
        for engine in self.engines:
            engine.drain()


@dataclass(frozen=True, slots=True)
class _Simulation:
    """Result of one simulation."""

    sequences: list[Sequence]
    """Requests in order of arrival."""
    engines: list[EngineModel]
    busy: float
    """Sequence-seconds in steps until the last arrival."""

    @property
    def seconds(self) -> float:
        """Time of the last arrival; it began at 0."""
        return self.sequences[-1].arrival


def _serve(
    candidate: Candidate,
    cost: StepCost,
    load: Load,
    indices: range,
    rate: float,
    objectives: Objectives,
    found: Values[InFlightRequest],
) -> _Simulation:
    """Simulate a part of the load."""
    fleet = _Fleet(candidate, cost, load, objectives)
    fleet.place(found)
    times = _arrivals(load, indices, rate)
    sequences = [fleet.send(load.pairs[index], at) for index, at in zip(indices, times, strict=True)]
    fleet.run_until(sequences[-1].arrival)
    busy = math.fsum(_busy_sequences(engine) for engine in fleet.engines)
    fleet.drain()
    return _Simulation(sequences, fleet.engines, busy)


def _busy_sequences(engine: EngineModel) -> float:
    """Return sequence-seconds in steps: sequence-steps times the mean step."""
    sums = engine.counters.sums.values()
    return math.fsum(one.seconds * one.sequences / one.steps for one in sums if one.steps)


@dataclass(slots=True)
class _Undecided:
    """Requests whose attainment is still unknown, and the number of known violations."""

    objectives: Objectives
    waiting: list[Sequence] = field(default_factory=list)
    """Requests without a first token."""
    answering: list[Sequence] = field(default_factory=list)
    """Requests whose first token was in time."""
    missed: int = 0

    def decide(self, now: float) -> None:
        """Update requests that may have been decided since."""
        objectives, waiting = self.objectives, self.waiting
        ended = [sequence for sequence in self.answering if sequence.finished_at is not None]
        if ended:
            self.answering = [sequence for sequence in self.answering if sequence.finished_at is None]
        self.waiting = []
        for sequence in waiting:
            if sequence.finished_at is not None:
                ended.append(sequence)
            elif _is_late(sequence, objectives, now):
                self.missed += 1
            else:
                (self.waiting if sequence.first_token_at is None else self.answering).append(sequence)
        self.missed += sum(not _is_met(sequence, objectives) for sequence in ended)


def _is_late(sequence: Sequence, objectives: Objectives, now: float) -> bool:
    """Return True if its first token was too late, or is missing and already too late."""
    if objectives.ttft is None:
        return False
    ttft = sequence.ttft
    return (now - sequence.arrival if ttft is None else ttft) > objectives.ttft.limit(sequence.num_prompt)


def _is_met_by(sequence: Sequence, objectives: Objectives, num_tokens: int, now: float) -> bool | None:
    """Return whether a request attains every objective as far as known at `now`, with this many output tokens; None if
    it waits for its first token and is not late yet.
    """
    if sequence.finished_at is not None:
        return _is_met(sequence, objectives)
    if _is_late(sequence, objectives, now):
        return False
    if sequence.first_token_at is None:
        return None
    itl = objectives.itl
    if itl is None or itl.kind is ItlKind.TOKENS or num_tokens < 2:
        return True
    return (now - sequence.first_token_at) / (num_tokens - 1) <= itl.seconds + ROUNDING


def _is_met(sequence: Sequence, objectives: Objectives) -> bool:
    """Return True if a finished request attained every objective."""
    itl = objectives.itl
    if itl is None or itl.kind is not ItlKind.TOKENS:
        return objectives.is_met(prompt=sequence.num_prompt, ttft=sequence.ttft, mean_gap=sequence.mean_gap)
    own = sequence.num_output - 1
    return not _is_late(sequence, objectives, math.inf) and sequence.num_slow_gaps <= (1 - itl.share) * own


def _stream_prediction(sequences: list[Sequence], all_served: list[_Simulation], objectives: Objectives) -> Prediction:
    took = math.fsum(max(engine.now for engine in one.engines) - one.sequences[0].arrival for one in all_served)
    replica_seconds = math.fsum(len(one.engines) * one.seconds for one in all_served)
    running = math.fsum(one.busy for one in all_served) / max(1e-9, replica_seconds)
    engines = [engine for served in all_served for engine in served.engines]
    return _build_prediction(sequences, engines, objectives, took=took, running=running)


def _build_prediction(
    sequences: list[Sequence], engines: list[EngineModel], objectives: Objectives, *, took: float, running: float
) -> Prediction:
    """Return the prediction from these finished requests."""
    ttfts: list[float] = []
    means: list[float] = []
    met = on_time = even = gaps = slow = 0
    tokens = 0
    by_tokens = objectives.itl is not None and objectives.itl.kind is ItlKind.TOKENS
    for sequence in sequences:
        ttft, mean = sequence.ttft, sequence.mean_gap
        assert ttft is not None
        ttfts.append(ttft)
        if mean is not None:
            means.append(mean)
        if by_tokens:
            gaps += sequence.num_output - 1
            slow += sequence.num_slow_gaps
        met += _is_met(sequence, objectives)
        on_time += not _is_late(sequence, objectives, math.inf)
        even += objectives.itl is None or mean is None or mean <= objectives.itl.seconds
        tokens += sequence.num_output
    count = len(sequences)
    ttfts.sort()
    means.sort()
    computed = sum(one.tokens for engine in engines for one in engine.counters.sums.values())
    recomputed = sum(engine.counters.recomputed_tokens for engine in engines)
    return Prediction(
        attainment=met / count,
        ttft_share=on_time / count,
        itl_share=1 - slow / gaps if by_tokens and gaps else even / count,
        ttft_p50=_quantile(ttfts, 0.5),
        ttft_p95=_quantile(ttfts, 0.95),
        itl_p50=_quantile(means, 0.5),
        itl_p95=_quantile(means, 0.95),
        recomputed_share=recomputed / computed if computed else 0.0,
        tokens_per_second=tokens / max(1e-9, took),
        running=running,
        requests=count,
        good_share=met / count,
    )


def _quantile(ordered: list[float], share: float) -> float:
    """Return a quantile of sorted values; 0 without any."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
