"""Tuning under load, shared by the scenario and the demo: specs, load and probes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.deployment import SAMPLE, Deployment
from harness.engine import EngineReading
from harness.traffic import LoadOptions
from harness.wait import NotYet

# With 16 clients of 64 + 192 tokens the requests need 2,560 KV tokens on average and 4,096 at most: more than the
# 2,000 at the sample's starting utilisation, less than the 8,000 at its bound.
CONCURRENCY = 16
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 192
DECISION_SECONDS = 180.0
CALM_SECONDS = 25.0  # without a preemption under the same load: longer than the interval between two before
SOAK_CALM_SECONDS = 600.0  # CALM_SECONDS of `make soak`
CALM_DEADLINE_SECONDS = 300.0  # several moves may be needed

UTILIZATION = "gpu_memory_utilization"
SEQS = "max_num_seqs"
WATERMARK = "watermark"
WATCH_SECONDS = 60.0  # observation time if preemptions are reduced but not eliminated


def pinned_utilization(value: str) -> dict[str, Any]:
    """Return spec changes that pin the utilization, so that the device has no headroom."""
    return {
        "engine": {"gpuMemoryUtilization": value},
        "tuning": {"bounds": {"gpuMemoryUtilization": {"min": value, "max": value}}},
    }


def load_options(deployment: Deployment) -> LoadOptions:
    return LoadOptions(
        url=deployment.cluster_url(),
        model=deployment.served_name(),
        concurrency=CONCURRENCY,
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        stagger_seconds=0.5,
    )


@dataclass(frozen=True, slots=True)
class Calm:
    """The last change of the preemption counter: its value, and when it was seen."""

    preemptions: float
    since: float


def decision_of(deployment: Deployment, knob: str) -> dict[str, Any]:
    """Return the newest decision on `knob` in status.tuning.history. Raises NotYet if there is none."""
    history = deployment.history()
    for entry in history:
        if entry.get("knob") == knob:
            return entry
    reading = deployment.engine()
    raise NotYet(
        f"no decision on {knob} yet: {reading.preemptions:.0f} preemptions, {reading.running:.0f} running, "
        f"{reading.waiting:.0f} waiting, {reading.kv_usage:.0%} of {reading.kv_tokens} KV tokens used"
    )


def decision_probe(
    deployment: Deployment, knob: str, start: float, show: Callable[[EngineReading], None] = lambda reading: None
) -> Callable[[], dict[str, Any]]:
    """Return a probe for the newest decision on `knob`, once status and engine agree on a value other than `start`."""

    def probe() -> dict[str, Any]:
        reading = deployment.engine()
        show(reading)
        applied = deployment.status().get("tuning", {}).get("applied", {}).get(knob)
        decision = decision_of(deployment, knob)
        value = reading.values[knob]
        if applied is None or value == start or float(applied) != value:
            raise NotYet(f"decided {decision['to']}, status.tuning.applied is {applied}, the engine's value is {value}")
        return decision

    return probe


def calm_probe(
    deployment: Deployment,
    show: Callable[[EngineReading], None] = lambda reading: None,
    *,
    calm_seconds: float = CALM_SECONDS,
) -> Callable[[], EngineReading]:
    """Return a probe that succeeds after `calm_seconds` under load without a preemption, and raises NotYet before."""
    state: dict[str, Calm] = {}

    def probe() -> EngineReading:
        reading = deployment.engine()
        show(reading)
        now = time.monotonic()
        calm = state.get("calm")
        is_busy = reading.running + reading.waiting >= CONCURRENCY / 2
        if calm is None or reading.preemptions != calm.preemptions or not is_busy:
            state["calm"] = calm = Calm(reading.preemptions, now)
        quiet = now - calm.since
        if quiet < calm_seconds:
            raise NotYet(
                f"{reading.preemptions:.0f} preemptions, none for {quiet:.0f} s ({reading.running:.0f} running, "
                f"{reading.waiting:.0f} waiting, {reading.kv_usage:.0%} of {reading.kv_tokens} KV tokens used)"
            )
        return reading

    return probe


def watch_probe(show: Callable[[], EngineReading], *, seconds: float = WATCH_SECONDS) -> Callable[[], EngineReading]:
    """Return a probe that calls `show` for `seconds` and then returns the last reading. Raises NotYet before."""
    begin = time.monotonic()

    def probe() -> EngineReading:
        reading = show()
        watched = time.monotonic() - begin
        if watched < seconds:
            raise NotYet(f"watched for {watched:.0f} s, {reading.preemptions:.0f} preemptions")
        return reading

    return probe


def preemptions_per_1000_tokens(before: EngineReading, after: EngineReading) -> float:
    """Return the preemptions per 1,000 generated tokens between two readings."""
    tokens = after.generation_tokens - before.generation_tokens
    return 1000 * (after.preemptions - before.preemptions) / tokens if tokens > 0 else 0.0


def recomputed_share(before: EngineReading, after: EngineReading) -> float:
    """Return the share of the computed tokens between two readings that were computed again after a preemption."""
    tokens = after.computed_tokens - before.computed_tokens
    return (after.recomputed_tokens - before.recomputed_tokens) / tokens if tokens > 0 else 0.0


def predictions(deployment: Deployment, decision: dict[str, Any]) -> dict[str, float]:
    """Return the predicted values of a decision by measure, as `trimtab why` reports them."""
    command = [str(Path(sys.executable).with_name("kubectl-trimtab")), "why", deployment.name, "-o", "json"]
    answer = subprocess.run(
        [*command, "--namespace", deployment.namespace],
        env=deployment.kube.full_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    entries = [entry for entry in json.loads(answer.stdout)["decisions"] if entry["id"] == decision["id"]]
    return {one["measure"]: float(one["after"]) for entry in entries for one in entry["expected"]}


def start_utilization() -> str:
    """Return the sample's start value of gpuMemoryUtilization as text."""
    found = re.search(r'gpuMemoryUtilization: "([0-9.]+)"', SAMPLE.read_text())
    assert found is not None, f"{SAMPLE} has no engine.gpuMemoryUtilization"
    return found[1]
