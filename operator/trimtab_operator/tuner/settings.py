"""What the owner asks of the tuner, and how fast it may move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.knobs import Knob, Value, Values
from trimtab_operator.tuner.load.season import BUCKETS_PER_DAY, DAY_SECONDS
from trimtab_operator.tuner.objectives import Objectives
from trimtab_operator.tuner.scaling.behavior import Behavior
from trimtab_operator.tuner.scaling.law import Caution


class Mode(StrEnum):
    """`spec.tuning.mode`."""

    OFF = "Off"
    RECOMMEND = "Recommend"
    AUTO = "Auto"


@dataclass(frozen=True, slots=True)
class Bounds:
    """`spec.tuning.bounds.X`. A missing end is the engine's own; minimum = maximum pins the knob."""

    minimum: Value | None = None
    maximum: Value | None = None


@dataclass(frozen=True, slots=True)
class Seasonal:
    """`spec.scaling.forecast`: after how long the load repeats itself, and in how many parts that is remembered."""

    period_seconds: float = DAY_SECONDS
    buckets: int = BUCKETS_PER_DAY


@dataclass(frozen=True, slots=True)
class Scaling:
    """`spec.scaling`: how many replicas there may be."""

    min_replicas: int
    max_replicas: int
    behavior: Behavior = field(default_factory=Behavior)
    forecast: Seasonal | None = None
    """What arrivals are foretold by; None: by the present load alone."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the tuner may move, and on how much evidence. Seconds, unless the name says otherwise."""

    tick_seconds: float = 15.0
    sample_seconds: float = 0.0  # how often what is looked at changes: Prometheus scrapes at its own pace
    window_seconds: float = 60.0  # evidence older than this says nothing about the load now
    cool_down_seconds: float = 60.0  # between two moves of hot knobs
    pin_seconds: float = 1800.0  # how long a value that did harm is avoided
    quiet_seconds: float = 1800.0  # without preemption before a knob goes back towards its start
    judge_seconds: float = 300.0  # after which a change that did no harm is kept
    least_requests: int = 30  # to judge what users felt by
    crash_budget: int = 2  # crashes above the start values before memory is not raised any more


@dataclass(frozen=True, slots=True)
class Settings:
    """All that the owner and the cluster say. `scaling` None: the replica count is the owner's."""

    mode: Mode
    objectives: Objectives = field(default_factory=Objectives)
    bounds: Mapping[Knob, Bounds] = field(default_factory=dict)
    starts: Values = field(default_factory=dict)
    """Where `spec.engine` has each knob begin; one left out begins at the engine's default."""
    scaling: Scaling | None = None
    prior: StepCost = field(default_factory=lambda: StepCost(0.008, 6e-5, 3e-5, 4e-9))
    """What a step should take by the model's shape and the GPU."""
    cold_start_seconds: float = 120.0
    """Until replicas have been seen to start."""
    pace: Pace = field(default_factory=Pace)
    caution: Caution = field(default_factory=Caution)
