"""Observation of all replicas, with their recent past and faults. Decisions are based only on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trimtab_operator.tuner.observation.faults import Finding
from trimtab_operator.tuner.observation.interval import Interval, total_of
from trimtab_operator.tuner.observation.track import FaultTimeouts, Track
from trimtab_operator.tuner.samples import Config, Gauges, Ledger, Phase, ReplicaSnapshot, RequestUpdates

OBSERVATION_VERSION = 1


@dataclass(frozen=True, slots=True)
class ReplicaObservation:
    """One replica: phase, configuration, recent intervals, and the fault of its metrics, if any."""

    replica: str
    phase: Phase
    instance: str = ""
    age_seconds: float = 0.0
    """Seconds in this phase."""
    config: Config | None = None
    ledger: Ledger | None = None
    gauges: Gauges | None = None
    intervals: tuple[Interval, ...] = ()
    updates: RequestUpdates | None = None
    finding: Finding | None = None
    has_new_interval: bool = False
    has_crashed: bool = False
    """True if its engine ended and started again since the previous sample."""
    was_oom_killed: bool = False
    restarts: int = 0
    """Number of times that the engine has ended in its pod."""
    exit_code: int | None = None
    """Exit code of the last end."""
    start_seconds: float | None = None
    """Start-up seconds; reported once, when it begins to serve."""

    @property
    def is_ready(self) -> bool:
        """True if it serves."""
        return self.phase is Phase.READY

    @property
    def is_trusted(self) -> bool:
        """True if it serves and its metrics are valid."""
        return self.is_ready and self.finding is None and self.config is not None and self.ledger is not None

    def since(self, at: float) -> tuple[Interval, ...]:
        """Return its intervals that began at `at` or later."""
        return tuple(interval for interval in self.intervals if interval.start >= at)


@dataclass(frozen=True, slots=True)
class Observation:
    """All replicas of a deployment at one time, by name."""

    at: float
    replicas: tuple[ReplicaObservation, ...]
    version: int = OBSERVATION_VERSION

    def complete_since(self, now: float) -> float:
        """Return the time since which as many replicas serve as now."""
        return now - min((seen.age_seconds for seen in self.ready), default=0.0)

    @property
    def ready(self) -> tuple[ReplicaObservation, ...]:
        """Replicas that serve."""
        return tuple(seen for seen in self.replicas if seen.is_ready)

    @property
    def trusted(self) -> tuple[ReplicaObservation, ...]:
        """Replicas that serve and have valid metrics."""
        return tuple(seen for seen in self.replicas if seen.is_trusted)

    @property
    def starting(self) -> tuple[ReplicaObservation, ...]:
        """Replicas that are pending or starting."""
        return tuple(seen for seen in self.replicas if seen.phase in (Phase.PENDING, Phase.STARTING))

    @property
    def is_complete(self) -> bool:
        """True if every ready replica is trusted. Lowering memory or replicas needs that."""
        return bool(self.ready) and len(self.trusted) == len(self.ready)

    @property
    def findings(self) -> Mapping[str, Finding]:
        """Faults by replica."""
        return {seen.replica: seen.finding for seen in self.ready if seen.finding is not None}

    def total(self, *, seconds: float | None = None, since: float | None = None) -> Interval | None:
        """Return the total work of trusted replicas in the last `seconds`, or since a time; None if nothing is known.

        Its `seconds` are replica-seconds.
        """
        start = max(-1.0 if seconds is None else self.at - seconds, -1.0 if since is None else since)
        return total_of(part for seen in self.trusted for part in seen.intervals if part.end > start + part.seconds / 2)


def observe(
    tracks: Mapping[str, Track], snapshots: Iterable[ReplicaSnapshot], *, now: float, timeouts: FaultTimeouts
) -> tuple[Observation, dict[str, Track]]:
    """Process one snapshot of each replica. Return the observation and the tracks for the next one."""
    seen: list[ReplicaObservation] = []
    kept: dict[str, Track] = {}
    for snapshot in sorted(snapshots, key=lambda snapshot: snapshot.replica):
        before = tracks.get(snapshot.replica, Track())
        track, finding, is_new = before.follow(snapshot, now=now, timeouts=timeouts)
        kept[snapshot.replica] = track
        is_valid = finding is None and snapshot.phase is Phase.READY
        is_new_sample = is_valid and track.last is not before.last  # each request is reported once
        seen.append(
            ReplicaObservation(
                replica=snapshot.replica,
                phase=snapshot.phase,
                instance=snapshot.instance,
                age_seconds=max(0.0, now - snapshot.since),
                config=snapshot.config,
                ledger=snapshot.ledger,
                gauges=snapshot.sample.gauges if snapshot.sample is not None and is_valid else None,
                intervals=track.intervals if is_valid else (),
                updates=snapshot.sample.requests if snapshot.sample is not None and is_new_sample else None,
                finding=finding,
                has_new_interval=is_new and is_valid,
                has_crashed=before.instance == snapshot.instance
                and snapshot.restarts > before.restarts
                and before.served,
                was_oom_killed=snapshot.was_oom_killed,
                restarts=snapshot.restarts,
                exit_code=snapshot.exit_code,
                start_seconds=track.start_seconds if track.served and not before.served else None,
            )
        )
    return Observation(now, tuple(seen)), kept
