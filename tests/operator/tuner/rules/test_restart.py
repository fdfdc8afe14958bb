"""What only the owner can do is recommended once promises are missed for long, and goes when they are kept."""

from dataclasses import replace

from trimtab_operator.tuner.decide import TunerOutput, decide
from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.objectives import Objectives, Ttft
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.samples import Finished, Phase, RequestUpdates
from trimtab_operator.tuner.settings import Bounds, Mode, Scaling, Settings
from trimtab_operator.tuner.state import TunerState
from tuner_snapshots import PARAMETERS, make_replica_snapshot, make_sample

PINNED = {parameter: Bounds(value, value) for parameter, value in PARAMETERS.items()}
PROMISED = Settings(Mode.AUTO, Objectives(Ttft(0.5, share=0.95)), PINNED, PARAMETERS)


def told(now: float, ttft: float) -> RequestUpdates:
    """Eight requests of the last seconds, whose first token took that long."""
    rows = (Finished(now - 9 - i, now - i, 100, 20, ttft, 1.0) for i in range(8))
    return RequestUpdates(tuple(rows), ())


def felt(ttfts: list[float], settings: Settings = PROMISED) -> list[TunerOutput]:
    state, outcomes = TunerState(starts=PARAMETERS), []
    for index, ttft in enumerate(ttfts):
        now = 1000.0 + 15.0 * index
        outcome = decide(
            [make_replica_snapshot(sample=make_sample(now, requests=told(now, ttft)))], state, settings, now
        )
        state = outcome.state
        outcomes.append(outcome)
    return outcomes


def test_promises_missed_for_ten_minutes_with_everything_pinned_ask_for_replicas() -> None:
    outcomes = felt([2.0] * 60)
    told_at = [o.state.recommendation is not None for o in outcomes]
    assert not any(told_at[:40])
    standing = outcomes[-1].recommendation
    assert standing is not None
    assert (standing.reason, standing.move.target.value) == (Reason.SATURATED, "replicas")
    assert sum(len(o.decisions) for o in outcomes) == 1
    assert outcomes[-1].tuning_active.reason == "Saturated"


def test_a_recommendation_goes_when_promises_are_kept_again() -> None:
    assert felt([2.0] * 50 + [0.1] * 40)[-1].recommendation is None


def test_promises_that_are_kept_ask_for_nothing() -> None:
    assert felt([0.1] * 60)[-1].recommendation is None


def test_at_the_most_replicas_the_bound_is_named() -> None:
    at_bound = replace(PROMISED, scaling=Scaling(1, 1))
    standing = felt([2.0] * 60, at_bound)[-1].recommendation
    assert standing is not None
    assert standing.move.target.value == "scaling.maxReplicas"


def test_an_engine_killed_for_memory_before_it_served_names_what_to_lower() -> None:
    snapshot = make_replica_snapshot("m-0", phase=Phase.STARTING, was_oom_killed=True, restarts=2, problem="not ready")
    outcome = decide([snapshot], TunerState(starts=PARAMETERS), PROMISED, 1000.0)
    assert outcome.recommendation is not None
    assert outcome.recommendation.reason is Reason.STARTUP_OUT_OF_MEMORY
    assert "engine.maxModelLen" in outcome.recommendation.sentence
    assert Parameter.GPU_MEMORY_UTILIZATION not in outcome.state.applied
