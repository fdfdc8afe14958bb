"""Tuner settings from the resource, and the tuner's own pace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.load.season import BUCKETS_PER_DAY, DAY_SECONDS
from trimtab_operator.tuner.objectives import Objectives
from trimtab_operator.tuner.parameters import Parameter, Value, Values
from trimtab_operator.tuner.scaling.behavior import Behavior
from trimtab_operator.tuner.scaling.control_law import Caution


class Mode(StrEnum):
    """`spec.tuning.mode`."""

    OFF = "Off"
    RECOMMEND = "Recommend"
    AUTO = "Auto"


@dataclass(frozen=True, slots=True)
class Bounds:
    """`spec.tuning.bounds.X`. A missing end is the engine's own limit; minimum = maximum pins the parameter."""

    minimum: Value | None = None
    maximum: Value | None = None


@dataclass(frozen=True, slots=True)
class Seasonal:
    """`spec.scaling.forecast`: period of the load, and the number of buckets that it is learned in."""

    period_seconds: float = DAY_SECONDS
    buckets: int = BUCKETS_PER_DAY


@dataclass(frozen=True, slots=True)
class Scaling:
    """`spec.scaling`: replica bounds, rates and forecast."""

    min_replicas: int
    max_replicas: int
    behavior: Behavior = field(default_factory=Behavior)
    forecast: Seasonal | None = None
    """Season for the forecast of arrivals; None uses only the present load."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Intervals and evidence that the tuner needs. Seconds, unless the name says otherwise."""

    tick_seconds: float = 15.0
    sample_seconds: float = 0.0  # interval of new samples: Prometheus scrapes at its own interval
    window_seconds: float = 60.0  # older evidence says nothing about the present load
    cool_down_seconds: float = 60.0  # between two changes of live parameters
    pin_seconds: float = 1800.0  # during which a harmful value is avoided
    useless_seconds: float = 6 * 3600.0  # during which a change without its predicted effect is not made again
    quiet_seconds: float = 1800.0  # without preemption before a parameter returns towards its start value
    judge_seconds: float = 300.0  # after which a harmless change is kept
    least_requests: int = 30  # needed to judge attainment
    crash_budget: int = 2  # crashes above the start values before memory is not raised any more

    @property
    def sampling_seconds(self) -> float:
        """Expected interval of new samples."""
        return max(self.tick_seconds, self.sample_seconds)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings from the resource and the cluster. `scaling` None: `spec.replicas` sets the count."""

    mode: Mode
    objectives: Objectives = field(default_factory=Objectives)
    bounds: Mapping[Parameter, Bounds] = field(default_factory=dict)
    starts: Values = field(default_factory=dict)
    """Start value of each parameter from `spec.engine`; others start at the engine's default."""
    scaling: Scaling | None = None
    prior: StepCost = field(default_factory=lambda: StepCost(0.008, 6e-5, 3e-5, 4e-9))
    """Predicted step time from the model's shape and the GPU."""
    cold_start_seconds: float = 120.0
    """Used until replica starts have been observed."""
    pace: Pace = field(default_factory=Pace)
    caution: Caution = field(default_factory=Caution)
