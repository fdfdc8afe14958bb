"""What a candidate would do under a load: replicas of the twin, fed with drawn lengths, and what users would feel.

Equal inputs predict alike: arrivals and lengths are drawn evenly and by a fixed seed, so that two candidates differ
only by what they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Values
from dataclasses import dataclass

from trimtab_operator.tuner.load.draws import Draws
from trimtab_operator.tuner.load.lengths import Pair
from trimtab_operator.tuner.objectives import ItlKind, Objectives
from trimtab_operator.tuner.twin import KvBlocks, Sequence, StepCost, TwinEngine, TwinPolicy

LEAST_REQUESTS = 900  # of one prediction, for which it takes some tens of milliseconds
MOST_REQUESTS = 2700
SECONDS = 150.0  # that it covers where so many requests allow: a queue needs time to grow
WARM_UP = 0.2  # share of the requests that only fill the replicas, where they begin empty
SOON_SECONDS = 300.0  # that a prediction covers which begins with what is there: as long as a change is judged
LEAST_SOON = 100  # requests of one
MOST_REPEATS = 6  # with other draws, where few come in so short a time: chance alone would tell candidates apart
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

    @property
    def attainment_error(self) -> float:
        """Standard error of the attainment, by how many requests were drawn."""
        return math.sqrt(self.attainment * (1 - self.attainment) / max(1, self.requests))

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
    """Serve the load at `rate` requests a second with the candidate's replicas, each request where the fewest are.

    `found`: what runs and waits in them at the beginning, and what comes within SOON_SECONDS is judged, time and again
    as far as the load lasts. Without it they begin empty, and what comes after a while is judged.
    A request longer than the KV cache holds is cut to what fits: the engine would have refused it.
    """
    if not found:
        served = _served(candidate, cost, load, range(len(load.pairs)), rate, objectives, found)
        return _judged(served.sequences[int(WARM_UP * len(served.sequences)) :], [served], objectives)
    count = min(len(load.pairs), max(LEAST_SOON, round(rate * SOON_SECONDS)))
    starts = range(0, len(load.pairs) - count + 1, count)[:MOST_REPEATS]
    all_served = [
        _served(candidate, cost, load, range(start, start + count), rate, objectives, found) for start in starts
    ]
    return _judged([sequence for served in all_served for sequence in served.sequences], all_served, objectives)


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
    policy = TwinPolicy(candidate.max_num_seqs, candidate.max_num_batched_tokens, candidate.watermark)
    size = candidate.block_size
    longest = candidate.kv_blocks * size
    engines = [
        TwinEngine(cost, policy, KvBlocks(candidate.kv_blocks, size), slow_gap=objectives.slow_gap)
        for _ in range(candidate.replicas)
    ]
    for index, there in enumerate(found):
        prompt = min(max(1, there.prompt), longest - 1)
        sequence = Sequence(-there.age, prompt, min(max(there.output, there.num_generated + 1), longest - prompt))
        if 0 < there.num_generated < sequence.num_output:
            engines[index % len(engines)].find(sequence, there.num_generated)
        else:
            engines[index % len(engines)].add(sequence)
    now = 0.0
    sequences: list[Sequence] = []
    for index in indices:
        pair = load.pairs[index]
        now += load.gaps[index] / rate
        prompt = min(max(1, pair.prompt - pair.cached), longest - 1)
        sequence = Sequence(now, prompt, min(pair.output, longest - prompt))
        sequences.append(sequence)
        _least_busy(engines, now).add(sequence)
    for engine in engines:
        engine.run_until(now)
    busy = math.fsum(_busy_sequences(engine) for engine in engines)
    for engine in engines:
        engine.drain()
    return _Served(sequences, engines, busy)


def _least_busy(engines: list[TwinEngine], now: float) -> TwinEngine:
    """The replica with the fewest requests; the router, or the kubelet's luck, does no better for long."""
    best, fewest = engines[0], math.inf
    for engine in engines:
        engine.run_until(now)
        count = engine.in_flight(now)
        if count < fewest:
            best, fewest = engine, count
    return best


def _busy_sequences(engine: TwinEngine) -> float:
    """Seconds that sequences spent in steps: sequence-steps times the mean step."""
    sums = engine.counters.sums.values()
    return math.fsum(one.seconds * one.sequences / one.steps for one in sums if one.steps)


def _judged(sequences: list[Sequence], all_served: list[_Served], objectives: Objectives) -> Prediction:
    ttfts: list[float] = []
    means: list[float] = []
    met = on_time = even = gaps = slow = 0
    tokens = 0
    by_tokens = objectives.itl is not None and objectives.itl.kind is ItlKind.TOKENS
    for sequence in sequences:
        ttft, mean = sequence.ttft, sequence.mean_gap
        assert ttft is not None  # all are drained
        ttfts.append(ttft)
        if mean is not None:
            means.append(mean)
        is_met = objectives.is_met(prompt=sequence.num_prompt, ttft=ttft, mean_gap=mean)
        is_on_time = objectives.ttft is None or ttft <= objectives.ttft.limit(sequence.num_prompt)
        is_even = objectives.itl is None or mean is None or mean <= objectives.itl.seconds
        if by_tokens:
            own = sequence.num_output - 1
            gaps += own
            slow += sequence.num_slow_gaps
            assert objectives.itl is not None
            is_met = is_on_time and sequence.num_slow_gaps <= (1 - objectives.itl.share) * own
        met += is_met
        on_time += is_on_time
        even += is_even
        tokens += sequence.num_output
    count = len(sequences)
    ttfts.sort()
    means.sort()
    engines = [engine for served in all_served for engine in served.engines]
    computed = sum(one.tokens for engine in engines for one in engine.counters.sums.values())
    recomputed = sum(engine.counters.recomputed_tokens for engine in engines)
    took = math.fsum(max(engine.now for engine in one.engines) - one.sequences[0].arrival for one in all_served)
    replica_seconds = math.fsum(len(one.engines) * one.seconds for one in all_served)
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
        running=math.fsum(one.busy for one in all_served) / max(1e-9, replica_seconds),
        requests=count,
    )


def _quantile(ordered: list[float], share: float) -> float:
    """A quantile of sorted values; 0 without any."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
