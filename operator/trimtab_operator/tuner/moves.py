"""Changes that the tuner can make, their reasons, and predictions about them: shared by rules, trials, explanation and
history.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from trimtab_operator.tuner.parameters import Parameter, Value


class Reason(StrEnum):
    """Reasons of decisions (history entry, Event, metric label) and of the conditions MetricsAvailable and
    TuningActive. docs/guides/tuning.md explains each.
    """

    # of decisions
    KV_CACHE_TOO_SMALL = "KVCacheTooSmall"  # preemptions, and the device has headroom: raise KV memory
    KV_CACHE_LARGER_THAN_NEEDED = "KVCacheLargerThanNeeded"  # the reverse
    ADMITTED_TOO_EARLY = "AdmittedTooEarly"  # preemptions without headroom: keep KV blocks free at admission
    WATERMARK_NOT_NEEDED = "WatermarkNotNeeded"  # the reverse
    CHUNKS_TOO_LARGE = "ChunksTooLarge"  # prefill in large pieces slows decodes: a smaller budget
    CHUNKS_TOO_SMALL = "ChunksTooSmall"  # prompts wait for budget: a larger one
    BATCH_TOO_LARGE = "BatchTooLarge"  # the running batch violates the ITL objective: lower max_num_seqs
    TOO_FEW_SEQUENCE_SLOTS = "TooFewSequenceSlots"  # the queue waits for a slot while KV is free: raise max_num_seqs
    TOO_FEW_REPLICAS = "TooFewReplicas"  # the load exceeds the capacity
    TOO_MANY_REPLICAS = "TooManyReplicas"  # fewer replicas hold the load, by prediction
    REQUESTS_HELD = "RequestsHeld"  # the router holds requests, and no replica serves
    NO_REQUESTS = "NoRequests"  # no request for the idle timeout: no replica is needed
    SATURATED = "Saturated"  # objectives are violated and every parameter is at its bound
    ROLLED_BACK = "RolledBack"  # a change made the result worse
    PREDICTION_NOT_ACHIEVED = "PredictionNotAchieved"  # a change had less than half of its predicted effect
    PREDICTION_CONTRADICTED = "PredictionContradicted"  # the observed attainment contradicts the prediction
    ROLLED_BACK_AFTER_RESTART = (
        "RolledBackAfterRestart"  # an engine ran out of memory, or crashed, above the start values
    )
    DEVICE_MEMORY_PRESSURE = "DeviceMemoryPressure"  # other processes use more device memory
    BOUNDS_CHANGED = "BoundsChanged"  # the bounds of the spec or the engine no longer allow the value
    STARTUP_OUT_OF_MEMORY = "StartupOutOfMemory"  # an engine runs out of memory during start-up

    # of MetricsAvailable
    SCRAPED = "Scraped"  # the metrics of every ready replica are fresh and consistent
    NO_READY_REPLICA = "NoReadyReplica"  # nothing to measure
    METRICS_PARTIAL = "MetricsPartial"  # some ready replicas have no valid metrics
    METRICS_MISSING = "MetricsMissing"  # metrics, configuration or ledger could not be read
    METRICS_DUPLICATED = "MetricsDuplicated"  # Prometheus scrapes a pod as several targets
    PROMETHEUS_UNAVAILABLE = "PrometheusUnavailable"  # no response, a rejected query, or not configured
    METRICS_STALE = "MetricsStale"  # the newest sample is older than three scrapes
    METRICS_FROZEN = "MetricsFrozen"  # requests are in flight, but no counter changed for three scrapes
    METRICS_INCONSISTENT = "MetricsInconsistent"  # a sample contradicts itself, the ledger or the clock
    METRICS_GENERATION_MISMATCH = (
        "MetricsGenerationMismatch"  # metrics and configuration of different generations for three scrapes
    )

    # of TuningActive, in addition to Saturated and StartupOutOfMemory
    TUNING = "Tuning"  # parameters change within their bounds
    CRASH_BUDGET_EXHAUSTED = (
        "CrashBudgetExhausted"  # engines crashed twice above the start values: no raises above them
    )
    RECOMMENDING = "Recommending"  # changes are reported, not applied
    OFF = "Off"  # spec.tuning.mode is Off
    METRICS_UNAVAILABLE = "MetricsUnavailable"  # no ready replica has valid metrics: parameters keep their values
    NOT_YET_APPLIED = "NotYetApplied"  # a replica does not run the applied values yet


@dataclass(frozen=True, slots=True)
class ReplicaCount:
    """The replica count as the target of a change."""

    @property
    def value(self) -> str:
        """Name in status, Events and metrics."""
        return "replicas"


@dataclass(frozen=True, slots=True)
class Restart:
    """A parameter of the spec that needs new engines, by its name in the spec."""

    parameter: str

    @property
    def value(self) -> str:
        """Name in status, Events and metrics."""
        return self.parameter


Target = Parameter | ReplicaCount | Restart


class Measure(StrEnum):
    """Measures that predictions are about."""

    ATTAINMENT = "attainment"  # share of requests that attain every objective
    RECOMPUTED = "recomputed share"  # of the computed tokens
    CAPACITY = "capacity"  # requests a second
    GOOD = "goodput"  # requests a second that attain every objective, of closed-loop clients
    TOKENS = "throughput"  # output tokens a second
    TTFT_P95 = "TTFT p95"  # seconds
    ITL_P95 = "ITL p95"  # seconds, of the requests' mean gaps
    KV_TOKENS = "KV tokens"


@dataclass(frozen=True, slots=True)
class Expectation:
    """Predicted effect of a change on a measure: value before, value after, and the expected interval."""

    measure: Measure
    before: float
    after: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Move:
    """A change that a rule wants. The first entry of `expected` is the one that the trial is judged by."""

    reason: Reason
    target: Target
    before: Value | None
    after: Value | None
    evidence: Mapping[str, float] = field(default_factory=dict)
    expected: tuple[Expectation, ...] = ()
    would_change: str = ""
    """Condition under which the decision would differ, as a noun phrase."""

    @property
    def is_raise(self) -> bool:
        """Return True if the value grows."""
        return self.before is not None and self.after is not None and self.after > self.before


@dataclass(frozen=True, slots=True)
class Decision:
    """An applied or recommended change, with its reason as a sentence. `outcome` is added later."""

    id: str
    at: float
    move: Move
    sentence: str
    outcome: str = ""

    @property
    def reason(self) -> Reason:
        """Reason of the change."""
        return self.move.reason


def decision_id(now: float, move: Move) -> str:
    """Return an id that is equal for equal decisions in status, Events and logs."""
    text = f"{now!r}|{move.reason}|{move.target.value}|{move.before!r}|{move.after!r}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]
