"""What the tuner remembers. `Memory` has a lasting part, written as JSON by `stored`, and one that is learned anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from trimtab_operator.tuner.knobs import Knob, Value, Values
from trimtab_operator.tuner.load import Clients, Demand, Forecast, Growth, Lengths
from trimtab_operator.tuner.model import StepTime
from trimtab_operator.tuner.moves import Decision, Expectation
from trimtab_operator.tuner.observation import Track
from trimtab_operator.tuner.prediction import Foresight
from trimtab_operator.tuner.samples import Unfinished
from trimtab_operator.tuner.scaling.law import ScalingMemory

MAX_HISTORY = 10  # entries in status.tuning.history
KEEP_FELT_SECONDS = 900.0
MAX_FELT = 8000
KEPT_HALF_LIFE_SECONDS = 3600.0
LEAST_KEPT = 1000.0  # requests: of fewer, a hundredth says nothing


@dataclass(frozen=True, slots=True)
class Pin:
    """A change that did harm: until `until` the knob is not moved past `limit`, where it had been, that way.

    Not only `value` itself is avoided: trying ever closer ones would be an oscillation with a new name.
    """

    knob: Knob
    value: Value
    limit: Value
    until: float

    @property
    def is_upper(self) -> bool:
        """Whether the value had been reached by raising."""
        return self.value > self.limit


@dataclass(frozen=True, slots=True)
class Trial:
    """The last move of a hot knob, until it has been judged."""

    decision: str
    knob: Knob
    before: Value
    after: Value
    at: float
    expected: tuple[Expectation, ...]
    attained: float | None
    """Share of requests that kept their promises before it; None: too few to say."""
    recomputed_share: float
    rate: float


@dataclass(frozen=True, slots=True)
class Felt:
    """Whether one request kept its promises, by when it came."""

    arrived_at: float
    is_met: bool
    seconds: float = 0.0
    """From its arrival to its end."""


@dataclass(frozen=True, slots=True)
class Kept:
    """How many requests kept their promises and how many did not, over about the last hour: older ones fade."""

    met: float = 0.0
    missed: float = 0.0

    def later(self, seconds: float, *, met: int, missed: int) -> Kept:
        """After so many seconds, in which these ended."""
        fades = 0.5 ** (max(0.0, seconds) / KEPT_HALF_LIFE_SECONDS)
        return Kept(fades * self.met + met, fades * self.missed + missed)

    def spent(self, share: float) -> float | None:
        """How much of the misses that a promise to this share allows was used: 1 is all. None: too few to say."""
        count = self.met + self.missed
        if count < LEAST_KEPT:
            return None
        return self.missed / count / max(1e-6, 1.0 - share)


@dataclass(frozen=True, slots=True)
class Memory:
    """Everything that is remembered of one deployment."""

    # what lasts
    applied: Values = field(default_factory=dict)
    """Values that all engines must run; a knob that is not named runs at its start."""
    starts: Values = field(default_factory=dict)
    """The owner's start values that `applied` was reached from."""
    moved_at: Mapping[str, float] = field(default_factory=dict)
    """When each target was last moved, by name."""
    trial: Trial | None = None
    pins: tuple[Pin, ...] = ()
    crashes: tuple[float, ...] = ()
    """When engines crashed above the start values."""
    raised: Mapping[str, int] = field(default_factory=dict)
    """Engines that were told values above the start ones, by their instance: how often each had ended until then."""
    recommendation: Decision | None = None
    history: tuple[Decision, ...] = ()
    """Newest last."""
    scaling: ScalingMemory = field(default_factory=ScalingMemory)
    cold_starts: tuple[float, ...] = ()
    """Seconds that the last replicas took to start."""
    model: StepTime | None = None
    forecast: Forecast | None = None
    """Of arrivals; its season lasts, what proves it is learned anew. None: nobody asks for it."""
    # what is learned anew within minutes
    tracks: Mapping[str, Track] = field(default_factory=dict)
    lengths: Lengths = field(default_factory=Lengths)
    running: Mapping[str, tuple[Unfinished, ...]] = field(default_factory=dict)
    """What ran in each replica that serves when it was last read."""
    demand: Demand = field(default_factory=Demand)
    growth: Growth = field(default_factory=Growth)
    clients: Clients = field(default_factory=Clients)
    felt: tuple[Felt, ...] = ()
    """In the order of arrival."""
    kept: Kept = field(default_factory=Kept)
    kept_at: float | None = None
    foresight: Foresight | None = None
    foresight_key: tuple[object, ...] = ()
    quiet_since: float | None = None
    """No request was preempted for room since then."""
    kv_uses: tuple[tuple[float, float], ...] = ()
    """Shares of the KV cache in use since then, by when they were seen: each until one as high came, or it is older
    than what counts as long. The first is the highest."""
    missed_since: float | None = None
    """Promises have been missed since then, without a pause."""

    def with_decision(self, decision: Decision) -> Memory:
        """Remember it in the history."""
        return replace(self, history=(*self.history, decision)[-MAX_HISTORY:])

    def with_value(self, knob: Knob, value: Value, now: float) -> Memory:
        """Have all engines run this value from now on."""
        return replace(
            self,
            applied={**self.applied, knob: value},
            moved_at={**self.moved_at, knob.value: now},
            quiet_since=now,
            kv_uses=(),
        )

    def with_outcome(self, decision: str, outcome: str) -> Memory:
        """Write down what came of a decision."""
        return replace(
            self,
            history=tuple(replace(e, outcome=outcome) if e.id == decision else e for e in self.history),
        )

    def with_kv_use(self, now: float, usage: float, *, keep_seconds: float) -> Memory:
        """After one more look at the caches; what is older than `keep_seconds` says nothing any more."""
        higher = [(at, seen) for at, seen in self.kv_uses if seen > usage and at > now - keep_seconds]
        return replace(self, kv_uses=(*higher, (now, usage)))

    @property
    def kv_peak(self) -> float:
        """The highest share of the KV cache in use that is remembered; 0 before a look."""
        return self.kv_uses[0][1] if self.kv_uses else 0.0

    @property
    def last_hot_move(self) -> float:
        """When a hot knob was last moved; long ago if never."""
        return max((self.moved_at.get(knob.value, float("-inf")) for knob in Knob), default=float("-inf"))
