"""One look at one replica: counters, gauges, single requests, configuration and memory.

Nothing here is judged: impossible numbers are passed on as they are, and `observation` says what cannot be believed.
Times are Unix seconds of the operator's clock, unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from trimtab_operator.tuner.knobs import FieldRange, Knob, Values
from trimtab_operator.tuner.moves import Reason


class Phase(StrEnum):
    """How far a replica is in its life."""

    PENDING = "pending"  # its pods are not placed, or do not run yet
    STARTING = "starting"  # its engine loads
    READY = "ready"  # it serves
    DRAINING = "draining"  # it finishes what it has, and gets nothing new


class Source(StrEnum):
    """Where metrics were read."""

    PODS = "Pods"
    PROMETHEUS = "Prometheus"


@dataclass(frozen=True, slots=True)
class Work:
    """What all steps of one kind computed since the engine started, and how long they took."""

    steps: float = 0.0
    tokens: float = 0.0
    sequences: float = 0.0
    context: float = 0.0
    attended: float = 0.0
    seconds: float = 0.0

    def minus(self, other: Work) -> Work:
        """What was added since `other`."""
        return Work(
            self.steps - other.steps,
            self.tokens - other.tokens,
            self.sequences - other.sequences,
            self.context - other.context,
            self.attended - other.attended,
            self.seconds - other.seconds,
        )

    def plus(self, other: Work) -> Work:
        """Both together."""
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
    """Sum of what was observed."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What has happened since the engine started, its data-parallel ranks together.

    None: the engine does not export it (an older one, or vLLM).
    """

    generated_tokens: float
    prompt_tokens: float
    finished: float
    preemptions: Mapping[str, float]
    """Preemptions by reason: capacity, resize, reset; vLLM's, which have no reasons, as `capacity`."""
    arrived: float | None = None
    arrived_prompt_tokens: float | None = None
    cached_prompt_tokens: float = 0.0
    recomputed_tokens: float | None = None
    rejected: float = 0.0
    """Requests refused because the queue was full."""
    aborted: float = 0.0
    blocked_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by what kept the head of the queue waiting: kv, seqs, tokens."""
    decode: Work | None = None
    """Steps in which every sequence only decoded."""
    prefill: Work | None = None
    """Steps that carried prefill, whether or not something decoded beside it."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """What holds at this moment, ranks together."""

    running: float
    waiting: float
    kv_usage: float
    """KV usage of the fullest rank, 0..1."""
    config_generation: int | None = None
    """None: not our engine."""
    waiting_tokens: float | None = None
    oldest_waiting_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """One request that has ended, in numbers."""

    arrived_at: float
    finished_at: float
    prompt_tokens: int
    output_tokens: int
    ttft_seconds: float | None
    """None: it never had a token."""
    decode_seconds: float | None
    """From its first token to its last."""
    cached_tokens: int = 0
    preemptions: int = 0
    reason: str = "stop"

    @property
    def mean_gap(self) -> float | None:
        """Mean seconds between two of its tokens; None where there are no two."""
        if self.decode_seconds is None or self.output_tokens < 2:
            return None
        return self.decode_seconds / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """One request that waits or runs, with how much of its answer is out."""

    arrived_at: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestNews:
    """What `GET /admin/v1/requests` told since the last look: each finished request once, unfinished ones always."""

    finished: tuple[Finished, ...]
    unfinished: tuple[Unfinished, ...]
    missed: int = 0
    """Finished ones that had gone from the engine's memory."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One page of metrics, with the requests that were told beside it."""

    at: float
    counters: Counters
    gauges: Gauges
    ttft: Histogram | None = None
    itl: Histogram | None = None
    """Gaps between two tokens."""
    mean_itl: Histogram | None = None
    """Each request's mean gap."""
    requests: RequestNews | None = None

    def repeated(self) -> Sample:
        """The same numbers in another look; each request is told once."""
        return replace(self, requests=None)


@dataclass(frozen=True, slots=True)
class Config:
    """`GET /admin/v1/config`, as far as the tuner needs it."""

    generation: int
    applied: Values
    fields: Mapping[Knob, FieldRange]
    max_model_len: int | None = None
    pipeline_stages: int = 1


@dataclass(frozen=True, slots=True)
class Ledger:
    """`GET /admin/v1/memory`: sizes are bytes of one rank, blocks those of one core."""

    device_bytes: int
    blocks_total: int
    block_size: int
    bytes_per_block: int
    other_bytes: int = 0
    """What was resident before the weights, and what others have taken since."""
    free_bytes: int | None = None
    blocks_cap: int | None = None

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.blocks_total * self.block_size


@dataclass(frozen=True, slots=True)
class Look:
    """One replica as it looks now. `problem` says why the sample, the configuration or the ledger is missing.

    `instance` names the pod and its restart: counters that fall under one instance are a lie or a crash, under another
    one a new engine.
    """

    replica: str
    phase: Phase
    instance: str = ""
    since: float = 0.0
    """When it came into this phase, as far as the operator knows; 0: long ago."""
    sample: Sample | None = None
    config: Config | None = None
    ledger: Ledger | None = None
    problem: str | None = None
    problem_reason: Reason = Reason.METRICS_MISSING
    """What kind of problem that is."""
    was_oom_killed: bool = False
    """Its engine's last end was for want of memory."""
    restarts: int = 0
    """How often its engine has ended in the same pod."""
    exit_code: int | None = None
    """With which its engine ended last; None: it never did."""
