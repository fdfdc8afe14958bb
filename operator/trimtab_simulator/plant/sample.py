"""What one scrape of one replica says: the counters, gauges and histograms that the engine exports, and its request log.

The names follow docs/contract.md: step sums are `trimtab_step_*{kind}`, rows are those of `GET /admin/v1/requests`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from trimtab_operator.tuner.twin import Gaps, Sequence, StepSums, TwinEngine
from trimtab_operator.tuner.twin.gaps import fine_edges
from trimtab_simulator.plant.replica import Phase, Replica

TTFT_EDGES = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_EDGES = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
GAP_EDGES = fine_edges(ITL_EDGES)


class FinishedRow(NamedTuple):
    """One request that ended since the scrape before, in seconds and tokens; ages count from the scrape back."""

    age_seconds: float
    e2e_seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_seconds: float
    decode_seconds: float
    preemptions: int


class UnfinishedRow(NamedTuple):
    """One request that runs or waits."""

    age_seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulated counts, as Prometheus has them: `at_most[i]` is how many were at most `edges[i]`."""

    edges: tuple[float, ...]
    at_most: tuple[int, ...]
    count: int
    total: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One scrape. Counters are since the engine started."""

    at: float
    instance: str
    running: int
    waiting: int
    waiting_tokens: int
    oldest_waiting_seconds: float
    blocks_total: int
    blocks_used: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    watermark: float
    gpu_memory_utilization: float
    steps: Mapping[str, StepSums]
    """By kind: prefill, decode, mixed."""
    arrived_requests_total: int
    arrived_prompt_tokens_total: int
    prompt_tokens_total: int
    cached_prompt_tokens_total: int
    generation_tokens_total: int
    finished_requests_total: int
    recomputed_tokens_total: int
    preempted_requests_total: Mapping[str, int]
    """By reason: capacity, resize."""
    blocked_seconds_total: Mapping[str, float]
    """By reason: kv, seqs, tokens."""
    ttft: Histogram
    itl: Histogram
    finished: tuple[FinishedRow, ...]
    unfinished: tuple[UnfinishedRow, ...]

    @property
    def kv_usage(self) -> float:
        """Part of the KV blocks that requests hold."""
        return self.blocks_used / self.blocks_total


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica as a policy sees it. `sample` is None where it is not ready, or was not at the last scrape."""

    name: str
    phase: Phase
    ready_at: float
    """When it became ready, or is expected to."""
    sample: Sample | None


class Scraper:
    """Makes samples of one replica; remembers what earlier ones have told."""

    def __init__(self) -> None:
        self._ttft = [0] * (len(TTFT_EDGES) + 1)
        self._ttft_total = 0.0

    def take(
        self, replica: Replica, at: float, utilization: float, finished: list[Sequence], first_tokens: list[Sequence]
    ) -> Sample:
        """A sample at `at`; the lists are what happened since the sample before."""
        engine = replica.engine
        counters, policy, blocks = engine.counters, engine.policy, engine.blocks
        self._note(first_tokens)
        oldest = engine.oldest_arrival
        return Sample(
            at=at,
            instance=replica.name,
            running=engine.num_running,
            waiting=engine.num_waiting,
            waiting_tokens=engine.waiting_tokens,
            oldest_waiting_seconds=0.0 if oldest is None else max(0.0, at - oldest),
            blocks_total=blocks.total,
            blocks_used=blocks.total - blocks.free,
            block_size=blocks.block_size,
            max_num_seqs=policy.max_num_seqs,
            max_num_batched_tokens=policy.max_num_batched_tokens,
            watermark=policy.watermark,
            gpu_memory_utilization=utilization,
            steps={kind: _copy(sums) for kind, sums in counters.sums.items()},
            arrived_requests_total=counters.arrived,
            arrived_prompt_tokens_total=counters.arrived_prompt_tokens,
            prompt_tokens_total=counters.prompt_tokens,
            cached_prompt_tokens_total=counters.cached_prompt_tokens,
            generation_tokens_total=counters.generated_tokens,
            finished_requests_total=counters.finished,
            recomputed_tokens_total=counters.recomputed_tokens,
            preempted_requests_total=dict(counters.preempted),
            blocked_seconds_total=dict(counters.blocked_seconds),
            ttft=_histogram(TTFT_EDGES, self._ttft, self._ttft_total),
            itl=_gap_histogram(engine),
            finished=tuple(_row(sequence, at) for sequence in finished),
            unfinished=tuple(
                UnfinishedRow(at - sequence.arrival, sequence.num_prompt, sequence.num_cached, num_out)
                for sequence, num_out in engine.unfinished()
            ),
        )

    def _note(self, first_tokens: list[Sequence]) -> None:
        for sequence in first_tokens:
            seconds = sequence.ttft
            assert seconds is not None
            bucket = next((i for i, edge in enumerate(TTFT_EDGES) if seconds <= edge), len(TTFT_EDGES))
            self._ttft[bucket] += 1
            self._ttft_total += seconds


def _copy(sums: StepSums) -> StepSums:
    return StepSums(sums.steps, sums.tokens, sums.sequences, sums.context, sums.attended, sums.seconds)


def _row(sequence: Sequence, at: float) -> FinishedRow:
    assert sequence.finished_at is not None
    assert sequence.first_token_at is not None
    return FinishedRow(
        age_seconds=at - sequence.arrival,
        e2e_seconds=sequence.finished_at - sequence.arrival,
        prompt_tokens=sequence.num_prompt,
        cached_tokens=sequence.num_cached,
        output_tokens=sequence.num_output,
        ttft_seconds=sequence.first_token_at - sequence.arrival,
        decode_seconds=sequence.finished_at - sequence.first_token_at,
        preemptions=sequence.num_preemptions,
    )


def _histogram(edges: tuple[float, ...], counts: list[int], total: float) -> Histogram:
    seen, at_most = 0, []
    for count in counts[:-1]:
        seen += count
        at_most.append(seen)
    return Histogram(edges, tuple(at_most), seen + counts[-1], total)


def _gap_histogram(engine: TwinEngine) -> Histogram:
    gaps = engine.gaps
    assert gaps is not None
    return Histogram(ITL_EDGES, tuple(_at_edges(gaps)), sum(gaps.counts), gaps.total_seconds)


def _at_edges(gaps: Gaps) -> list[int]:
    """The fine counts, cumulated up to each of production's edges."""
    seen, start, at_most = 0, 0, []
    for position in _POSITIONS:
        seen += sum(gaps.counts[start : position + 1])
        start = position + 1
        at_most.append(seen)
    return at_most


_POSITIONS = [GAP_EDGES.index(edge) for edge in ITL_EDGES]
