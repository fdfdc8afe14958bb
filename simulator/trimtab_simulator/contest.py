"""One trace, one fleet, one set of objectives: everybody is judged on the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from trimtab_operator.tuner.parameters import Parameter, Value

from trimtab_simulator.objectives import Objectives
from trimtab_simulator.plant.fleet import FleetSettings
from trimtab_simulator.policies.fixed import Fixed
from trimtab_simulator.policies.policy import Policy, Setup
from trimtab_simulator.replay import Loop, Schedule, SimulationResult, replay
from trimtab_simulator.scores import Score, score
from trimtab_simulator.trace.arrivals import Trace

Progress = Callable[[str, float], None]
"""(what is being done, share of it that is done)."""


def silent(what: str, share: float) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Contest:
    """The field on which policies meet."""

    trace: Trace
    settings: FleetSettings
    loop: Loop
    objectives: Objectives
    progress: Progress = silent

    @property
    def setup(self) -> Setup:
        """What a policy is told."""
        settings = self.settings
        return Setup(
            machine=settings.machine,
            objectives=self.objectives,
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            start_replicas=settings.start_replicas,
            cold_start_seconds=settings.cold_start_seconds,
            parameters=settings.parameters,
            seed=self.loop.seed,
        )

    @property
    def with_queues_ordered(self) -> Contest:
        """The same, its engines serving those first from the start who can still have their first token in time."""
        allowance = self.objectives.allowance
        return replace(self, settings=replace(self.settings, allowance=allowance))

    def with_parameters(self, parameters: Mapping[Parameter, Value]) -> Contest:
        """The same with other knobs at the start."""
        changed = dict(self.settings.parameters) | dict(parameters)
        changed[Parameter.MAX_NUM_SEQS] = min(
            changed[Parameter.MAX_NUM_SEQS], changed[Parameter.MAX_NUM_BATCHED_TOKENS]
        )
        return replace(self, settings=replace(self.settings, parameters=changed))

    def with_replicas(self, start: int) -> Contest:
        """The same with other replicas at the start."""
        settings = replace(self.settings, start_replicas=start, max_replicas=max(start, self.settings.max_replicas))
        return replace(self, settings=settings)

    def play(self, policy: Policy, *, schedule: Schedule = ()) -> SimulationResult:
        """Replay the whole trace under the policy."""

        def told(at: float) -> None:
            self.progress(policy.name, at / self.trace.seconds if self.trace.seconds else 1.0)

        return replay(self.trace, policy, self.settings, self.loop, schedule=schedule, progress=told)

    def play_fixed(self, name: str = "static", *, schedule: Schedule = ()) -> SimulationResult:
        """Replay the whole trace with nobody steering, but for a schedule that is known beforehand."""
        return self.play(Fixed(name), schedule=schedule)

    def judge(self, name: str, outcome: SimulationResult) -> Score:
        """Score an outcome by the contest's objectives."""
        return score(name, outcome, self.objectives)

    def attains(self, judged: Score) -> bool:
        """Whether as many requests as were asked for met their targets."""
        return judged.attainment >= self.objectives.attain


def is_better(one: Score, other: Score | None, attain: float) -> bool:
    """Whether `one` is the one to prefer: whoever attains, then the fewer hours; of those that do not, who attains
    more."""
    if other is None:
        return True
    return _rank(one, attain) < _rank(other, attain)


def _rank(judged: Score, attain: float) -> tuple[float, float, float]:
    if judged.attainment >= attain:
        return 0.0, judged.gpu_hours, -judged.attainment
    return 1.0, -judged.attainment, judged.gpu_hours


def quiet(loop: Loop) -> Loop:
    """The loop without plots, for searches."""
    return replace(loop, moment_seconds=math.inf)
