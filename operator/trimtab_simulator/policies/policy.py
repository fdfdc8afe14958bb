"""What a policy is asked, and what it may answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from trimtab_simulator.objectives import Objectives
from trimtab_simulator.plant.machine import Machine
from trimtab_simulator.plant.sample import ReplicaView

KNOBS = ("max_num_seqs", "max_num_batched_tokens", "watermark", "gpu_memory_utilization")
"""The live fields that a policy may move, by the engine's names."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What does not change during a replay, and what an operator is told of: its resource and its objectives."""

    machine: Machine
    objectives: Objectives
    min_replicas: int
    max_replicas: int
    cold_start_seconds: float
    seed: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """What can be seen at a tick. Replicas that are gone are not listed. `desired` is the last replica target."""

    now: float
    desired: int
    knobs: Mapping[str, float]
    """The values that all replicas are asked to run."""
    replicas: tuple[ReplicaView, ...]

    @property
    def ready(self) -> list[ReplicaView]:
        """Replicas that serve and were scraped."""
        return [r for r in self.replicas if r.phase == "ready" and r.sample is not None]


@dataclass(frozen=True, slots=True)
class Moves:
    """What to change: a replica target, and knobs of all replicas. What is not named stays."""

    replicas: int | None = None
    knobs: Mapping[str, float] = field(default_factory=dict)


STAY = Moves()


class Policy(Protocol):
    """Asked every `tick_seconds`. It may remember what it likes; one object serves one replay."""

    name: str
    tick_seconds: float

    def decide(self, view: View) -> Moves:
        """What to do now."""
