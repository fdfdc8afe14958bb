"""What can be moved, why, and what is expected of it: the words between rules, trials, explanation and history."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from trimtab_operator.tuner.knobs import Knob, Value


class Reason(StrEnum):
    """Every reason that the tuner gives: of a decision (its history entry, its Event and the metric's label), and of
    the conditions MetricsAvailable and TuningActive. docs/guides/tuning.md tells what each means."""

    # of decisions
    KV_CACHE_TOO_SMALL = "KVCacheTooSmall"  # preemptions, and the device has headroom: more KV memory
    KV_CACHE_LARGER_THAN_NEEDED = "KVCacheLargerThanNeeded"  # the way back
    ADMITTED_TOO_EARLY = "AdmittedTooEarly"  # preemptions, no headroom: keep KV free at admission
    WATERMARK_NOT_NEEDED = "WatermarkNotNeeded"  # the way back
    CHUNKS_TOO_LARGE = "ChunksTooLarge"  # prefill in large pieces slows decodes: a smaller budget
    CHUNKS_TOO_SMALL = "ChunksTooSmall"  # prompts wait for budget: a larger one
    BATCH_TOO_LARGE = "BatchTooLarge"  # the running batch itself misses the inter-token promise: fewer seats
    TOO_FEW_SEATS = "TooFewSeats"  # the queue waits for a seat while KV is free: more seats
    TOO_FEW_REPLICAS = "TooFewReplicas"  # what comes is more than the replicas hold
    TOO_MANY_REPLICAS = "TooManyReplicas"  # fewer hold it too, by prediction
    SATURATED = "Saturated"  # promises are missed and everything is at its bound
    MADE_WORSE = "RolledBack"  # a change's effect was not the predicted one
    RESTARTED_AFTER = "RolledBackAfterRestart"  # an engine ran out of memory, or crashed, above the start values
    MEMORY_TAKEN = "MemoryTakenByOthers"  # somebody else's memory on the device grew
    BOUNDS_CHANGED = "BoundsChanged"  # the owner's bounds, or the engine's, no longer hold the value
    START_TOO_LARGE = "StartTooLarge"  # an engine runs out of memory while it starts

    # of MetricsAvailable: what can be believed
    SCRAPED = "Scraped"  # the metrics of every ready replica are fresh and consistent
    NO_READY_REPLICA = "NoReadyReplica"  # there is nothing to measure
    METRICS_PARTIAL = "MetricsPartial"  # those of some ready replicas cannot be believed
    METRICS_MISSING = "MetricsMissing"  # metrics, configuration or ledger could not be read
    METRICS_DUPLICATED = "MetricsDuplicated"  # Prometheus scrapes a pod as several targets
    PROMETHEUS_UNAVAILABLE = "PrometheusUnavailable"  # it does not answer, refuses, or the operator was given none
    METRICS_STALE = "MetricsStale"  # the newest sample is older than three scrapes
    METRICS_FROZEN = "MetricsFrozen"  # requests are there, and no counter has moved for three scrapes
    METRICS_INCONSISTENT = "MetricsInconsistent"  # a sample contradicts itself, the ledger or the clock
    METRICS_OUT_OF_STEP = "MetricsOutOfStep"  # metrics and configuration of different generations for long

    # of TuningActive, beside Saturated and StartTooLarge
    TUNING = "Tuning"  # knobs move within their bounds
    CRASH_BUDGET_SPENT = "CrashBudgetSpent"  # engines crashed twice above the start values: none is raised above them
    RECOMMENDING = "Recommending"  # what would be done is said, and nothing is changed
    OFF = "Off"  # as its owner asks
    METRICS_UNAVAILABLE = "MetricsUnavailable"  # no ready replica can be believed: every knob is held
    NOT_YET_APPLIED = "NotYetApplied"  # a replica does not run the applied values yet


@dataclass(frozen=True, slots=True)
class ReplicaCount:
    """The number of replicas, as a thing that can be moved."""

    @property
    def value(self) -> str:
        """Its name in status, Events and metrics."""
        return "replicas"


@dataclass(frozen=True, slots=True)
class Restart:
    """A parameter of the spec that needs new engines, by its name there."""

    parameter: str

    @property
    def value(self) -> str:
        """Its name in status, Events and metrics."""
        return self.parameter


Target = Knob | ReplicaCount | Restart


class Measure(StrEnum):
    """What an expectation is about."""

    ATTAINMENT = "attainment"  # share of requests that keep every promise
    RECOMPUTED = "recomputed share"  # of the computed tokens
    CAPACITY = "capacity"  # requests a second
    GOOD = "goodput"  # requests a second that keep every promise, of clients that wait
    TOKENS = "throughput"  # tokens of answers a second
    TTFT_P95 = "TTFT p95"  # seconds
    ITL_P95 = "ITL p95"  # seconds, of the requests' mean gaps
    KV_TOKENS = "KV tokens"


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a move is predicted to bring: a measure as it is, and as it will be, with the interval it should lie in."""

    measure: Measure
    before: float
    after: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Move:
    """A change that a rule wants. `expected`, its first entry the one that it is judged by."""

    reason: Reason
    target: Target
    before: Value | None
    after: Value | None
    evidence: Mapping[str, float] = field(default_factory=dict)
    expected: tuple[Expectation, ...] = ()
    would_change: str = ""
    """What would have led to another decision, as a clause."""

    @property
    def is_raise(self) -> bool:
        """Whether the value grows."""
        return self.before is not None and self.after is not None and self.after > self.before


@dataclass(frozen=True, slots=True)
class Decision:
    """A move that was made or recommended, with its grounds in words. `outcome` says later what came of it."""

    id: str
    at: float
    move: Move
    sentence: str
    outcome: str = ""

    @property
    def reason(self) -> Reason:
        """Why."""
        return self.move.reason


def decision_id(now: float, move: Move) -> str:
    """The same for the same decision, wherever it is told."""
    said = f"{now!r}|{move.reason}|{move.target.value}|{move.before!r}|{move.after!r}"
    return hashlib.sha256(said.encode()).hexdigest()[:8]
