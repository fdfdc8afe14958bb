"""One replica followed over samples: its intervals, and since when its metrics have been faulty."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.observation.faults import (
    Finding,
    find_contradiction,
    find_missing_rank,
    has_generation_mismatch,
    has_unexplained_arrivals,
)
from trimtab_operator.tuner.observation.interval import Interval, interval_between, zero_sample
from trimtab_operator.tuner.samples import Counters, Phase, ReplicaSnapshot, Sample

KEEP_SECONDS = 600.0  # of intervals: the longest evaluation window
CLOCK_STEP_SECONDS = 5.0  # a sample older than its predecessor by more has a clock that was set back


@dataclass(frozen=True, slots=True)
class FaultTimeouts:
    """Seconds after which a condition counts as a fault."""

    stale_seconds: float = 45.0  # three scrapes of 15 s
    frozen_seconds: float = 45.0
    mismatch_seconds: float = 45.0

    @classmethod
    def for_tick(cls, tick_seconds: float) -> FaultTimeouts:
        """Three samples, and at least 30 s because engines are busy at times."""
        seconds = max(30.0, 3 * tick_seconds)
        return cls(seconds, seconds, seconds)


@dataclass(frozen=True, slots=True)
class Track:
    """State of one replica between samples. It is rebuilt within minutes and never persisted."""

    instance: str = ""
    restarts: int = 0
    last: Sample | None = None
    intervals: tuple[Interval, ...] = ()
    moved_at: float | None = None
    """Time when a counter last grew, or the replica was idle."""
    mismatch_since: float | None = None
    served: bool = False
    """True if it has been ready under this instance."""
    starting_since: float | None = None
    """Time when it was first seen starting, until it serves."""
    start_seconds: float | None = None
    """Start-up seconds, once it serves."""

    def follow(
        self, snapshot: ReplicaSnapshot, *, now: float, timeouts: FaultTimeouts
    ) -> tuple[Track, Finding | None, bool]:
        """Process one snapshot. Return the new track, the fault if any, and whether the last interval is new."""
        track = self._for_instance(snapshot)
        if snapshot.phase is not Phase.READY:
            is_starting = snapshot.phase in (Phase.PENDING, Phase.STARTING)
            if is_starting and track.starting_since is None:
                track = replace(track, starting_since=snapshot.since or now)
            return track, None, False
        if not track.served and track.starting_since is not None:
            track = replace(track, start_seconds=max(0.0, (snapshot.since or now) - track.starting_since))
        track = replace(track, served=True)
        if snapshot.sample is None or snapshot.config is None or snapshot.ledger is None:
            return track, Finding(snapshot.problem_reason, snapshot.problem or "the metrics could not be read"), False
        sample = snapshot.sample
        wrong = find_contradiction(sample, snapshot.ledger, snapshot.config, now=now)
        if wrong is None and track.last is not None:
            wrong = find_missing_rank(track.last, sample)
        if wrong is not None:
            return track, Finding(Reason.METRICS_INCONSISTENT, wrong), False
        if track.last is not None and track.last.at < sample.at and has_unexplained_arrivals(track.last, sample):
            track = replace(track, last=sample, moved_at=now)  # the next interval begins after the jump
            wrong = "more requests arrived than ended or are in flight"
            return track, Finding(Reason.METRICS_INCONSISTENT, wrong), False
        track, is_new = track._with_zero_start(snapshot, now)._with_sample(sample, now)
        if now - sample.at > timeouts.stale_seconds:
            return track, Finding(Reason.METRICS_STALE, f"metrics are older than {timeouts.stale_seconds:g} s"), False
        moved = track.moved_at if track.moved_at is not None else now
        if now - moved > timeouts.frozen_seconds:
            message = f"requests are in flight, but no counter has changed for {timeouts.frozen_seconds:g} s"
            return track, Finding(Reason.METRICS_FROZEN, message), False
        if not has_generation_mismatch(sample, snapshot.config):
            return replace(track, mismatch_since=None), None, is_new
        since = now if track.mismatch_since is None else track.mismatch_since
        track = replace(track, mismatch_since=since)
        if now - since > timeouts.mismatch_seconds:
            message = f"metrics and configuration have had different generations for {timeouts.mismatch_seconds:g} s"
            return track, Finding(Reason.METRICS_GENERATION_MISMATCH, message), False
        return track, None, is_new

    def _with_zero_start(self, snapshot: ReplicaSnapshot, now: float) -> Track:
        """Start the counters of a replica that was observed to start at zero, so that its first interval begins when it
        served. The start of other replicas is unknown.
        """
        sample = snapshot.sample
        if self.last is not None or self.start_seconds is None or sample is None or not 0 < snapshot.since < sample.at:
            return self
        return replace(self, last=zero_sample(sample, snapshot.since), moved_at=now)

    def _for_instance(self, snapshot: ReplicaSnapshot) -> Track:
        """Reset for another pod, or another engine in the same pod."""
        if snapshot.instance == self.instance and snapshot.restarts <= self.restarts:
            return self
        return Track(instance=snapshot.instance, restarts=snapshot.restarts)

    def _with_sample(self, sample: Sample, now: float) -> tuple[Track, bool]:
        """Add the interval since the last sample. A repeated sample changes nothing; falling counters and a clock set
        back reset the intervals.
        """
        last = self.last
        if last is None:
            return replace(self, last=sample, moved_at=now), False
        if sample.at <= last.at:
            if last.at - sample.at > CLOCK_STEP_SECONDS and now >= sample.at:
                return replace(self, last=sample, intervals=(), moved_at=now), False
            return self, False
        if last.ranks and sample.ranks - last.ranks:
            return replace(self, last=sample, moved_at=now), False  # a new series counts from its first value
        interval = interval_between(last, sample)
        moved = self.moved_at
        if interval is None or has_moved(last.counters, sample.counters) or not _has_requests(sample):
            moved = now
        if interval is None:
            return replace(self, last=sample, intervals=(), moved_at=moved), False
        kept = tuple(old for old in self.intervals if old.end >= sample.at - KEEP_SECONDS)
        return replace(self, last=sample, intervals=(*kept, interval), moved_at=moved), True


def has_moved(old: Counters, new: Counters) -> bool:
    """Return True if the engine did anything: a step, a token, the end of a request."""
    if (new.generated_tokens, new.prompt_tokens, new.finished) != (
        old.generated_tokens,
        old.prompt_tokens,
        old.finished,
    ):
        return True
    return any(
        one is not None and two is not None and two.steps != one.steps
        for one, two in ((old.decode, new.decode), (old.prefill, new.prefill))
    )


def _has_requests(sample: Sample) -> bool:
    return sample.gauges.running > 0 or sample.gauges.waiting > 0
