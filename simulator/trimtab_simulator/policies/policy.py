"""Interface of scaling policies: input and actions."""

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
class PolicySetup:
    """Facts that do not change during a replay and that an operator knows: resource and objectives.

    Of the machine a policy may read model and GPU, not its step times.
    """

    machine: Machine
    objectives: Objectives
    min_replicas: int
    max_replicas: int
    start_replicas: int
    cold_start_seconds: float
    parameters: Values
    """Start values of every engine."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """Observable state at a tick, without removed replicas. `desired` is the last replica target."""

    now: float
    desired: int
    parameters: Values
    """Requested values of all replicas."""
    snapshots: tuple[ReplicaSnapshot, ...]

    @property
    def ready(self) -> list[ReplicaSnapshot]:
        """Snapshots of ready replicas with a sample."""
        return [
            snapshot for snapshot in self.snapshots if snapshot.phase is Phase.READY and snapshot.sample is not None
        ]


@dataclass(frozen=True, slots=True)
class PolicyActions:
    """Changes: a replica target, and parameters of all replicas. Others stay. `why` is for the log."""

    replicas: int | None = None
    parameters: Mapping[Parameter, Value] = field(default_factory=dict)
    why: str = ""
    allowance: Allowance | None = None
    """Allowance of the queue order `deadline` from now on; None keeps the present order."""


STAY = PolicyActions()


class Policy(Protocol):
    """Scaling policy, called every `tick_seconds`. It may keep state; one object is used for one replay."""

    name: str
    tick_seconds: float
    reads_requests: bool
    """True if it reads single requests, which are provided only then because they take time."""

    def decide(self, view: PolicyInput) -> PolicyActions:
        """Return the actions at this tick."""
