"""Best fixed values, found by running the whole trace: a grid of parameters, and the fewest replicas."""

from __future__ import annotations

from dataclasses import replace

from trimtab_operator.tuner.parameters import Parameter, Value

from trimtab_simulator.experiment import Experiment, without_timeline
from trimtab_simulator.replay import SimulationResult
from trimtab_simulator.scores import Score

BUDGETS = (512, 1024, 2048, 4096, 8192)
SLOTS = (1024, 256, 128, 64, 32)
"""From the most: the first value below the maximum running count is the first that has an effect."""


def static_best(experiment: Experiment) -> tuple[Experiment, SimulationResult]:
    """Return the start replicas with the slots and token budget of the highest goodput, from a grid of both."""
    trial = without_timeline(experiment)
    best: tuple[tuple[float, float], Experiment] | None = None
    for budget in _ladder(experiment, Parameter.MAX_NUM_BATCHED_TOKENS, BUDGETS):
        most_running: float = float("inf")
        for slots in _ladder(experiment, Parameter.MAX_NUM_SEQS, SLOTS):
            if slots >= most_running and slots != max(SLOTS):
                continue  # the same result as with more slots
            candidate = trial.with_parameters({Parameter.MAX_NUM_BATCHED_TOKENS: budget, Parameter.MAX_NUM_SEQS: slots})
            outcome = candidate.run_fixed("static-best")
            most_running = outcome.most_running
            judged = candidate.judge("static-best", outcome)
            merit = (judged.goodput_tokens_per_s, judged.attainment)
            if best is None or merit > best[0]:
                best = (merit, candidate)
    assert best is not None
    found = replace(best[1], loop=experiment.loop)
    return found, found.run_fixed("static-best")


def _ladder(experiment: Experiment, parameter: Parameter, values: tuple[int, ...]) -> list[Value]:
    """Return the grid's values and the start value, in descending order."""
    return sorted({*values, experiment.settings.parameters[parameter]}, reverse=True)


def static_n(experiment: Experiment) -> tuple[Experiment, SimulationResult]:
    """Return the fewest replicas that attain the objectives, with the budget that needs the fewest.

    If max_replicas do not attain them, the most replicas with the best budget.
    """
    trial = without_timeline(experiment)
    best: tuple[tuple[float, int, float], Experiment] | None = None
    most = experiment.settings.max_replicas
    start = experiment.settings.parameters[Parameter.MAX_NUM_BATCHED_TOKENS]
    for budget in sorted({*BUDGETS, start}, key=lambda budget: (budget != start, -budget)):
        with_budget = trial.with_parameters({Parameter.MAX_NUM_BATCHED_TOKENS: budget})
        found, judged = _fewest(with_budget, most)
        attains = found.attains(judged)
        merit = (0.0 if attains else 1.0, found.settings.start_replicas, -judged.attainment)
        if best is None or merit < best[0]:
            best = (merit, found)
            if attains:
                most = found.settings.start_replicas
    assert best is not None
    found = replace(best[1], loop=experiment.loop)
    return found, found.run_fixed("static-n")


def _fewest(experiment: Experiment, most: int) -> tuple[Experiment, Score]:
    """Return the fewest sufficient replicas, or `most` if they do not suffice, searched from the start replicas: more
    replicas serve at least as many requests in time, except for noise.
    """

    def judge(count: int) -> tuple[Experiment, Score]:
        candidate = experiment.with_replicas(count)
        return candidate, candidate.judge("static-n", candidate.run_fixed("static-n"))

    low, high = experiment.settings.min_replicas, min(most, experiment.settings.start_replicas)
    found = judge(high)
    if experiment.attains(found[1]):
        while high > low and experiment.attains((fewer := judge(high - 1))[1]):
            high, found = high - 1, fewer
        return found
    if high == most or not experiment.attains((found := judge(most))[1]):
        return found
    low, high = high + 1, most
    while low < high:
        middle = (low + high) // 2
        candidate = judge(middle)
        if experiment.attains(candidate[1]):
            high, found = middle, candidate
        else:
            low = middle + 1
    return found
