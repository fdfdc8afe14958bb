"""Snapshots and samples with only the values that a test needs."""

from __future__ import annotations

from typing import Any

from trimtab_operator.tuner.parameters import FieldRange, Parameter, Values
from trimtab_operator.tuner.samples import (
    Config,
    Counters,
    Gauges,
    Ledger,
    Phase,
    ReplicaSnapshot,
    RequestUpdates,
    Sample,
    Work,
)

PARAMETERS: Values = {
    Parameter.GPU_MEMORY_UTILIZATION: 0.8,
    Parameter.WATERMARK: 0.0,
    Parameter.MAX_NUM_SEQS: 64,
    Parameter.MAX_NUM_BATCHED_TOKENS: 2048,
}
FIELDS = {
    Parameter.GPU_MEMORY_UTILIZATION: FieldRange(True, 0.5, 0.95),
    Parameter.WATERMARK: FieldRange(True, 0.0, 0.9),
    Parameter.MAX_NUM_SEQS: FieldRange(True, 1, 256),
    Parameter.MAX_NUM_BATCHED_TOKENS: FieldRange(True, 64, 8192),
}


def make_sample(
    at: float, *, generation: int | None = 1, requests: RequestUpdates | None = None, **changes: Any
) -> Sample:
    """Return a sample of an engine that has done 10 steps a second since 0."""
    gauges: dict[str, Any] = {"running": 4.0, "waiting": 0.0, "kv_usage": 0.5, "waiting_tokens": None}
    counts: dict[str, Any] = {
        "generated_tokens": 40.0 * at,
        "prompt_tokens": 100.0 * at,
        "finished": at,
        "preemptions": {"capacity": 0.0},
        "arrived": at,
        "decode": Work(8 * at, 32 * at, 32 * at, 3200 * at, 3200 * at, 0.08 * at),
        "prefill": Work(2 * at, 200 * at, 8 * at, 800 * at, 800 * at, 0.04 * at),
        "recomputed_tokens": 0.0,
    }
    for name, value in changes.items():
        (gauges if name in gauges else counts)[name] = value
    return Sample(at, Counters(**counts), Gauges(**gauges, config_generation=generation), requests=requests)


def make_replica_snapshot(
    replica: str = "m-0", sample: Sample | None = None, *, values: Values | None = None, **changes: Any
) -> ReplicaSnapshot:
    """Return a snapshot of a ready replica, readable if it has a sample."""
    readable: dict[str, Any] = {}
    if sample is not None:
        readable["config"] = Config(
            sample.gauges.config_generation or 1, {**PARAMETERS, **(values or {})}, FIELDS, 4096
        )
        readable["ledger"] = Ledger(16_000_000_000, 10_000, 16, 1_000_000, free_bytes=3_000_000_000)
    fields = {"phase": Phase.READY, "instance": "uid-1", "sample": sample, **readable, **changes}
    return ReplicaSnapshot(replica, **fields)
