"""Restart-only changes are recommended after a long violation of the objectives, until they are attained."""

from dataclasses import replace

import pytest
from trimtab_operator.tuner.decide import TunerOutput, decide
from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.objectives import Objectives, Ttft
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.samples import Finished, Phase, RequestUpdates
from trimtab_operator.tuner.settings import Bounds, Mode, Scaling, Settings
from trimtab_operator.tuner.state import TunerState
from tuner_snapshots import PARAMETERS, make_replica_snapshot, make_sample

PINNED = {parameter: Bounds(value, value) for parameter, value in PARAMETERS.items()}
SETTINGS = Settings(Mode.AUTO, Objectives(Ttft(0.5, share=0.95)), PINNED, PARAMETERS)


def make_updates(now: float, ttft: float) -> RequestUpdates:
    """Return eight recent requests with this time to first token."""
    rows = (Finished(now - 9 - i, now - i, 100, 20, ttft, 1.0) for i in range(8))
    return RequestUpdates(tuple(rows), ())


def run_with_ttfts(ttfts: list[float], settings: Settings = SETTINGS) -> list[TunerOutput]:
    state, outcomes = TunerState(starts=PARAMETERS), []
    for index, ttft in enumerate(ttfts):
        now = 1000.0 + 15.0 * index
        outcome = decide(
            [make_replica_snapshot(sample=make_sample(now, requests=make_updates(now, ttft)))], state, settings, now
        )
        state = outcome.state
        outcomes.append(outcome)
    return outcomes


def test_long_violation_with_pinned_parameters_recommends_replicas() -> None:
    outcomes = run_with_ttfts([2.0] * 60)
    recommended = [o.state.recommendation is not None for o in outcomes]
    assert not any(recommended[:40])
    standing = outcomes[-1].recommendation
    assert standing is not None
    assert (standing.reason, standing.move.target.value) == (Reason.SATURATED, "replicas")
    assert sum(len(o.decisions) for o in outcomes) == 1
    assert outcomes[-1].tuning_active.reason == "Saturated"


def test_recommendation_ends_when_objectives_are_attained() -> None:
    assert run_with_ttfts([2.0] * 50 + [0.1] * 40)[-1].recommendation is None


@pytest.mark.parametrize(("waiting", "is_over"), [(0.0, True), (3.0, False)])
def test_recommendation_ends_without_requests_and_queue(waiting: float, *, is_over: bool) -> None:
    state = run_with_ttfts([2.0] * 50)[-1].state
    assert state.violated_since is not None
    for index in range(50, 80):
        now = 1000.0 + 15.0 * index
        outcome = decide([make_replica_snapshot(sample=make_sample(now, waiting=waiting))], state, SETTINGS, now)
        state = outcome.state
    assert (state.violated_since is None) == is_over
    assert (outcome.recommendation is None) == is_over


def test_attained_objectives_recommend_nothing() -> None:
    assert run_with_ttfts([0.1] * 60)[-1].recommendation is None


def test_recommendation_at_maximum_replicas_names_the_bound() -> None:
    at_bound = replace(SETTINGS, scaling=Scaling(1, 1))
    standing = run_with_ttfts([2.0] * 60, at_bound)[-1].recommendation
    assert standing is not None
    assert standing.move.target.value == "scaling.maxReplicas"


def test_oom_killed_start_recommends_a_parameter_to_lower() -> None:
    snapshot = make_replica_snapshot("m-0", phase=Phase.STARTING, was_oom_killed=True, restarts=2, problem="not ready")
    outcome = decide([snapshot], TunerState(starts=PARAMETERS), SETTINGS, 1000.0)
    assert outcome.recommendation is not None
    assert outcome.recommendation.reason is Reason.STARTUP_OUT_OF_MEMORY
    assert "engine.maxModelLen" in outcome.recommendation.sentence
    assert Parameter.GPU_MEMORY_UTILIZATION not in outcome.state.applied
