"""A rival's one target, chosen in hindsight: the one that attains the objectives for the fewest hours.

That is more than any of them is told in life. Hours fall and attainment falls as the target grows, so the search
bisects a ladder, and then keeps the best that it saw.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trimtab_simulator.contest import Contest, is_better, quiet
from trimtab_simulator.policies.policy import Policy
from trimtab_simulator.replay import SimulationResult
from trimtab_simulator.scores import Score

LADDER = (0.5, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 90, 128, 180, 256)


def best_target(contest: Contest, make: Callable[[float], Policy]) -> tuple[float, SimulationResult]:
    """The target, and the replay under it."""
    trial = replace(contest, loop=quiet(contest.loop))
    seen: dict[int, Score] = {}

    def judged(index: int) -> Score:
        if index not in seen:
            policy = make(LADDER[index])
            seen[index] = trial.judge(policy.name, trial.play(policy))
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
        if is_better(found, best[1] if best else None, contest.objectives.attain):
            best = (index, found)
    assert best is not None
    target = LADDER[best[0]]
    return target, contest.play(make(target))
