"""Timeline of one deployment in fixed memory: an hour in fine slots, a day in coarse ones. Pure.

A slot covers a fixed interval of Unix time. Values are 32-bit floats; NaN means that nothing was measured.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from enum import Enum, StrEnum

FINE_STEP_SECONDS, NUM_FINE_SLOTS = 15, 240  # one hour; the operator polls every 5 s by default in the chart
COARSE_STEP_SECONDS, NUM_COARSE_SLOTS = 600, 144  # one day
MAX_GAP_SECONDS = 90.0  # between records: an idle resource is reconciled every 30 to 60 s
NAN = math.nan


class Aggregation(Enum):
    """Aggregation of the values within one slot."""

    MEAN = "mean"
    MAX = "max"
    LAST = "last"


class Series(StrEnum):
    """Measured series of a deployment, by their names in the board's JSON. Latencies are in seconds."""

    REQUESTS_PER_SECOND = "requests_per_second"
    TOKENS_PER_SECOND = "tokens_per_second"
    RUNNING = "running"
    WAITING = "waiting"
    KV_USAGE = "kv_usage"
    PREEMPTIONS_PER_MINUTE = "preemptions_per_minute"
    TTFT = "ttft"
    TTFT_OBJECTIVE = "ttft_objective"
    ITL = "itl"
    ITL_OBJECTIVE = "itl_objective"
    ROUTER_HELD = "router_held"
    REPLICAS_DESIRED = "replicas_desired"
    REPLICAS_READY = "replicas_ready"
    GPU_MEMORY_UTILIZATION = "gpu_memory_utilization"
    WATERMARK = "watermark"
    MAX_NUM_SEQS = "max_num_seqs"
    MAX_NUM_BATCHED_TOKENS = "max_num_batched_tokens"


AGGREGATION: Mapping[Series, Aggregation] = {
    Series.REQUESTS_PER_SECOND: Aggregation.MEAN,
    Series.TOKENS_PER_SECOND: Aggregation.MEAN,
    Series.RUNNING: Aggregation.MEAN,
    Series.WAITING: Aggregation.MAX,
    Series.KV_USAGE: Aggregation.MAX,
    Series.PREEMPTIONS_PER_MINUTE: Aggregation.MEAN,
    Series.TTFT: Aggregation.MAX,
    Series.ITL: Aggregation.MAX,
    Series.ROUTER_HELD: Aggregation.MAX,
}
"""Peaks of latencies and queues matter, so a slot keeps them. Other series keep their last value."""

_NAMES = tuple(Series)
_AGGREGATION = tuple(AGGREGATION.get(name, Aggregation.LAST) for name in _NAMES)


class SlotBuffer:
    """Values of all series in the latest `num_slots` slots of `step` seconds."""

    def __init__(self, step: int, num_slots: int) -> None:
        self.step, self.num_slots = step, num_slots
        self._values = array("f", [NAN]) * (num_slots * len(_NAMES))
        self._weights = array("f", [0.0]) * len(_NAMES)
        """Seconds that the means in the newest slot cover."""
        self._newest: int | None = None

    def add(self, values: Mapping[Series, float], *, since: float, until: float) -> None:
        """Add values that hold for an interval of Unix time; times before the newest slot are ignored."""
        for slot in range(int(since // self.step), int(until // self.step) + 1):
            if self._newest is not None and slot < self._newest:
                continue
            self._advance(slot)
            seconds = min(until, (slot + 1) * self.step) - max(since, slot * self.step)
            self._combine(slot, values, max(seconds, 1e-3))

    def _advance(self, slot: int) -> None:
        """Make `slot` the newest one, and clear the slots that it skips."""
        if slot == self._newest:
            return
        first = slot if self._newest is None else max(self._newest + 1, slot - self.num_slots + 1)
        empty = array("f", [NAN]) * len(_NAMES)
        for cleared in range(first, slot + 1):
            start = cleared % self.num_slots * len(_NAMES)
            self._values[start : start + len(_NAMES)] = empty
        self._newest = slot
        self._weights = array("f", [0.0]) * len(_NAMES)

    def _combine(self, slot: int, values: Mapping[Series, float], seconds: float) -> None:
        start = slot % self.num_slots * len(_NAMES)
        for number, (name, how) in enumerate(zip(_NAMES, _AGGREGATION, strict=True)):
            value, before = values.get(name, NAN), self._values[start + number]
            if math.isnan(value):
                continue
            if how is Aggregation.MAX and before > value:
                continue
            if how is Aggregation.MEAN:
                weight = self._weights[number]
                self._weights[number] = weight + seconds
                value = value if math.isnan(before) else before + (value - before) * seconds / (weight + seconds)
            self._values[start + number] = value

    def read(self, now: float) -> tuple[list[int], dict[Series, list[float | None]]]:
        """Return the start of each slot in Unix seconds, and the values of each series that has any; None: unknown.

        The last slot is the one of `now`.
        """
        last = int(now // self.step)
        slots = range(last - self.num_slots + 1, last + 1)
        found: dict[Series, list[float | None]] = {}
        for number, name in enumerate(_NAMES):
            row = [self._value(slot, number) for slot in slots]
            if any(value is not None for value in row):
                found[name] = row
        return [slot * self.step for slot in slots], found

    def _value(self, slot: int, number: int) -> float | None:
        if self._newest is None or not self._newest - self.num_slots < slot <= self._newest:
            return None
        value = self._values[slot % self.num_slots * len(_NAMES) + number]
        return None if math.isnan(value) else float(f"{value:.6g}")


class Timeline:
    """An hour in fine slots and a day in coarse slots of one deployment."""

    def __init__(self) -> None:
        self.fine = SlotBuffer(FINE_STEP_SECONDS, NUM_FINE_SLOTS)
        self.coarse = SlotBuffer(COARSE_STEP_SECONDS, NUM_COARSE_SLOTS)
        self.since: float | None = None
        """Unix time of the first record."""
        self.at: float | None = None
        """Unix time of the last record."""

    def add(self, at: float, values: Mapping[Series, float]) -> None:
        """Add values measured since the previous record. A longer gap than MAX_GAP_SECONDS stays empty."""
        if self.at is not None and at <= self.at:
            return
        since = at if self.at is None or at - self.at > MAX_GAP_SECONDS else self.at
        for buffer in (self.fine, self.coarse):
            buffer.add(values, since=since, until=at)
        self.since, self.at = at if self.since is None else self.since, at
