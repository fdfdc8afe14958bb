"""Best target of a baseline, chosen in hindsight: the one that attains the objectives for the fewest GPU-hours.

Real deployments do not know it. GPU-hours and attainment fall as the target grows, so a ladder is bisected, and the
best result is kept.
"""

from __future__ import annotations

from collections.abc import Callable

from trimtab_simulator.experiment import Experiment, is_better, without_timeline
from trimtab_simulator.policies.policy import Policy
from trimtab_simulator.replay import SimulationResult
from trimtab_simulator.scores import Score

LADDER = (0.5, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 90, 128, 180, 256)


def best_target(experiment: Experiment, make: Callable[[float], Policy]) -> tuple[float, SimulationResult]:
    """Return the target, and the result of its replay."""
    trial = without_timeline(experiment)
    seen: dict[int, Score] = {}

    def judged(index: int) -> Score:
        if index not in seen:
            policy = make(LADDER[index])
            seen[index] = trial.judge(policy.name, trial.run(policy))
        return seen[index]

    low, high = 0, len(LADDER) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if trial.attains(judged(middle)):
            low = middle
        else:
            high = middle - 1
    for index in range(low, min(low + 3, len(LADDER))):  # not quite monotone: replicas are whole
        judged(index)
    best: tuple[int, Score] | None = None
    for index, found in seen.items():
        if is_better(found, best[1] if best else None, experiment.objectives.attain):
            best = (index, found)
    assert best is not None
    target = LADDER[best[0]]
    return target, experiment.run(make(target))
