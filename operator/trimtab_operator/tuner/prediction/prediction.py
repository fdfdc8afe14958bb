"""What a candidate would do under a load: replicas of the twin, fed with drawn lengths, and what users would feel.

Equal inputs predict alike: arrivals and lengths are drawn evenly and by a fixed seed, so that two candidates differ
only by what they are. Who sends the requests is one of two: a stream, which comes whatever the engine does, or clients
that wait, of which each sends its next request when it has its answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Values
from dataclasses import dataclass, field, replace

from trimtab_operator.tuner.engine_model import KvBlocks, Sequence, StepCost, TwinEngine, TwinPolicy
from trimtab_operator.tuner.load.draws import Draws
from trimtab_operator.tuner.load.lengths import Pair
from trimtab_operator.tuner.objectives import ItlKind, Objectives

LEAST_REQUESTS = 900  # of one prediction, for which it takes some tens of milliseconds
MOST_REQUESTS = 2700
SECONDS = 150.0  # that it covers where so many requests allow: a queue needs time to grow
WARM_UP = 0.2  # share of the requests that only fill the replicas, where they begin empty
SOON_SECONDS = 300.0  # that a prediction covers which begins with what is there: as long as a change is judged
LEAST_SOON = 100  # requests of one
MOST_REPEATS = 6  # with other draws, where few come in so short a time: chance alone would tell candidates apart
ROUNDS = 3  # of the clients that wait, which a prediction of them serves at least
CHECK_EVERY = 32  # requests that were sent it is looked whether a load fails: most that do are clear before the end
ROUNDING = 1e-9
MODEL_ERROR = 0.05  # of a predicted latency, in the median of what was compared with replays
SEED = 20


@dataclass(frozen=True, slots=True)
class Candidate:
    """What could run: how many replicas, each with which values."""

    replicas: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_blocks: int
    block_size: int = 16
    watermark: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """What comes: lengths as they were drawn for this many requests, and how unevenly they arrive."""

    pairs: tuple[Pair, ...]
    gaps: tuple[float, ...]
    """Times between arrivals, of mean 1."""

    @classmethod
    def drawn(cls, known: Values[Pair], *, variation: float, count: int, seed: int = SEED) -> Load:
        """Spread evenly over what is known, by the work a request is, then shuffled."""
        draws = Draws(seed)
        ordered = sorted(known, key=lambda pair: (pair.prompt - pair.cached + 20 * pair.output, pair.prompt))
        chosen = [ordered[min(len(ordered) - 1, int((i + 0.5) * len(ordered) / count))] for i in range(count)]
        return cls(tuple(draws.shuffled(chosen)), tuple(draws.gaps(count, variation=variation)))


@dataclass(frozen=True, slots=True)
class Found:
    """A request that is there already: how long ago it came, and how far its answer is."""

    age: float
    prompt: int
    output: int
    """As long as the answer may become."""
    num_generated: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """What users of a candidate would feel. Shares are of requests (of gaps, where gaps are promised)."""

    attainment: float
    """Share of the requests that meet every promise."""
    ttft_share: float
    itl_share: float
    ttft_p50: float
    ttft_p95: float
    itl_p50: float
    """The median of the requests' mean gaps, in seconds."""
    itl_p95: float
    recomputed_share: float
    tokens_per_second: float
    running: float
    """Sequences that ran in a replica on average."""
    requests: int
    good_share: float
    """Requests that keep every promise, as a share of those that come now: the attainment, where these come whatever is
    done. Clients that wait send more or fewer of them, and the share may exceed 1."""

    @property
    def attainment_error(self) -> float:
        """Standard error of the attainment, by how many requests were drawn."""
        return math.sqrt(self.attainment * (1 - self.attainment) / max(1, self.requests))

    @property
    def good_error(self) -> float:
        """Standard error of the good share, likewise."""
        return self.attainment_error * self.good_share / self.attainment if self.attainment > 0 else 0.0

    def interval(self, value: float, uncertainty: float) -> tuple[float, float]:
        """Where a predicted latency is expected: the twin's own error and the model's together, two thirds of the time
        within."""
        error = math.hypot(MODEL_ERROR, uncertainty)
        return value * (1 - error), value * (1 + error)

    def keeps(self, objectives: Objectives, *, margin: float = 0.0) -> bool:
        """Whether all promises would be kept, with this share to spare."""
        shares = [(self.attainment, objectives.share)]
        if objectives.ttft is not None:
            shares.append((self.ttft_share, objectives.ttft.share))
        if objectives.itl is not None:
            shares.append((self.itl_share, objectives.itl.share))
        return all(share >= min(1.0, wanted + margin) for share, wanted in shares)


