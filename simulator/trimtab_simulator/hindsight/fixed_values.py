"""The best fixed values, found by trying them on the whole trace: a grid of knobs, and the fewest replicas."""

from __future__ import annotations

from dataclasses import replace

from trimtab_operator.tuner.parameters import Parameter, Value

from trimtab_simulator.contest import Contest, quiet
from trimtab_simulator.replay import SimulationResult
from trimtab_simulator.scores import Score

BUDGETS = (512, 1024, 2048, 4096, 8192)
SLOTS = (1024, 256, 128, 64, 32)
"""From the most: fewer than ever ran at once is the first value that changes anything."""


def static_best(contest: Contest) -> tuple[Contest, SimulationResult]:
    """The start replicas with the seats and the budget that bring the most goodput, of a grid of both."""
    trial = replace(contest, loop=quiet(contest.loop))
    best: tuple[tuple[float, float], Contest] | None = None
    for budget in _ladder(contest, Parameter.MAX_NUM_BATCHED_TOKENS, BUDGETS):
        most_running: float = float("inf")
        for slots in _ladder(contest, Parameter.MAX_NUM_SEQS, SLOTS):
            if slots >= most_running and slots != max(SLOTS):
                continue  # as many seats as with more of them were taken
            candidate = trial.with_parameters({Parameter.MAX_NUM_BATCHED_TOKENS: budget, Parameter.MAX_NUM_SEQS: slots})
            outcome = candidate.play_fixed("static-best")
            most_running = outcome.most_running
            judged = candidate.judge("static-best", outcome)
            merit = (judged.goodput_tokens_per_s, judged.attainment)
            if best is None or merit > best[0]:
                best = (merit, candidate)
    assert best is not None
    found = replace(best[1], loop=contest.loop)
    return found, found.play_fixed("static-best")


def _ladder(contest: Contest, parameter: Parameter, values: tuple[int, ...]) -> list[Value]:
    """The grid's values and the start's, from the most down."""
    return sorted({*values, contest.settings.parameters[parameter]}, reverse=True)


def static_n(contest: Contest) -> tuple[Contest, SimulationResult]:
    """The fewest replicas that attain the objectives all the time, with the budget that needs the fewest.

    Where none of max_replicas attains, the most replicas with the best budget.
    """
    trial = replace(contest, loop=quiet(contest.loop))
    best: tuple[tuple[float, int, float], Contest] | None = None
    most = contest.settings.max_replicas
    for budget in _ladder(contest, Parameter.MAX_NUM_BATCHED_TOKENS, BUDGETS):
        with_budget = trial.with_parameters({Parameter.MAX_NUM_BATCHED_TOKENS: budget})
        found, judged = _fewest(with_budget, most)
        attains = found.attains(judged)
        merit = (0.0 if attains else 1.0, found.settings.start_replicas, -judged.attainment)
        if best is None or merit < best[0]:
            best = (merit, found)
            if attains:
                most = found.settings.start_replicas
    assert best is not None
    found = replace(best[1], loop=contest.loop)
    return found, found.play_fixed("static-n")


def fewest_replicas(contest: Contest) -> tuple[Contest, SimulationResult]:
    """The fewest replicas that attain the objectives with the contest's own knobs."""
    found, _ = _fewest(replace(contest, loop=quiet(contest.loop)), contest.settings.max_replicas)
    found = replace(found, loop=contest.loop)
    return found, found.play_fixed("static-n")


def _fewest(contest: Contest, most: int) -> tuple[Contest, Score]:
    """The fewest replicas that suffice, by bisection: more never serve fewer requests in time, but for noise."""
    low, high = contest.settings.min_replicas, most
    top = contest.with_replicas(high)
    judged = top.judge("static-n", top.play_fixed("static-n"))
    if not top.attains(judged):
        return top, judged
    found = (top, judged)
    while low < high:
        middle = (low + high) // 2
        candidate = contest.with_replicas(middle)
        judged = candidate.judge("static-n", candidate.play_fixed("static-n"))
        if candidate.attains(judged):
            high, found = middle, (candidate, judged)
        else:
            low = middle + 1
    return found
