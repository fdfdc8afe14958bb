"""Input of the rules: load, objectives, current parameter values and ranges, and the predictor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.objectives import Objectives
from trimtab_operator.tuner.observation import Interval, Observation
from trimtab_operator.tuner.parameters import Parameter, Value, Values, typed
from trimtab_operator.tuner.prediction import Candidate, Prediction, Predictor
from trimtab_operator.tuner.samples import Ledger
from trimtab_operator.tuner.settings import Bounds, Settings
from trimtab_operator.tuner.state import Pin, TunerState


@dataclass(frozen=True, slots=True)
class Range:
    """Current value of a parameter and the range that bounds, engine limits and pins allow together."""

    current: Value
    lowest: Value
    highest: Value
    is_live: bool

    def allows(self, value: float) -> bool:
        """Return True if the parameter may be set to this value."""
        return self.is_live and self.lowest <= value <= self.highest

    @property
    def can_rise(self) -> float:
        """Distance to the upper limit."""
        return max(0.0, self.highest - self.current) if self.is_live else 0.0


@dataclass(frozen=True, slots=True)
class Situation:
    """Input of the rules."""

    now: float
    settings: Settings
    state: TunerState
    observation: Observation
    window: Interval
    """Total of the trusted replicas over the last minute; its seconds are replica-seconds."""
    ranges: Mapping[Parameter, Range]
    ledger: Ledger
    """Memory ledger of the replica with the smallest KV cache."""
    objectives: Objectives
    cost: StepCost
    predictor: Predictor | None
    """None if too little is known to predict."""
    rate: float
    """Arrival rate of all replicas, requests a second."""
    replicas: int
    """Ready replicas."""
    starting: int
    """Replicas that start."""
    attained: float | None
    """Share of the last minutes' requests that attained the objectives; None if too few."""

    def value(self, parameter: Parameter) -> Value | None:
        """Return a parameter's current value; None if unknown."""
        found = self.ranges.get(parameter)
        return None if found is None else found.current

    @property
    def candidate(self) -> Candidate:
        """The present configuration."""
        return Candidate(
            replicas=max(1, self.replicas),
            max_num_seqs=int(self.value(Parameter.MAX_NUM_SEQS) or 256),
            max_num_batched_tokens=int(self.value(Parameter.MAX_NUM_BATCHED_TOKENS) or 2048),
            kv_blocks=max(1, self.ledger.blocks_total),
            block_size=self.ledger.block_size,
            watermark=float(self.value(Parameter.WATERMARK) or 0.0),
        )

    def with_parameter(self, parameter: Parameter, value: Value) -> Candidate:
        """Return the configuration with one parameter changed."""
        now = self.candidate
        if parameter is Parameter.MAX_NUM_SEQS:
            return replace(now, max_num_seqs=int(value))
        if parameter is Parameter.MAX_NUM_BATCHED_TOKENS:
            return replace(now, max_num_batched_tokens=int(value))
        if parameter is Parameter.WATERMARK:
            return replace(now, watermark=float(value))
        return replace(now, kv_blocks=self.blocks_at(float(value)))

    def blocks_at(self, utilization: float) -> int:
        """Return the number of KV blocks at another gpu_memory_utilization, by the memory ledger."""
        current = self.value(Parameter.GPU_MEMORY_UTILIZATION)
        ledger = self.ledger
        if current is None or ledger.bytes_per_block <= 0:
            return ledger.blocks_total
        change = (utilization - float(current)) * ledger.device_bytes / ledger.bytes_per_block
        return max(1, ledger.blocks_total + int(change))

    def predict(self, candidate: Candidate, rate: float | None = None) -> Prediction | None:
        """Return the prediction for a candidate at `rate`, by default the present rate; None if too little is known."""
        if self.predictor is None or self.rate <= 0:
            return None
        return self.predictor.at(candidate, self.rate if rate is None else rate)

    @property
    def recent_rate(self) -> float:
        """Arrival rate, or that since a clear rise within the last minute (open-loop load only)."""
        if self.state.clients.are_closed_loop:
            return self.rate
        return max(self.rate, self.state.demand.rate_since_rise(self.settings.pace.window_seconds) or 0.0)

    @property
    def quiet_seconds(self) -> float:
        """Seconds without a capacity preemption."""
        since = self.state.quiet_since
        return 0.0 if since is None else self.now - since


def ranges_of(
    observation: Observation, settings: Settings, *, applied: Values, pins: Iterable[Pin]
) -> dict[Parameter, Range]:
    """Intersect the spec's bounds with the limits of every trusted engine, minus pinned values."""
    configs = [seen.config for seen in observation.trusted if seen.config is not None]
    pinned = list(pins)
    ranges: dict[Parameter, Range] = {}
    for parameter in Parameter:
        fields = [config.fields[parameter] for config in configs if parameter in config.fields]
        values = [config.applied[parameter] for config in configs if parameter in config.applied]
        if not fields or len(fields) < len(configs) or not values:
            continue
        bounds = settings.bounds.get(parameter, Bounds())
        lowest = max([field.minimum for field in fields] + ([] if bounds.minimum is None else [bounds.minimum]))
        highest = min([field.maximum for field in fields] + ([] if bounds.maximum is None else [bounds.maximum]))
        for pin in pinned:
            if pin.parameter is parameter and pin.is_upper:
                highest = min(highest, pin.limit)
            elif pin.parameter is parameter:
                lowest = max(lowest, pin.limit)
        current = applied.get(parameter, values[0])
        ranges[parameter] = Range(
            current, typed(parameter, lowest), typed(parameter, highest), all(field.live for field in fields)
        )
    return ranges