def requests_for(rate: float) -> int:
    """How many requests a prediction at this rate serves, in steps, so that few loads need to be drawn."""
    wanted = min(MOST_REQUESTS, max(LEAST_REQUESTS, rate * SECONDS))
    return LEAST_REQUESTS if wanted < (LEAST_REQUESTS + MOST_REQUESTS) / 2 else MOST_REQUESTS


def predict(
    candidate: Candidate,
    cost: StepCost,
    load: Load,
    rate: float,
    objectives: Objectives,
    found: Values[Found] = (),
) -> Prediction:
    """Serve a stream of `rate` requests a second with the candidate's replicas, each request where the fewest are.

    `found`: what runs and waits in them at the beginning, and what comes within SOON_SECONDS is judged, time and again
    as far as the load lasts. Without it they begin empty, and what comes after a while is judged.
    A request longer than the KV cache holds is cut to what fits: the engine would have refused it.
    """
    if not found:
        served = _served(candidate, cost, load, range(len(load.pairs)), rate, objectives, found)
        return _judged_stream(served.sequences[_warm_up(len(served.sequences)) :], [served], objectives)
    count = min(len(load.pairs), max(LEAST_SOON, round(rate * SOON_SECONDS)))
    starts = range(0, len(load.pairs) - count + 1, count)[:MOST_REPEATS]
    all_served = [
        _served(candidate, cost, load, range(start, start + count), rate, objectives, found) for start in starts
    ]
    return _judged_stream([sequence for served in all_served for sequence in served.sequences], all_served, objectives)


def attains(
    candidate: Candidate, cost: StepCost, load: Load, rate: float, objectives: Objectives, level: float
) -> tuple[bool, int]:
    """Whether predict() would find that `level` of the requests keep their promises, and how many requests were served
    to say so: it ends as soon as too many have broken theirs."""
    fleet = _Fleet(candidate, cost, objectives)
    count = len(load.pairs)
    first = _warm_up(count)
    undecided = _Undecided(objectives)
    for index, at in enumerate(_arrivals(load, range(count), rate)):
        sequence = fleet.send(load.pairs[index], at)
        if index >= first:
            undecided.asked.append(sequence)
        if index % CHECK_EVERY == 0:
            fleet.run_until(at)
            undecided.decide(at)
            if 1 - undecided.missed / (count - first) < level - ROUNDING:
                return False, index + 1
    fleet.drain()
    undecided.decide(math.inf)
    return (count - first - undecided.missed) / (count - first) >= level, count


def predict_clients(
    candidate: Candidate,
    cost: StepCost,
    load: Load,
    rate: float,
    objectives: Objectives,
    found: Values[Found],
) -> Prediction:
    """Serve clients that wait: each of those whose requests are `found` sends its next one when it has its answer.

    Judged is what comes once all of them have begun anew, beside the `rate` at which requests come now.
    """
    fleet = _Fleet(candidate, cost, objectives)
    fleet.place(found)
    wanted = max(len(load.pairs), ROUNDS * len(found))
    ended: list[Sequence] = []
    sent = 0
    while len(ended) < wanted:
        for done in fleet.next_ended():
            assert done.finished_at is not None
            if done.arrival > 0:  # not one of those that were found: nobody knows when their answers began
                ended.append(done)
            fleet.send(load.pairs[sent % len(load.pairs)], done.finished_at)
            sent += 1
    judged = ended[_warm_up(len(ended)) :]
    times = [done.finished_at or 0.0 for done in judged]
    took = max(1e-9, times[-1] - times[0])
    busy = math.fsum(_busy_sequences(engine) for engine in fleet.engines)
    lived = math.fsum(engine.now for engine in fleet.engines)
    prediction = _judged(judged, fleet.engines, objectives, took=took, running=busy / max(1e-9, lived))
    return replace(prediction, good_share=prediction.attainment * (len(judged) - 1) / took / max(1e-9, rate))


