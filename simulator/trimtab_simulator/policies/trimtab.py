"""Trimtab's tuner as a policy, called as the operator calls it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from trimtab_operator.tuner.decide import decide
from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.load import Forecast
from trimtab_operator.tuner.load.season import Season
from trimtab_operator.tuner.objectives import Itl, ItlKind, Objectives, Ttft
from trimtab_operator.tuner.parameters import Parameter, Value
from trimtab_operator.tuner.settings import Bounds, Mode, Pace, Scaling, Seasonal, Settings
from trimtab_operator.tuner.state import TunerState
from trimtab_operator.tuner.stored import from_json, to_json

from trimtab_simulator.policies.policy import PolicyActions, PolicyInput, PolicySetup

TICK_SECONDS = 15.0
HOUR_SECONDS = 3600.0
WRONG_PRIOR = (1.25, 0.75, 1.25, 0.75)  # factors of the true coefficients, which the tuner has to learn


class Trimtab:
    """`pinned`: live parameters keep their start values, and only replicas change. `history`: season of earlier
    periods, by which arrivals are forecast. The operator restarts every `restart_seconds`, and then has only its
    stored state.
    """

    def __init__(
        self,
        setup: PolicySetup,
        *,
        pinned: bool = False,
        name: str = "trimtab",
        history: Season | None = None,
        restart_seconds: float = math.inf,
    ) -> None:
        self.name = name
        self.tick_seconds = TICK_SECONDS
        self.reads_requests = True
        self.state = TunerState()
        self._restart_seconds = self._next_restart = restart_seconds
        self.settings = _settings(setup, pinned=pinned)
        if history is not None and self.settings.scaling is not None:
            forecast = Seasonal(history.period_seconds, len(history.rates))
            self.state = TunerState(forecast=Forecast(history))
            self.settings = replace(self.settings, scaling=replace(self.settings.scaling, forecast=forecast))

    def decide(self, view: PolicyInput) -> PolicyActions:
        """Run one tuner step."""
        if view.now >= self._next_restart:
            self._next_restart += self._restart_seconds
            self.state = from_json(to_json(self.state)) or TunerState()
        outcome = decide(view.snapshots, self.state, self.settings, view.now)
        self.state = outcome.state
        parameters: dict[Parameter, Value] = {}
        for patch in outcome.patches.values():
            parameters.update(patch)
        why = " ".join(decision.sentence for decision in outcome.decisions)
        return PolicyActions(outcome.replicas, parameters, why, self.settings.objectives.allowance)


def _settings(setup: PolicySetup, *, pinned: bool) -> Settings:
    """Return what the operator would know: resource, objectives, and a step-time prior that is a quarter off."""
    cost = setup.machine.cost
    guess = StepCost(
        cost.per_step * WRONG_PRIOR[0],
        cost.per_token * WRONG_PRIOR[1],
        cost.per_sequence * WRONG_PRIOR[2],
        cost.per_context * WRONG_PRIOR[3],
        cost.per_attended,
    )
    bounds: Mapping[Parameter, Bounds] = {k: Bounds(v, v) for k, v in setup.parameters.items()} if pinned else {}
    is_scaled = setup.min_replicas < setup.max_replicas
    return replace(
        Settings(Mode.AUTO, _objectives(setup)),
        bounds=bounds,
        starts=dict(setup.parameters),
        scaling=Scaling(setup.min_replicas, setup.max_replicas) if is_scaled else None,
        prior=guess,
        cold_start_seconds=setup.cold_start_seconds,
        pace=Pace(tick_seconds=TICK_SECONDS),
    )


def _objectives(setup: PolicySetup) -> Objectives:
    """Return the experiment's objectives as a resource would set them."""
    objectives = setup.objectives
    ttft = (
        Ttft(objectives.ttft, objectives.per_prompt_token, objectives.attain)
        if math.isfinite(objectives.ttft)
        else None
    )
    itl = None
    if objectives.itl_mean is not None:
        itl = Itl(objectives.itl_mean, ItlKind.MEAN, objectives.attain)
    elif objectives.itl_token is not None:
        itl = Itl(objectives.itl_token, ItlKind.TOKENS, objectives.attain)
    return Objectives(ttft, itl, order_queues=ttft is not None)
