"""One replica followed from look to look: its intervals, and since when something about it has been odd."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.observation.faults import Finding, contradiction, is_out_of_step
from trimtab_operator.tuner.observation.interval import Interval, between, nothing_yet
from trimtab_operator.tuner.samples import Counters, Look, Phase, Sample

KEEP_SECONDS = 600.0  # of intervals: the longest window that anything is judged on
CLOCK_STEP_SECONDS = 5.0  # a sample that much older than the one before was stamped by a clock that was set back


@dataclass(frozen=True, slots=True)
class Patience:
    """How long odd things are waited for. Seconds."""

    stale_seconds: float = 45.0  # three scrapes of 15 s
    frozen_seconds: float = 45.0
    out_of_step_seconds: float = 45.0

    @classmethod
    def for_tick(cls, tick_seconds: float) -> Patience:
        """Three looks, and no less than 30 s: engines are busy at times."""
        seconds = max(30.0, 3 * tick_seconds)
        return cls(seconds, seconds, seconds)


@dataclass(frozen=True, slots=True)
class Track:
    """What is remembered of one replica between looks. It is rebuilt within minutes and never written anywhere."""

    instance: str = ""
    restarts: int = 0
    last: Sample | None = None
    intervals: tuple[Interval, ...] = ()
    moved_at: float | None = None
    """When a counter last grew, or the replica was idle."""
    out_of_step_since: float | None = None
    served: bool = False
    """It has been ready under this instance."""
    coming_since: float | None = None
    """When it was first seen coming, while it has not served yet."""
    start_seconds: float | None = None
    """How long it took to start, once it serves."""

    def follow(self, look: Look, *, now: float, patience: Patience) -> tuple[Track, Finding | None, bool]:
        """Take in one look. Returns the new track, what cannot be believed, and whether its last interval is new."""
        track = self._renewed(look)
        if look.phase is not Phase.READY:
            is_coming = look.phase in (Phase.PENDING, Phase.STARTING)
            if is_coming and track.coming_since is None:
                track = replace(track, coming_since=look.since or now)
            return track, None, False
        if not track.served and track.coming_since is not None:
            track = replace(track, start_seconds=max(0.0, (look.since or now) - track.coming_since))
        track = replace(track, served=True)
        if look.sample is None or look.config is None or look.ledger is None:
            return track, Finding(look.problem_reason, look.problem or "could not be read"), False
        sample = look.sample
        wrong = contradiction(sample, look.ledger, now=now)
        if wrong is not None:
            return track, Finding(Reason.METRICS_INCONSISTENT, wrong), False
        track, is_new = track._begun(look, now)._extended(sample, now)
        if now - sample.at > patience.stale_seconds:
            return track, Finding(Reason.METRICS_STALE, f"metrics are older than {patience.stale_seconds:g} s"), False
        moved = track.moved_at if track.moved_at is not None else now
        if now - moved > patience.frozen_seconds:
            said = f"requests are there, and no counter has moved for {patience.frozen_seconds:g} s"
            return track, Finding(Reason.METRICS_FROZEN, said), False
        if not is_out_of_step(sample, look.config):
            return replace(track, out_of_step_since=None), None, is_new
        since = now if track.out_of_step_since is None else track.out_of_step_since
        track = replace(track, out_of_step_since=since)
        if now - since > patience.out_of_step_seconds:
            said = f"metrics and configuration differ in generation for over {patience.out_of_step_seconds:g} s"
            return track, Finding(Reason.METRICS_OUT_OF_STEP, said), False
        return track, None, is_new

    def _begun(self, look: Look, now: float) -> Track:
        """One that was seen to start counts from zero: what it got since it serves belongs to it, although it is read
        for the first time. Of one that served before it was watched nobody knows when."""
        sample = look.sample
        if self.last is not None or self.start_seconds is None or sample is None or not 0 < look.since < sample.at:
            return self
        return replace(self, last=nothing_yet(sample, look.since), moved_at=now)

    def _renewed(self, look: Look) -> Track:
        """Begin anew with another pod, or another engine in the same pod."""
        if look.instance == self.instance and look.restarts <= self.restarts:
            return self
        return Track(instance=look.instance, restarts=look.restarts)

    def _extended(self, sample: Sample, now: float) -> tuple[Track, bool]:
        """Add what happened since the last sample. A repeated sample changes nothing, a fall of counters begins anew,
        and so does a clock that was set back."""
        last = self.last
        if last is None:
            return replace(self, last=sample, moved_at=now), False
        if sample.at <= last.at:
            if last.at - sample.at > CLOCK_STEP_SECONDS and now >= sample.at:
                return replace(self, last=sample, intervals=(), moved_at=now), False
            return self, False
        interval = between(last, sample)
        moved = self.moved_at
        if interval is None or has_moved(last.counters, sample.counters) or not _has_requests(sample):
            moved = now
        if interval is None:
            return replace(self, last=sample, intervals=(), moved_at=moved), False
        kept = tuple(old for old in self.intervals if old.end >= sample.at - KEEP_SECONDS)
        return replace(self, last=sample, intervals=(*kept, interval), moved_at=moved), True


def has_moved(old: Counters, new: Counters) -> bool:
    """Whether the engine did anything: a step, a token, the end of a request."""
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