def _warm_up(count: int) -> int:
    """How many of so many requests only fill the replicas."""
    return int(WARM_UP * count)


def _arrivals(load: Load, indices: range, rate: float) -> Iterator[float]:
    """When they come."""
    now = 0.0
    for index in indices:
        now += load.gaps[index] / rate
        yield now


class _Fleet:
    """The candidate's replicas while they serve. Requests are sent in the order of time."""

    def __init__(self, candidate: Candidate, cost: StepCost, objectives: Objectives) -> None:
        seats, budget = candidate.max_num_seqs, candidate.max_num_batched_tokens
        policy = TwinPolicy(seats, budget, candidate.watermark, objectives.allowance)
        size = candidate.block_size
        self._longest = candidate.kv_blocks * size
        self.engines = [
            TwinEngine(cost, policy, KvBlocks(candidate.kv_blocks, size), slow_gap=objectives.slow_gap)
            for _ in range(candidate.replicas)
        ]
        self._counts = [0] * candidate.replicas
        self._quiet = [-math.inf] * candidate.replicas
        """Until when each count holds: an engine whose count is known need not be run for an arrival elsewhere."""

    def place(self, found: Values[Found]) -> None:
        """Have them begin with what is found, in turns."""
        for index, there in enumerate(found):
            engine = self.engines[index % len(self.engines)]
            prompt = min(max(1, there.prompt), self._longest - 1)
            output = min(max(there.output, there.num_generated + 1), self._longest - prompt)
            sequence = Sequence(-there.age, prompt, output)
            if 0 < there.num_generated < output:
                engine.find(sequence, there.num_generated)
            else:
                engine.add(sequence)

    def send(self, pair: Pair, at: float) -> Sequence:
        """One more request."""
        prompt = min(max(1, pair.prompt - pair.cached), self._longest - 1)
        sequence = Sequence(at, prompt, min(pair.output, self._longest - prompt))
        index = self._least_busy(at) if len(self.engines) > 1 else 0
        engine = self.engines[index]
        engine.run_until(at)
        engine.add(sequence)
        self._counts[index] += 1
        self._quiet[index] = -math.inf  # it is looked at by the next step
        return sequence

    def _least_busy(self, now: float) -> int:
        """The replica with the fewest requests; the router, or the kubelet's luck, does no better for long."""
        counts, quiet = self._counts, self._quiet
        for index, engine in enumerate(self.engines):
            if quiet[index] > now:
                continue
            engine.run_until(now)
            counts[index] = engine.in_flight(now)
            # What ended in the step that goes on is not known to have ended before that step is over.
            has_ended = counts[index] != engine.in_flight(engine.now)
            quiet[index] = engine.now if has_ended else engine.quiet_until()
        return counts.index(min(counts))

    def next_ended(self) -> list[Sequence]:
        """Let time pass until requests end, and take them, in the order of their ends. Something must be there."""
        while not any(engine.finished for engine in self.engines):
            engine = min(self.engines, key=TwinEngine.quiet_until)
            engine.run_until(math.nextafter(engine.quiet_until(), math.inf))
        ended = [sequence for engine in self.engines for sequence in engine.finished]
        for engine in self.engines:
            engine.finished.clear()
        return sorted(ended, key=lambda sequence: sequence.finished_at or 0.0)

    def run_until(self, at: float) -> None:
        """Let time pass in all of them."""
        for engine in self.engines:
            engine.run_until(at)

    def drain(self) -> None:
        """Serve all that was sent."""
        for engine in self.engines:
            engine.drain()


