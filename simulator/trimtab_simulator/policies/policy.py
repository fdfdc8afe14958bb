"""What a policy is asked, and what it may answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from trimtab_operator.tuner.engine_model import Allowance
from trimtab_operator.tuner.parameters import Parameter, Value, Values
from trimtab_operator.tuner.samples import Phase, ReplicaSnapshot

from trimtab_simulator.objectives import Objectives
from trimtab_simulator.plant.machine import Machine


@dataclass(frozen=True, slots=True)
class Setup:
    """What does not change during a replay, and what an operator is told of: its resource and its objectives.

    Of the machine a policy may read what the model and the GPU are, not how long its steps take.
    """

    machine: Machine
    objectives: Objectives
    min_replicas: int
    max_replicas: int
    start_replicas: int
    cold_start_seconds: float
    parameters: Values
    """Where every engine starts."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """What can be seen at a tick. Replicas that are gone are not listed. `desired` is the last replica target."""

    now: float
    desired: int
    parameters: Values
    """The values that all replicas are asked to run."""
    snapshots: tuple[ReplicaSnapshot, ...]

    @property
    def ready(self) -> list[ReplicaSnapshot]:
        """Looks at replicas that serve, with a sample."""
        return [
            snapshot for snapshot in self.snapshots if snapshot.phase is Phase.READY and snapshot.sample is not None
        ]


@dataclass(frozen=True, slots=True)
class PolicyActions:
    """What to change: a replica target, and knobs of all replicas. What is not named stays. `why` is for the log."""

    replicas: int | None = None
    parameters: Mapping[Parameter, Value] = field(default_factory=dict)
    why: str = ""
    allowance: Allowance | None = None
    """What engines are to order their queues by from now on (order `deadline`); None: what they do."""


STAY = PolicyActions()


class Policy(Protocol):
    """Asked every `tick_seconds`. It may remember what it likes; one object serves one replay."""

    name: str
    tick_seconds: float
    reads_requests: bool
    """Whether it looks at single requests: they are told only then, as they take time."""

    def decide(self, view: View) -> PolicyActions:
        """What to do now."""
