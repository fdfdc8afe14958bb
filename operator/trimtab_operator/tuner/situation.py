"""What the rules decide on: the load, the promises, where each knob stands and how far it may go, and foresight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.knobs import Knob, Value, Values, typed
from trimtab_operator.tuner.objectives import Objectives
from trimtab_operator.tuner.observation import Interval, Observation
from trimtab_operator.tuner.prediction import Candidate, Foresight, Prediction
from trimtab_operator.tuner.samples import Ledger
from trimtab_operator.tuner.settings import Bounds, Settings
from trimtab_operator.tuner.state import Memory, Pin


@dataclass(frozen=True, slots=True)
class Range:
    """Where a knob stands and how far it may go: bounds, envelope and pins together."""

    current: Value
    lowest: Value
    highest: Value
    is_live: bool

    def holds_load(self, value: float) -> bool:
        """Whether the knob may be set to this."""
        return self.is_live and self.lowest <= value <= self.highest

    @property
    def can_rise(self) -> float:
        """How much further up it may go."""
        return max(0.0, self.highest - self.current) if self.is_live else 0.0

    @property
    def can_fall(self) -> float:
        """How much further down it may go."""
        return max(0.0, self.current - self.lowest) if self.is_live else 0.0


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything that a rule may look at."""

    now: float
    settings: Settings
    memory: Memory
    observation: Observation
    window: Interval
    """What the believed replicas did in the last minute, together: its seconds are replica-seconds."""
    ranges: Mapping[Knob, Range]
    ledger: Ledger
    """The ledger of the replica with the least KV."""
    objectives: Objectives
    cost: StepCost
    foresight: Foresight | None
    """None: too little is known to predict."""
    rate: float
    """Requests a second that come now, in all."""
    replicas: int
    """That serve now."""
    coming: int
    """That start."""
    attained: float | None
    """Share of the last minutes' requests that kept their promises; None: too few to say."""

    def value(self, knob: Knob) -> Value | None:
        """Where a knob stands."""
        found = self.ranges.get(knob)
        return None if found is None else found.current

    @property
    def candidate(self) -> Candidate:
        """What runs now."""
        return Candidate(
            replicas=max(1, self.replicas),
            max_num_seqs=int(self.value(Knob.MAX_NUM_SEQS) or 256),
            max_num_batched_tokens=int(self.value(Knob.MAX_NUM_BATCHED_TOKENS) or 2048),
            kv_blocks=max(1, self.ledger.blocks_total),
            block_size=self.ledger.block_size,
            watermark=float(self.value(Knob.WATERMARK) or 0.0),
        )

    def with_knob(self, knob: Knob, value: Value) -> Candidate:
        """What would run with one knob moved."""
        now = self.candidate
        if knob is Knob.MAX_NUM_SEQS:
            return replace(now, max_num_seqs=int(value))
        if knob is Knob.MAX_NUM_BATCHED_TOKENS:
            return replace(now, max_num_batched_tokens=int(value))
        if knob is Knob.WATERMARK:
            return replace(now, watermark=float(value))
        return replace(now, kv_blocks=self.blocks_at(float(value)))

    def blocks_at(self, utilization: float) -> int:
        """KV blocks with another share of the device, by the ledger."""
        current = self.value(Knob.GPU_MEMORY_UTILIZATION)
        ledger = self.ledger
        if current is None or ledger.bytes_per_block <= 0:
            return ledger.blocks_total
        change = (utilization - float(current)) * ledger.device_bytes / ledger.bytes_per_block
        return max(1, ledger.blocks_total + int(change))

    def predicted(self, candidate: Candidate, rate: float | None = None) -> Prediction | None:
        """What users of a candidate would feel at the present rate, or at this one; None where too little is known."""
        if self.foresight is None or self.rate <= 0:
            return None
        return self.foresight.at(candidate, self.rate if rate is None else rate)

    @property
    def risen_rate(self) -> float:
        """The present rate; of a stream that has risen within the last minute, the one to which it has."""
        risen = self.memory.demand.risen(self.settings.pace.window_seconds)
        return self.rate if risen is None or self.memory.clients.do_wait else max(self.rate, risen)

    @property
    def quiet_seconds(self) -> float:
        """For how long nothing was preempted for room."""
        since = self.memory.quiet_since
        return 0.0 if since is None else self.now - since


def ranges_of(
    observation: Observation, settings: Settings, *, applied: Values, pins: Iterable[Pin]
) -> dict[Knob, Range]:
    """Intersect the owner's bounds with what every believed engine allows now, less what is pinned."""
    configs = [seen.config for seen in observation.trusted if seen.config is not None]
    pinned = list(pins)
    ranges: dict[Knob, Range] = {}
    for knob in Knob:
        fields = [config.fields[knob] for config in configs if knob in config.fields]
        values = [config.applied[knob] for config in configs if knob in config.applied]
        if not fields or len(fields) < len(configs) or not values:
            continue
        bounds = settings.bounds.get(knob, Bounds())
        lowest = max([field.minimum for field in fields] + ([] if bounds.minimum is None else [bounds.minimum]))
        highest = min([field.maximum for field in fields] + ([] if bounds.maximum is None else [bounds.maximum]))
        for pin in pinned:
            if pin.knob is knob and pin.is_upper:
                highest = min(highest, pin.limit)
            elif pin.knob is knob:
                lowest = max(lowest, pin.limit)
        current = applied.get(knob, values[0])
        ranges[knob] = Range(current, typed(knob, lowest), typed(knob, highest), all(field.live for field in fields))
    return ranges
