"""What the tuner sees: readings of engines, whether they can be believed, and what a window of them says.

A reading is one look at one replica group. Readings that cannot be believed never reach a decision: they are
named (`Doubt`) and everything holds. Fetching them is the work of `metrics.py` and `engine_client.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

# A KV cache that was never half full does not preempt for want of room: such a counter lies or counts something else.
KV_USED_AT_LEAST = 0.5
MAX_CLOCK_AHEAD_SECONDS = 5.0  # a sample further in the future than this was stamped by a clock that jumped


class Knob(StrEnum):
    """The engine's live fields, by the names of the admin API."""

    GPU_MEMORY_UTILIZATION = "gpu_memory_utilization"
    MAX_NUM_SEQS = "max_num_seqs"
    MAX_NUM_BATCHED_TOKENS = "max_num_batched_tokens"


Value = int | float
Values = Mapping[Knob, Value]


@dataclass(frozen=True, slots=True)
class FieldRange:
    """What an engine says about one field: whether it is live, and what could be set now."""

    live: bool
    minimum: float
    maximum: float


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`GET /admin/v1/config`, as far as the tuner needs it. `max_model_len` is in tokens."""

    generation: int
    applied: Values
    fields: Mapping[Knob, FieldRange]
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """One scrape of one engine, joined with its ledger.

    `at` is Unix time of the scrape; `preemptions_total` counts those for want of capacity, not those that a resize
    made; `kv_usage` is 0..1; sizes are bytes per rank.
    """

    at: float
    config_generation: int
    preemptions_total: float
    generation_tokens_total: float
    running: float
    waiting: float
    kv_usage: float
    blocks_total: int
    blocks_used: int
    block_size: int
    bytes_per_block: int
    device_bytes: int


@dataclass(frozen=True, slots=True)
class GroupReading:
    """One replica group as it looks now. `problem` says why `config` or `load` is missing.

    `instance` names the pod: counters that fall in the same pod mean that its engine crashed, in another one that the
    pod was replaced.
    """

    group: str
    ready: bool
    config: EngineConfig | None = None
    load: EngineLoad | None = None
    problem: str | None = None
    instance: str = ""


class Doubt(StrEnum):
    """Why the metrics are not acted upon; also the reason of the condition MetricsAvailable."""

    NO_READY_REPLICA = "NoReadyReplica"
    MISSING = "MetricsMissing"  # no ready group could be read
    PARTIAL = "MetricsPartial"  # some ready groups could be read, not all
    STALE = "MetricsStale"  # the sample is older than the maximum age
    INCONSISTENT = "MetricsInconsistent"  # the sample contradicts itself, its predecessor or the clock


@dataclass(frozen=True, slots=True)
class Hold:
    """Metrics that hold everything: the reason, and a message that stays the same while the cause does."""

    doubt: Doubt
    message: str


def contradiction(load: EngineLoad, *, now: float) -> str | None:
    """Say what is impossible about a sample, or None."""
    numbers = (load.preemptions_total, load.generation_tokens_total, load.running, load.waiting, load.kv_usage)
    if not all(math.isfinite(number) for number in (*numbers, load.at)):
        return "a metric is not a number"
    if any(number < 0 for number in (*numbers, load.blocks_used)):
        return "a count is negative"
    if load.kv_usage > 1.0 + 1e-6 or load.blocks_used > load.blocks_total:
        return "more of the KV cache is used than there is"
    if min(load.blocks_total, load.block_size, load.bytes_per_block, load.device_bytes) <= 0:
        return "the memory ledger is empty"
    if load.at > now + MAX_CLOCK_AHEAD_SECONDS:
        return "the sample lies in the future"
    return None


def is_out_of_step(reading: GroupReading) -> bool:
    """Whether metrics and configuration are of different generations, as for a moment after every change."""
    return (
        reading.load is not None
        and reading.config is not None
        and reading.load.config_generation != reading.config.generation
    )


def hold(readings: Iterable[GroupReading], *, now: float, max_age_seconds: float) -> Hold | None:
    """Say why the readings of the ready groups cannot be acted upon, or None when all of them can.

    Groups that are not ready are left out: what a loading engine measures says nothing about the load.
    """
    ready = [reading for reading in readings if reading.ready]
    if not ready:
        return Hold(Doubt.NO_READY_REPLICA, "no replica is ready; nothing is measured")
    unread = [reading for reading in ready if reading.load is None or reading.config is None]
    if unread:
        said = f"{_names(unread)}: {unread[0].problem or 'could not be read'}"
        if len(unread) == len(ready):
            return Hold(Doubt.MISSING, f"no metrics from {said}")
        return Hold(Doubt.PARTIAL, f"metrics from {len(ready) - len(unread)} of {len(ready)} ready replicas; {said}")
    stale = [r for r in ready if r.load is not None and now - r.load.at > max_age_seconds]
    if stale:
        return Hold(Doubt.STALE, f"metrics of {_names(stale)} are older than {max_age_seconds:g} s")
    for reading in ready:
        assert reading.load is not None
        said_wrong = contradiction(reading.load, now=now)
        if said_wrong is not None:
            return Hold(Doubt.INCONSISTENT, f"metrics of {reading.group} contradict themselves: {said_wrong}")
    return None


def _names(readings: list[GroupReading]) -> str:
    return ", ".join(sorted(reading.group for reading in readings))


@dataclass(frozen=True, slots=True)
class Window:
    """Samples of one group since its engine started, oldest first, and the pod that they come from.

    `out_of_step_since` is the time since which its metrics and its configuration have been of different generations.
    """

    samples: tuple[EngineLoad, ...] = ()
    instance: str = ""
    out_of_step_since: float | None = None

    def add(self, load: EngineLoad, *, keep_seconds: float) -> Window:
        """Append a sample. A restart (counter or generation fell) begins anew; a repeated sample changes nothing."""
        if not self.samples:
            return replace(self, samples=(load,))
        last = self.samples[-1]
        if has_restarted(last, load):
            return replace(self, samples=(load,))
        if load.at <= last.at:
            return self
        kept = (sample for sample in self.samples if sample.at >= load.at - keep_seconds)
        return replace(self, samples=(*kept, load))

    def since(self, at: float) -> Window:
        """The part that was measured at `at` or later."""
        return replace(self, samples=tuple(sample for sample in self.samples if sample.at >= at))


def has_restarted(before: EngineLoad, after: EngineLoad) -> bool:
    """Counters only grow while a process lives; its configuration's generation too."""
    return (
        after.preemptions_total < before.preemptions_total
        or after.generation_tokens_total < before.generation_tokens_total
        or after.config_generation < before.config_generation
    )


