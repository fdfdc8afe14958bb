"""The tuner's state. `TunerState` has a persistent part, written as JSON by `stored`, and one that is learned within
minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from trimtab_operator.tuner.evidence import Evidence
from trimtab_operator.tuner.load import Clients, Demand, Forecast, Growth, Lengths, Sharing
from trimtab_operator.tuner.model import StepTime
from trimtab_operator.tuner.moves import Decision, Expectation
from trimtab_operator.tuner.observation import Track
from trimtab_operator.tuner.parameters import Parameter, Value, Values
from trimtab_operator.tuner.prediction import Predictor
from trimtab_operator.tuner.samples import Unfinished
from trimtab_operator.tuner.scaling.control_law import ScalingState

MAX_HISTORY = 10  # entries in status.tuning.history
KEEP_OUTCOMES_SECONDS = 900.0
MAX_REQUEST_OUTCOMES = 8000
ATTAINMENT_HALF_LIFE_SECONDS = 3600.0
MIN_ATTAINMENT_REQUESTS = 1000.0  # with fewer, one percent is noise


@dataclass(frozen=True, slots=True)
class Pin:
    """A harmful change: until `until` the parameter may not pass `limit`, its earlier value, in that direction.

    Avoiding only `value` would allow ever closer values, which is an oscillation too.
    """

    parameter: Parameter
    value: Value
    limit: Value
    until: float
    is_for_mix: bool = False
    """True if it also ends when the request mix changes."""

    @property
    def is_upper(self) -> bool:
        """Return True if the value had been reached by raising."""
        return self.value > self.limit


@dataclass(frozen=True, slots=True)
class Trial:
    """The last change of a live parameter, until it is judged."""

    decision: str
    parameter: Parameter
    before: Value
    after: Value
    at: float
    expected: tuple[Expectation, ...]
    attained: float | None
    """Share of requests that attained the objectives before it; None if too few."""
    recomputed_share: float
    rate: float


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """Whether one request attained the objectives, by its arrival time."""

    arrived_at: float
    is_met: bool
    seconds: float = 0.0
    """Seconds from arrival to end."""


@dataclass(frozen=True, slots=True)
class AttainmentCounts:
    """Requests that attained and violated the objectives over about the last hour, exponentially weighted."""

    met: float = 0.0
    missed: float = 0.0

    def later(self, seconds: float, *, met: int, missed: int) -> AttainmentCounts:
        """Return the counts after `seconds`, in which these requests ended."""
        fades = 0.5 ** (max(0.0, seconds) / ATTAINMENT_HALF_LIFE_SECONDS)
        return AttainmentCounts(fades * self.met + met, fades * self.missed + missed)

    def error_budget_used(self, share: float) -> float | None:
        """Return the used share of the error budget of an objective with this percentile; 1 is all of it. None with too
        few requests.
        """
        count = self.met + self.missed
        if count < MIN_ATTAINMENT_REQUESTS:
            return None
        return self.missed / count / max(1e-6, 1.0 - share)


@dataclass(frozen=True, slots=True)
class TunerState:
    """State of one deployment."""

    # persistent
    applied: Values = field(default_factory=dict)
    """Values that all engines must run; other parameters run at their start values."""
    starts: Values = field(default_factory=dict)
    """Start values of the spec that `applied` was reached from."""
    moved_at: Mapping[str, float] = field(default_factory=dict)
    """Time of the last change of each target, by name."""
    trial: Trial | None = None
    pins: tuple[Pin, ...] = ()
    crashes: tuple[float, ...] = ()
    """Times of crashes above the start values."""
    raised: Mapping[str, int] = field(default_factory=dict)
    """Engines that got values above the start values, by instance: their restart count at that time."""
    recommendation: Decision | None = None
    history: tuple[Decision, ...] = ()
    """Newest last."""
    scaling: ScalingState = field(default_factory=ScalingState)
    cold_starts: tuple[float, ...] = ()
    """Start-up seconds of the last replicas."""
    evidence: Evidence = field(default_factory=Evidence)
    """Loads that were attained or not."""
    contradicted_at: float | None = None
    """Time when evidence last contradicted a prediction."""
    model: StepTime | None = None
    forecast: Forecast | None = None
    """Forecast of arrivals; its season is persistent, its errors are learned again. None if not requested."""
    # learned again within minutes
    tracks: Mapping[str, Track] = field(default_factory=dict)
    lengths: Lengths = field(default_factory=Lengths)
    running: Mapping[str, tuple[Unfinished, ...]] = field(default_factory=dict)
    """Requests in flight per ready replica, when it was last read."""
    sharing: Sharing = field(default_factory=Sharing)
    demand: Demand = field(default_factory=Demand)
    growth: Growth = field(default_factory=Growth)
    clients: Clients = field(default_factory=Clients)
    request_outcomes: tuple[RequestOutcome, ...] = ()
    """By arrival time."""
    attainment: AttainmentCounts = field(default_factory=AttainmentCounts)
    attainment_at: float | None = None
    predictor: Predictor | None = None
    predictor_key: tuple[object, ...] = ()
    quiet_since: float | None = None
    """Time since which no request was preempted for capacity."""
    kv_uses: tuple[tuple[float, float], ...] = ()
    """KV cache usages since then, by time: each until a higher one follows or it expires. The first is the highest."""
    violated_since: float | None = None
    """Time since which the objectives have been violated without a pause."""

    def with_decision(self, decision: Decision) -> TunerState:
        """Return the state with the decision added to the history."""
        return replace(self, history=(*self.history, decision)[-MAX_HISTORY:])

    def with_value(self, parameter: Parameter, value: Value, now: float) -> TunerState:
        """Return the state in which all engines run this value."""
        return replace(
            self,
            applied={**self.applied, parameter: value},
            moved_at={**self.moved_at, parameter.value: now},
            quiet_since=now,
            kv_uses=(),
        )

    def with_outcome(self, decision: str, outcome: str) -> TunerState:
        """Return the state with the outcome of a decision."""
        return replace(
            self,
            history=tuple(replace(e, outcome=outcome) if e.id == decision else e for e in self.history),
        )

    def with_kv_use(self, now: float, usage: float, *, keep_seconds: float) -> TunerState:
        """Return the state with one more KV cache usage; entries older than `keep_seconds` expire."""
        higher = [(at, seen) for at, seen in self.kv_uses if seen > usage and at > now - keep_seconds]
        return replace(self, kv_uses=(*higher, (now, usage)))

    @property
    def kv_peak(self) -> float:
        """Highest remembered KV cache usage; 0 without one."""
        return self.kv_uses[0][1] if self.kv_uses else 0.0

    @property
    def last_live_move(self) -> float:
        """Time of the last change of a live parameter; -inf if never."""
        return max(
            (self.moved_at.get(parameter.value, float("-inf")) for parameter in Parameter), default=float("-inf")
        )
