"""Signals that baselines read: sums and means of gauges, increases of counters, and sliding windows over them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from trimtab_operator.tuner.samples import Phase, ReplicaSnapshot, Sample

from trimtab_simulator.policies.policy import PolicyInput


def samples(view: PolicyInput) -> list[Sample]:
    """Return one sample per replica that serves new requests."""
    return [
        snapshot.sample for snapshot in view.snapshots if snapshot.phase is Phase.READY and snapshot.sample is not None
    ]


def num_pods(view: PolicyInput) -> int:
    """Return the replicas that exist and do not drain, as a workload's scale reports."""
    return sum(snapshot.phase is not Phase.DRAINING for snapshot in view.snapshots)


def running(snapshot: ReplicaSnapshot) -> float:
    """Return the requests in a replica's batch."""
    return snapshot.sample.gauges.running if snapshot.sample is not None else 0.0


def in_flight(view: PolicyInput) -> float:
    """Return all running and waiting requests, including draining replicas, as a proxy counts active ones."""
    return sum(s.sample.gauges.running + s.sample.gauges.waiting for s in view.snapshots if s.sample is not None)


def waiting(view: PolicyInput) -> float:
    """Return the waiting requests of all replicas."""
    return sum(sample.gauges.waiting for sample in samples(view))


def lengths(sample: Sample) -> tuple[float, float, float, float]:
    """Return counters of requests, their prompt tokens, finished requests, and output tokens."""
    counters = sample.counters
    arrived, prompts = counters.arrived or 0.0, counters.arrived_prompt_tokens or 0.0
    return arrived, prompts, counters.finished, counters.generated_tokens


class Sliding:
    """Values of the last `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._values: deque[tuple[float, float]] = deque()

    def add(self, at: float, value: float) -> None:
        """Add a value, and drop values that are too old."""
        self._values.append((at, value))
        while len(self._values) > 1 and self._values[0][0] <= at - self._seconds:
            self._values.popleft()

    @property
    def mean(self) -> float:
        """Mean of the values; at least one must have been added."""
        return sum(value for _, value in self._values) / len(self._values)

    @property
    def highest(self) -> float:
        """Highest value."""
        return max(value for _, value in self._values)

    @property
    def lowest(self) -> float:
        """Lowest value."""
        return min(value for _, value in self._values)


class Increases:
    """Increases of counters over the last `seconds`, summed over replicas: PromQL's sum(increase()) without
    extrapolation. `read` returns a sample's counters, always as many.
    """

    def __init__(self, seconds: float, read: Callable[[Sample], Sequence[float]]) -> None:
        self._seconds = seconds
        self._read = read
        self._pages: deque[tuple[float, dict[str, Sequence[float]]]] = deque()

    def add(self, view: PolicyInput) -> None:
        """Add the counters of all replicas, and drop pages that are too old."""
        page = {s.replica: self._read(s.sample) for s in view.snapshots if s.sample is not None}
        self._pages.append((view.now, page))
        while self._pages[0][0] < view.now - self._seconds:
            self._pages.popleft()

    @property
    def totals(self) -> list[float]:
        """The increase of each counter; empty without replicas."""
        first: dict[str, Sequence[float]] = {}
        last: dict[str, Sequence[float]] = {}
        for _, page in self._pages:
            first = page | first
            last |= page
        changes = ([after - before for before, after in zip(first[name], last[name], strict=True)] for name in last)
        return [sum(column) for column in zip(*changes, strict=True)]
