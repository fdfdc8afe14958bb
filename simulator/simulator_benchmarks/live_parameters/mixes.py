"""Mixes of requests: one after the other, compared with parameters switched at the border in hindsight; and each for
long, from the engine's defaults and from the best fixed values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from trimtab_operator.tuner.parameters import Parameter, Value
from trimtab_simulator.objectives import Objectives
from trimtab_simulator.policies.fixed import Fixed
from trimtab_simulator.policies.policy import STAY, PolicyActions, PolicyInput
from trimtab_simulator.replay import SimulationResult

from simulator_benchmarks.live_parameters.figures import Figure, good_tokens, reversals_figure
from simulator_benchmarks.live_parameters.loads import (
    BOTH,
    FIRST_TOKEN,
    Phase,
    best_budget,
    budget_of,
    h200,
    poisson,
    run,
)
from simulator_benchmarks.scenarios import CODE, CONVERSATIONS, R1_LENGTHS

PHASE_SECONDS = 900.0
SETTLED_SECONDS = 300.0  # after a shift
MIXES = {"conv": (CONVERSATIONS, 7.4), "code": (CODE, 4.3), "r1": (R1_LENGTHS, 2.0)}
"""Lengths, and the load that one replica holds with its best budget, in requests a second."""
PAIRS = (("conv", "code"), ("code", "r1"), ("conv", "r1"))
SHIFT_LOAD = 0.85  # of what it holds


class ScheduledPolicy:
    """Values known beforehand, set at known times."""

    def __init__(self, schedule: Sequence[tuple[float, dict[Parameter, Value]]]) -> None:
        self.name = "switched"
        self.tick_seconds = 15.0
        self.reads_requests = False
        self._schedule = list(schedule)

    def decide(self, view: PolicyInput) -> PolicyActions:
        """Return the values that are due."""
        if not self._schedule or self._schedule[0][0] > view.now:
            return STAY
        return PolicyActions(None, self._schedule.pop(0)[1], "known beforehand")


def shifts(folder: Path, seed: int) -> Iterator[Figure]:
    """Yield figures of mix after mix, 15 minutes each."""
    for one, other in PAIRS:
        phases = [Phase(MIXES[mix][0], SHIFT_LOAD * MIXES[mix][1], PHASE_SECONDS) for mix in (one, other, one)]
        trace = poisson(folder, phases, seed)
        best = {
            mix: best_budget(poisson(folder, [phases[index]], seed), BOTH, seed, SETTLED_SECONDS)[0]
            for index, mix in enumerate((one, other))
        }
        schedule = [
            (PHASE_SECONDS * index, budget_of(best[mix])) for index, mix in enumerate((one, other, one)) if index
        ]
        switched = run(trace, h200(budget_of(best[one])), BOTH, ScheduledPolicy(schedule), seed)
        tuned = run(trace, h200(budget_of(best[one])), BOTH, None, seed)
        name = f"{one}, {other}, {one}"
        for index in (1, 2):
            since, until = PHASE_SECONDS * index + SETTLED_SECONDS, PHASE_SECONDS * (index + 1)
            goodput, reference = (good_tokens(o.served, BOTH, since, until) for o in (tuned, switched))
            details = {
                "auto": round(goodput, 1),
                "switched": round(reference, 1),
                "its budget": float(best[(other, one)[index - 1]]),
            }
            yield Figure(
                "shifts",
                f"{name}: {'second' if index == 1 else 'third'}",
                seed,
                "goodput of switched",
                goodput / reference,
                0.98,
                details=details,
            )
        yield reversals_figure("shifts", name, seed, tuned.changes)


# --- steady loads -----------------------------------------------------------------------------------------------------

STEADY_SECONDS = 1800.0
FOUND_SECONDS = 600.0  # that finding good values may take
LEAST_GAP = 0.05  # of the best fixed values' goodput: a smaller one is not measured
STEADY = (
    ("code, both promised", CODE, 5.0, BOTH),
    ("code, first token promised", CODE, 2.2, FIRST_TOKEN),
    ("conv, both promised", CONVERSATIONS, 8.6, BOTH),
    ("conv, first token promised", CONVERSATIONS, 5.2, FIRST_TOKEN),
    ("r1, both promised", R1_LENGTHS, 2.2, BOTH),
)
"""Loads slightly above the capacity with the best budget, where budgets differ most."""


def steady(folder: Path, seed: int) -> Iterator[Figure]:
    """Yield figures from the engine's defaults, and from the best fixed budget."""
    for name, lengths, rate, objectives in STEADY:
        trace = poisson(folder, [Phase(lengths, rate, STEADY_SECONDS)], seed)

        def good(outcome: SimulationResult, limits: Objectives = objectives) -> float:
            return good_tokens(outcome.served, limits, FOUND_SECONDS, STEADY_SECONDS)

        budget, best = best_budget(trace, objectives, seed, FOUND_SECONDS)
        default = good(run(trace, h200({}), objectives, Fixed("default"), seed))
        if best - default >= LEAST_GAP * best:
            tuned = run(trace, h200({}), objectives, None, seed)
            details = {
                "default": round(default, 1),
                "auto": round(good(tuned), 1),
                "best": round(best, 1),
                "its budget": budget,
            }
            closed = (good(tuned) - default) / (best - default)
            yield Figure("defaults", name, seed, "gap closed", closed, 0.8, details=details)
            yield reversals_figure("defaults", name, seed, tuned.changes)
        tuned = run(trace, h200(budget_of(budget)), objectives, None, seed)
        details = {"auto": round(good(tuned), 1), "best": round(best, 1), "its budget": budget}
        yield Figure("stationary", name, seed, "goodput of static best", good(tuned) / best, 0.98, details=details)
        yield reversals_figure("stationary", name, seed, tuned.changes)
