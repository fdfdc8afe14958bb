"""The observation: every replica with its recent past, and what of it can be believed. Decisions rest on it alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trimtab_operator.tuner.observation.faults import Finding
from trimtab_operator.tuner.observation.interval import Interval, total_of
from trimtab_operator.tuner.observation.track import Patience, Track
from trimtab_operator.tuner.samples import Config, Gauges, Ledger, Look, Phase, RequestNews

OBSERVATION_VERSION = 1


@dataclass(frozen=True, slots=True)
class Seen:
    """One replica: what it is, what it did in the last minutes, and what is wrong with its numbers, if anything."""

    replica: str
    phase: Phase
    instance: str = ""
    age_seconds: float = 0.0
    """How long it has been in this phase."""
    config: Config | None = None
    ledger: Ledger | None = None
    gauges: Gauges | None = None
    intervals: tuple[Interval, ...] = ()
    news: RequestNews | None = None
    finding: Finding | None = None
    has_new_interval: bool = False
    has_crashed: bool = False
    """Its engine has ended and begun again since the look before."""
    was_oom_killed: bool = False
    restarts: int = 0
    """How often its engine has ended in its pod."""
    exit_code: int | None = None
    """With which it ended last."""
    start_seconds: float | None = None
    """How long it took to start; told once, when it begins to serve."""

    @property
    def is_ready(self) -> bool:
        """Whether it serves."""
        return self.phase is Phase.READY

    @property
    def is_trusted(self) -> bool:
        """Whether it serves, and its numbers can be believed."""
        return self.is_ready and self.finding is None and self.config is not None and self.ledger is not None

    def since(self, at: float) -> tuple[Interval, ...]:
        """Its intervals that began at `at` or later."""
        return tuple(interval for interval in self.intervals if interval.start >= at)


@dataclass(frozen=True, slots=True)
class Observation:
    """All replicas of a deployment at one moment, in the order of their names."""

    at: float
    replicas: tuple[Seen, ...]
    version: int = OBSERVATION_VERSION

    def complete_since(self, now: float) -> float:
        """Since when as many serve as now."""
        return now - min((seen.age_seconds for seen in self.ready), default=0.0)

    @property
    def ready(self) -> tuple[Seen, ...]:
        """The replicas that serve."""
        return tuple(seen for seen in self.replicas if seen.is_ready)

    @property
    def trusted(self) -> tuple[Seen, ...]:
        """The replicas that serve and can be believed."""
        return tuple(seen for seen in self.replicas if seen.is_trusted)

    @property
    def coming(self) -> tuple[Seen, ...]:
        """The replicas that are placed or load, and will serve."""
        return tuple(seen for seen in self.replicas if seen.phase in (Phase.PENDING, Phase.STARTING))

    @property
    def is_complete(self) -> bool:
        """Whether every replica that serves can be believed: what lowers memory or replicas needs that."""
        return bool(self.ready) and len(self.trusted) == len(self.ready)

    @property
    def findings(self) -> Mapping[str, Finding]:
        """What cannot be believed, by replica."""
        return {seen.replica: seen.finding for seen in self.ready if seen.finding is not None}

    def total(self, *, seconds: float | None = None, since: float | None = None) -> Interval | None:
        """What the believed replicas did together in the last `seconds`, or since a time; None where nothing is known.

        Its own `seconds` are replica-seconds.
        """
        start = max(-1.0 if seconds is None else self.at - seconds, -1.0 if since is None else since)
        return total_of(part for seen in self.trusted for part in seen.intervals if part.end > start + part.seconds / 2)


def observe(
    tracks: Mapping[str, Track], looks: Iterable[Look], *, now: float, patience: Patience
) -> tuple[Observation, dict[str, Track]]:
    """Take in a look at each replica. Returns the observation, and what is remembered for the next one."""
    seen: list[Seen] = []
    kept: dict[str, Track] = {}
    for look in sorted(looks, key=lambda look: look.replica):
        before = tracks.get(look.replica, Track())
        track, finding, is_new = before.follow(look, now=now, patience=patience)
        kept[look.replica] = track
        is_believed = finding is None and look.phase is Phase.READY
        is_news = is_believed and track.last is not before.last  # each request is told once
        seen.append(
            Seen(
                replica=look.replica,
                phase=look.phase,
                instance=look.instance,
                age_seconds=max(0.0, now - look.since),
                config=look.config,
                ledger=look.ledger,
                gauges=look.sample.gauges if look.sample is not None and is_believed else None,
                intervals=track.intervals if is_believed else (),
                news=look.sample.requests if look.sample is not None and is_news else None,
                finding=finding,
                has_new_interval=is_new and is_believed,
                has_crashed=before.instance == look.instance and look.restarts > before.restarts and before.served,
                was_oom_killed=look.was_oom_killed,
                restarts=look.restarts,
                exit_code=look.exit_code,
                start_seconds=track.start_seconds if track.served and not before.served else None,
            )
        )
    return Observation(now, tuple(seen)), kept