@dataclass(frozen=True, slots=True)
class _Served:
    """What came of one serving."""

    sequences: list[Sequence]
    """Those that came, in the order of arrival."""
    engines: list[TwinEngine]
    busy: float
    """Seconds that sequences spent in steps by the last arrival."""

    @property
    def seconds(self) -> float:
        """When the last one came; it began at 0."""
        return self.sequences[-1].arrival


def _served(
    candidate: Candidate,
    cost: StepCost,
    load: Load,
    indices: range,
    rate: float,
    objectives: Objectives,
    found: Values[Found],
) -> _Served:
    """Serve a part of the load."""
    fleet = _Fleet(candidate, cost, objectives)
    fleet.place(found)
    times = _arrivals(load, indices, rate)
    sequences = [fleet.send(load.pairs[index], at) for index, at in zip(indices, times, strict=True)]
    fleet.run_until(sequences[-1].arrival)
    busy = math.fsum(_busy_sequences(engine) for engine in fleet.engines)
    fleet.drain()
    return _Served(sequences, fleet.engines, busy)


def _busy_sequences(engine: TwinEngine) -> float:
    """Seconds that sequences spent in steps: sequence-steps times the mean step."""
    sums = engine.counters.sums.values()
    return math.fsum(one.seconds * one.sequences / one.steps for one in sums if one.steps)


@dataclass(slots=True)
class _Undecided:
    """Requests of which it is not known yet whether they keep their promises, and how many are known to break them."""

    objectives: Objectives
    asked: list[Sequence] = field(default_factory=list)
    """Those whose first token has not been seen."""
    answering: list[Sequence] = field(default_factory=list)
    """Those whose first token was in time."""
    missed: int = 0

    def decide(self, now: float) -> None:
        """Look at each that may have been decided since."""
        objectives, asked = self.objectives, self.asked
        ended = [sequence for sequence in self.answering if sequence.finished_at is not None]
        if ended:
            self.answering = [sequence for sequence in self.answering if sequence.finished_at is None]
        self.asked = []
        for sequence in asked:
            if sequence.finished_at is not None:
                ended.append(sequence)
            elif _is_late(sequence, objectives, now):
                self.missed += 1
            else:
                (self.asked if sequence.first_token_at is None else self.answering).append(sequence)
        self.missed += sum(not _is_kept(sequence, objectives) for sequence in ended)


def _is_late(sequence: Sequence, objectives: Objectives, now: float) -> bool:
    """Whether its first token came too late, or has not come and is too late by now."""
    if objectives.ttft is None:
        return False
    ttft = sequence.ttft
    return (now - sequence.arrival if ttft is None else ttft) > objectives.ttft.limit(sequence.num_prompt)


def _is_kept(sequence: Sequence, objectives: Objectives) -> bool:
    """Whether a request that has ended kept every promise."""
    itl = objectives.itl
    if itl is None or itl.kind is not ItlKind.TOKENS:
        return objectives.is_met(prompt=sequence.num_prompt, ttft=sequence.ttft, mean_gap=sequence.mean_gap)
    own = sequence.num_output - 1
    return not _is_late(sequence, objectives, math.inf) and sequence.num_slow_gaps <= (1 - itl.share) * own


def _judged_stream(sequences: list[Sequence], all_served: list[_Served], objectives: Objectives) -> Prediction:
    took = math.fsum(max(engine.now for engine in one.engines) - one.sequences[0].arrival for one in all_served)
    replica_seconds = math.fsum(len(one.engines) * one.seconds for one in all_served)
    running = math.fsum(one.busy for one in all_served) / max(1e-9, replica_seconds)
    engines = [engine for served in all_served for engine in served.engines]
    return _judged(sequences, engines, objectives, took=took, running=running)


def _judged(
    sequences: list[Sequence], engines: list[TwinEngine], objectives: Objectives, *, took: float, running: float
) -> Prediction:
    """What users felt of these requests, all of which have ended."""
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
        met += _is_kept(sequence, objectives)
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
    """A quantile of sorted values; 0 without any."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