@dataclass(frozen=True, slots=True)
class Pressure:
    """What a window of one group says. Rates are per second, `demand` is running plus waiting requests on average.

    `running_when_full` and `blocks_per_request` are medians over samples in which the KV cache was well used, 0 when
    there was none: requests that have just begun hold few blocks, and a single odd sample must not count.
    """

    group: str
    seconds: float
    preemptions: int
    generated_tokens: float
    intervals_with_preemption: int
    is_recent: bool  # one of the last two intervals saw a preemption
    demand: float
    running: float
    waiting: float
    kv_usage_peak: float
    running_when_full: float
    blocks_per_request: float
    latest: EngineLoad

    @property
    def preemption_rate(self) -> float:
        return self.preemptions / self.seconds if self.seconds > 0 else 0.0


def pressure(group: str, window: Window) -> Pressure | None:
    """Summarise a window; None when it holds fewer than two samples."""
    samples = window.samples
    if len(samples) < 2:
        return None
    deltas = [b.preemptions_total - a.preemptions_total for a, b in itertools.pairwise(samples)]
    full = [s for s in samples if s.running >= 1 and s.kv_usage >= KV_USED_AT_LEAST]
    running = _mean(s.running for s in samples)
    waiting = _mean(s.waiting for s in samples)
    return Pressure(
        group=group,
        seconds=samples[-1].at - samples[0].at,
        preemptions=round(sum(deltas)),
        generated_tokens=samples[-1].generation_tokens_total - samples[0].generation_tokens_total,
        intervals_with_preemption=sum(delta > 0 for delta in deltas),
        is_recent=any(delta > 0 for delta in deltas[-2:]),
        demand=running + waiting,
        running=running,
        waiting=waiting,
        kv_usage_peak=max(s.kv_usage for s in samples),
        running_when_full=median(s.running for s in full) if full else 0.0,
        blocks_per_request=median(s.kv_usage * s.blocks_total / s.running for s in full) if full else 0.0,
        latest=samples[-1],
    )


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
