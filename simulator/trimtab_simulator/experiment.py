"""One trace, one fleet and one set of objectives, so that all policies are compared under equal conditions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from trimtab_operator.tuner.parameters import Parameter, Value

from trimtab_simulator.objectives import Objectives
from trimtab_simulator.plant.fleet import FleetSettings
from trimtab_simulator.policies.fixed import Fixed
from trimtab_simulator.policies.policy import Policy, PolicySetup
from trimtab_simulator.replay import ReplaySettings, Schedule, SimulationResult, replay
from trimtab_simulator.scores import Score, score
from trimtab_simulator.trace.arrivals import Trace

Progress = Callable[[str, float], None]
"""(name of the step, completed share)."""


def ignore_progress(what: str, share: float) -> None:
    """Ignore a progress report."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """Trace, fleet and objectives under which policies are compared."""

    trace: Trace
    settings: FleetSettings
    loop: ReplaySettings
    objectives: Objectives
    progress: Progress = ignore_progress

    @property
    def setup(self) -> PolicySetup:
        """Fixed facts that a policy receives."""
        settings = self.settings
        return PolicySetup(
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
    def with_queues_ordered(self) -> Experiment:
        """Return the experiment with engines that use the queue order `deadline` from the start."""
        allowance = self.objectives.allowance
        return replace(self, settings=replace(self.settings, allowance=allowance))

    def with_parameters(self, parameters: Mapping[Parameter, Value]) -> Experiment:
        """Return the experiment with other start values."""
        changed = dict(self.settings.parameters) | dict(parameters)
        changed[Parameter.MAX_NUM_SEQS] = min(
            changed[Parameter.MAX_NUM_SEQS], changed[Parameter.MAX_NUM_BATCHED_TOKENS]
        )
        return replace(self, settings=replace(self.settings, parameters=changed))

    def with_replicas(self, start: int) -> Experiment:
        """Return the experiment with another number of start replicas."""
        settings = replace(self.settings, start_replicas=start, max_replicas=max(start, self.settings.max_replicas))
        return replace(self, settings=settings)

    def run(self, policy: Policy, *, schedule: Schedule = ()) -> SimulationResult:
        """Replay the whole trace under the policy."""

        def report_progress(at: float) -> None:
            self.progress(policy.name, at / self.trace.seconds if self.trace.seconds else 1.0)

        return replay(self.trace, policy, self.settings, self.loop, schedule=schedule, progress=report_progress)

    def run_fixed(self, name: str = "static", *, schedule: Schedule = ()) -> SimulationResult:
        """Replay the whole trace without a policy, with replica targets only from `schedule`."""
        return self.run(Fixed(name), schedule=schedule)

    def judge(self, name: str, outcome: SimulationResult) -> Score:
        """Return the score of a result by the experiment's objectives."""
        return score(name, outcome, self.objectives)

    def attains(self, judged: Score) -> bool:
        """Return True if the wanted share of requests attained the objectives."""
        return judged.attainment >= self.objectives.attain


def is_better(one: Score, other: Score | None, attain: float) -> bool:
    """Return True if `one` is better: first by attaining the objectives, then by fewer GPU-hours; otherwise by higher
    attainment.
    """
    if other is None:
        return True
    return _rank(one, attain) < _rank(other, attain)


def _rank(judged: Score, attain: float) -> tuple[float, float, float]:
    if judged.attainment >= attain:
        return 0.0, judged.gpu_hours, -judged.attainment
    return 1.0, -judged.attainment, judged.gpu_hours


def without_timeline(experiment: Experiment) -> Experiment:
    """Return the experiment without a timeline for plots, which makes it faster."""
    return replace(experiment, loop=replace(experiment.loop, timeline_interval_seconds=math.inf))
