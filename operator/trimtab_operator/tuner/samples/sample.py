"""Snapshot of one replica: counters, gauges, requests, configuration and memory.

Values are not judged here: impossible numbers are passed on, and `observation` finds faults. Times are Unix seconds of
the operator's clock, unless a name says otherwise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.parameters import FieldRange, Parameter, Values


class Phase(StrEnum):
    """Phase of a replica."""

    PENDING = "pending"  # its pods are not scheduled, or do not run yet
    STARTING = "starting"  # its engine loads
    READY = "ready"  # it serves
    DRAINING = "draining"  # it finishes its requests and gets no new ones


class Source(StrEnum):
    """Source of metrics."""

    PODS = "Pods"
    PROMETHEUS = "Prometheus"


@dataclass(frozen=True, slots=True)
class Work:
    """Sums over all steps of one kind since the engine started."""

    steps: float = 0.0
    tokens: float = 0.0
    sequences: float = 0.0
    context: float = 0.0
    attended: float = 0.0
    seconds: float = 0.0

    def minus(self, other: Work) -> Work:
        """Return the work since `other`."""
        return Work(
            self.steps - other.steps,
            self.tokens - other.tokens,
            self.sequences - other.sequences,
            self.context - other.context,
            self.attended - other.attended,
            self.seconds - other.seconds,
        )

    def plus(self, other: Work) -> Work:
        """Return the sum of both."""
        return Work(
            self.steps + other.steps,
            self.tokens + other.tokens,
            self.sequences + other.sequences,
            self.context + other.context,
            self.attended + other.attended,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True, slots=True)
class Histogram:
    """A Prometheus histogram: `counts[i]` observations were at most `edges[i]`; the last edge is infinite."""

    edges: tuple[float, ...]
    counts: tuple[float, ...]
    total: float
    """Sum of the observed values."""


def histogram_quantile(quantile: float, edges: Sequence[float], counts: Sequence[float]) -> float | None:
    """Return a quantile of cumulative counts, as PromQL estimates it; None without observations.

    Values are spread evenly within a bucket; in the last one the result is the highest finite edge.
    """
    if not counts or counts[-1] <= 0:
        return None
    rank = quantile * counts[-1]
    index = bisect_left(counts, rank)
    if index == len(edges) - 1:
        return edges[-2] if index else 0.0
    low, below = (edges[index - 1], counts[index - 1]) if index else (0.0, 0.0)
    return low + (edges[index] - low) * (rank - below) / (counts[index] - below)


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters since the engine started, summed over its data-parallel ranks.

    None: the engine does not export it (an older one, or vLLM).
    """

    generated_tokens: float
    prompt_tokens: float
    finished: float
    preemptions: Mapping[str, float]
    """Preemptions by reason: capacity, resize, reset; vLLM's have no reason and count as `capacity`."""
    arrived: float | None = None
    arrived_prompt_tokens: float | None = None
    cached_prompt_tokens: float = 0.0
    recomputed_tokens: float | None = None
    rejected: float = 0.0
    """Requests rejected because the queue was full."""
    aborted: float = 0.0
    blocked_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by the reason why the head of the queue waited: kv, seqs, tokens."""
    decode: Work | None = None
    """Steps in which every sequence only decoded."""
    prefill: Work | None = None
    """Steps that carried prefill, with or without decodes."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """Present values, summed over ranks."""

    running: float
    waiting: float
    kv_usage: float
    """KV usage of the fullest rank, 0..1."""
    config_generation: int | None = None
    """None for other engines."""
    waiting_tokens: float | None = None
    oldest_waiting_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """One finished request."""

    arrived_at: float
    finished_at: float
    prompt_tokens: int
    output_tokens: int
    ttft_seconds: float | None
    """None if it had no token."""
    decode_seconds: float | None
    """From the first token to the last."""
    cached_tokens: int = 0
    preemptions: int = 0
    reason: str = "stop"

    @property
    def mean_gap(self) -> float | None:
        """Mean seconds between two tokens; None with fewer than two."""
        if self.decode_seconds is None or self.output_tokens < 2:
            return None
        return self.decode_seconds / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """One waiting or running request, with its output tokens so far."""

    arrived_at: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestUpdates:
    """Requests from `GET /admin/v1/requests` since the last sample: each finished one once, all unfinished ones."""

    finished: tuple[Finished, ...]
    unfinished: tuple[Unfinished, ...]
    missed: int = 0
    """Finished requests that the engine no longer remembered."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One page of metrics, with the requests read at the same time."""

    at: float
    counters: Counters
    gauges: Gauges
    ttft: Histogram | None = None
    itl: Histogram | None = None
    """Gaps between two tokens."""
    mean_itl: Histogram | None = None
    """Mean gap of each request."""
    requests: RequestUpdates | None = None
    ranks: frozenset[tuple[str, str]] = field(default=frozenset(), compare=False)
    """Names of the summed series with the ranks that the page has of each; empty if unknown."""

    def repeated(self) -> Sample:
        """Return the same numbers without requests, which are reported only once."""
        return replace(self, requests=None)


@dataclass(frozen=True, slots=True)
class Config:
    """The part of `GET /admin/v1/config` that the tuner needs."""

    generation: int
    applied: Values
    fields: Mapping[Parameter, FieldRange]
    max_model_len: int | None = None
    pipeline_stages: int = 1


@dataclass(frozen=True, slots=True)
class Ledger:
    """`GET /admin/v1/memory`: sizes in bytes of one rank, blocks of one core."""

    device_bytes: int
    blocks_total: int
    block_size: int
    bytes_per_block: int
    other_bytes: int = 0
    """Memory in use before the weights, and by other processes since."""
    free_bytes: int | None = None
    blocks_cap: int | None = None

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.blocks_total * self.block_size


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """State of one replica. `problem` is set if the sample, the configuration or the ledger is missing.

    `instance` names the pod: counters that fall within one instance are invalid or a crash, in another instance a new
    engine.
    """

    replica: str
    phase: Phase
    instance: str = ""
    since: float = 0.0
    """Start of the phase, as far as known; 0: long ago."""
    sample: Sample | None = None
    config: Config | None = None
    ledger: Ledger | None = None
    problem: str | None = None
    problem_reason: Reason = Reason.METRICS_MISSING
    """Condition reason of the problem."""
    was_oom_killed: bool = False
    """True if its engine was OOM-killed last."""
    restarts: int = 0
    """Number of times that its engine has ended in the same pod."""
    exit_code: int | None = None
    """Exit code of the last end; None without one."""
