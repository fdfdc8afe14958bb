"""A trial is judged only by its own effect: earlier victims are recomputed after it too."""

from __future__ import annotations

import pytest
from trimtab_operator.tuner.decide import decide
from trimtab_operator.tuner.moves import Decision, Expectation, Measure, Move, Reason
from trimtab_operator.tuner.parameters import Parameter, Value
from trimtab_operator.tuner.samples import Phase
from trimtab_operator.tuner.settings import Mode, Settings
from trimtab_operator.tuner.state import Trial, TunerState
from trimtab_operator.tuner.stored import from_json, to_json
from tuner_snapshots import PARAMETERS, make_replica_snapshot, make_sample

TICK = 15.0


def reasons_of_decisions(preemptions_after: float, *, ticks_after: int) -> list[Reason]:
    """Return the reasons of all decisions."""
    return under_pressure(preemptions_after, ticks_after=ticks_after)[0]


def under_pressure(
    preemptions_after: float, *, ticks_after: int, starting_for: float = 0.0
) -> tuple[list[Reason], TunerState]:
    """Return reasons and state for an engine under pressure whose memory is raised: from then on this many requests are
    preempted a second, and three times as many tokens are recomputed as before. A second replica starts for
    `starting_for` seconds.
    """
    settings, state = Settings(Mode.AUTO, starts=PARAMETERS), TunerState(starts=PARAMETERS)
    values: dict[Parameter, Value] = dict(PARAMETERS)
    generation, preempted, recomputed, left = 1, 0.0, 0.0, ticks_after
    decisions: list[Reason] = []
    now = begun = 1000.0
    while left:
        is_tried = bool(decisions)
        preempted += TICK * (preemptions_after if is_tried else 1.0)
        recomputed += TICK * (60.0 if is_tried else 20.0)
        sample = make_sample(
            now,
            generation=generation,
            kv_usage=0.99,
            preemptions={"capacity": preempted},
            recomputed_tokens=recomputed,
        )
        snapshots = [make_replica_snapshot(sample=sample, values=values)]
        if is_tried and now - begun < starting_for:
            snapshots.append(make_replica_snapshot("m-1", phase=Phase.STARTING, since=begun))
        outcome = decide(snapshots, state, settings, now)
        state = outcome.state
        decisions += [decision.reason for decision in outcome.decisions]
        for patch in outcome.patches.values():
            values.update(patch)
            generation += 1
        if not is_tried:
            begun = now
        left -= is_tried
        now += TICK
    return decisions, state


@pytest.mark.parametrize("ticks", [3, 8, 16])
def test_trial_ignores_earlier_preemptions(ticks: int) -> None:
    assert reasons_of_decisions(0.0, ticks_after=ticks) == [Reason.KV_CACHE_TOO_SMALL]


def test_trial_without_predictor_judges_preemptions_at_end() -> None:
    assert reasons_of_decisions(3.0, ticks_after=18) == [Reason.KV_CACHE_TOO_SMALL]
    assert Reason.ROLLED_BACK in reasons_of_decisions(3.0, ticks_after=22)


@pytest.mark.parametrize(
    ("ticks", "starting_for", "is_open"), [(22, 0.0, False), (22, 400.0, True), (44, 900.0, False)]
)
def test_trial_waits_while_requested_replicas_start(ticks: int, starting_for: float, is_open: bool) -> None:
    decisions, state = under_pressure(0.0, ticks_after=ticks, starting_for=starting_for)
    assert Reason.ROLLED_BACK not in decisions
    assert (state.trial is not None) == is_open


def end_of_trial(parameter: Parameter, before: Value, after: Value, *, recomputed: float) -> TunerState:
    """Return the state after a trial that should have halved a recomputed share of 20 %; observed is `recomputed`."""
    values: dict[Parameter, Value] = {**PARAMETERS, parameter: after}
    expected = (Expectation(Measure.RECOMPUTED, 0.2, 0.1, 0.08, 0.12),)
    trial = Trial("id", parameter, before, after, 1000.0, expected, None, 0.2, 1.0)
    history = (Decision("id", 1000.0, Move(Reason.ADMITTED_TOO_EARLY, parameter, before, after, {}, expected), "."),)
    state = TunerState(
        applied={parameter: after}, starts=PARAMETERS, trial=trial, history=history, moved_at={parameter.value: 1000.0}
    )
    now = 1000.0
    while state.trial is not None and now < 1400.0:
        now += TICK
        sample = make_sample(
            now,
            generation=1,
            kv_usage=0.99,
            preemptions={"capacity": now / 10},
            recomputed_tokens=232.0 * recomputed * (now - 900.0),
        )
        snapshot = make_replica_snapshot(sample=sample, values=values)
        state = decide([snapshot], state, Settings(Mode.AUTO, starts=PARAMETERS), now).state
    return state


def test_trial_without_predicted_effect_is_returned_and_reported() -> None:
    state = end_of_trial(Parameter.WATERMARK, 0.0, 0.05, recomputed=0.19)
    assert state.history[0].outcome == "not achieved: predicted recomputed share 10.0%, observed 19.0%"
    assert (state.history[-1].reason, state.applied) == (Reason.PREDICTION_NOT_ACHIEVED, {Parameter.WATERMARK: 0.0})
    (pin,) = state.pins
    assert (pin.parameter, pin.limit, pin.is_for_mix) == (Parameter.WATERMARK, 0.0, True)
    assert from_json(to_json(state)) is not None


def test_trial_with_predicted_effect_is_kept() -> None:
    state = end_of_trial(Parameter.WATERMARK, 0.0, 0.05, recomputed=0.12)
    assert state.history[0].outcome == "kept: predicted recomputed share 10.0%, observed 12.0%"
    assert state.applied[Parameter.WATERMARK] == 0.05


def test_free_change_without_predicted_effect_is_kept() -> None:
    state = end_of_trial(Parameter.GPU_MEMORY_UTILIZATION, 0.8, 0.85, recomputed=0.19)
    assert (state.history[-1].reason, state.applied) == (
        Reason.PREDICTION_NOT_ACHIEVED,
        {Parameter.GPU_MEMORY_UTILIZATION: 0.85},
    )
    assert "it costs nothing" in state.history[-1].sentence
