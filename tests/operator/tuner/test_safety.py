"""Safety comes first: bounds, crashes, memory that others took, and what each engine can be asked for."""

from dataclasses import replace

import pytest
from trimtab_operator.tuner.decide import TunerOutput, decide
from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.parameters import FieldRange, Parameter
from trimtab_operator.tuner.samples import Config, Phase, ReplicaSnapshot
from trimtab_operator.tuner.settings import Bounds, Mode, Scaling, Settings
from trimtab_operator.tuner.state import TunerState
from trimtab_operator.tuner.stored import from_json, rebuild_state, to_json
from tuner_snapshots import FIELDS, PARAMETERS, make_replica_snapshot, make_sample

UTILIZATION = Parameter.GPU_MEMORY_UTILIZATION
AUTO = Settings(Mode.AUTO, starts=PARAMETERS)
RAISED = TunerState(applied={UTILIZATION: 0.9}, starts=PARAMETERS)


def serving(at: float, name: str = "m-0", **changes: object) -> ReplicaSnapshot:
    return make_replica_snapshot(name, make_sample(at), values={UTILIZATION: 0.9}, **changes)


def turned(
    state: TunerState, settings: Settings, *ticks: list[ReplicaSnapshot], start: float = 100.0
) -> list[TunerOutput]:
    outcomes = []
    for index, snapshots in enumerate(ticks):
        outcome = decide(snapshots, state, settings, start + 15.0 * index)
        state = outcome.state
        outcomes.append(outcome)
    return outcomes


def crash(at: float, restarts: int = 1, *, oom: bool = True) -> ReplicaSnapshot:
    return serving(at, restarts=restarts, was_oom_killed=oom)


@pytest.mark.parametrize("oom", [True, False])
def test_a_crash_above_the_start_lowers_at_once_and_pins(oom: bool) -> None:
    before, after = turned(RAISED, AUTO, [serving(100.0)], [crash(115.0, oom=oom)])
    assert not before.decisions
    (decision,) = after.decisions
    assert decision.reason is Reason.ROLLED_BACK_AFTER_RESTART
    assert after.state.applied[UTILIZATION] == 0.8
    assert after.patches == {"m-0": {UTILIZATION: 0.8}}
    assert after.state.pins[0].limit == 0.8
    assert ("ran out of memory" in decision.sentence) == oom


def test_a_crash_at_the_start_values_moves_nothing() -> None:
    state = TunerState(starts=PARAMETERS)
    _, after = turned(
        state,
        AUTO,
        [make_replica_snapshot(sample=make_sample(100.0))],
        [make_replica_snapshot(sample=make_sample(115.0), restarts=1)],
    )
    assert not after.decisions


def test_a_crash_is_seen_while_the_engine_still_loads() -> None:
    loading = make_replica_snapshot(phase=Phase.STARTING, restarts=1, was_oom_killed=True, problem="not ready")
    _, after = turned(RAISED, AUTO, [serving(100.0)], [loading])
    assert after.state.applied[UTILIZATION] == 0.8


def restarted(state: TunerState) -> TunerState:
    """What a new operator knows of it."""
    known = from_json(to_json(state))
    assert known is not None
    return known


def test_a_crash_that_no_operator_saw_is_seen_by_the_next_one() -> None:
    (before,) = turned(RAISED, AUTO, [serving(100.0)])
    (after,) = turned(restarted(before.state), AUTO, [crash(9000.0)], start=9000.0)
    assert [decision.reason for decision in after.decisions] == [Reason.ROLLED_BACK_AFTER_RESTART]
    assert after.state.applied[UTILIZATION] == 0.8
    (later,) = turned(restarted(after.state), AUTO, [crash(9015.0)], start=9015.0)
    assert (later.decisions, len(later.state.crashes)) == ((), 1)  # told once


def test_an_engine_that_dies_of_the_raised_values_before_it_ever_serves_is_one_of_their_victims() -> None:
    """A replica on another node, where less is free: it gets the values while it loads."""
    readable = make_replica_snapshot("m-0", make_sample(100.0))
    loading = replace(readable, phase=Phase.STARTING, instance="uid-2", sample=None, ledger=None)
    again = replace(loading, restarts=1, was_oom_killed=True)
    first, second = turned(RAISED, AUTO, [loading], [again])
    assert first.patches == {"m-0": {UTILIZATION: 0.9}}
    assert [decision.reason for decision in second.decisions] == [Reason.ROLLED_BACK_AFTER_RESTART]
    assert second.patches == {}


def test_an_engine_that_crashes_at_its_own_start_values_blames_nothing() -> None:
    """What an image that cannot start does says nothing of values that it never had."""
    crashing = make_replica_snapshot(phase=Phase.STARTING, instance="uid-2", restarts=1, problem="no answer")
    outcomes = turned(RAISED, AUTO, [serving(100.0)], *([replace(crashing, restarts=n)] for n in range(1, 5)))
    assert not [decision for outcome in outcomes for decision in outcome.decisions]


def test_the_exit_code_of_what_crashed_is_told() -> None:
    _, after = turned(RAISED, AUTO, [serving(100.0)], [serving(115.0, restarts=1, exit_code=1)])
    assert "an engine crashed (exit code 1) above the start values (crash 1)" in after.decisions[0].sentence


def test_when_the_crash_budget_is_spent_no_knob_rises_above_its_start_until_the_owner_writes_another() -> None:
    error_budget_used, values = replace(RAISED, applied={}, crashes=(1.0, 2.0)), dict(PARAMETERS)
    for at in range(1000, 1600, 15):
        sample = make_sample(float(at), kv_usage=0.99, preemptions={"capacity": 2.0 * at}, recomputed_tokens=80.0 * at)
        (outcome,) = turned(
            error_budget_used, AUTO, [make_replica_snapshot(sample=sample, values=values)], start=float(at)
        )
        error_budget_used = outcome.state
        values |= outcome.patches.get("m-0", {})
        assert all(
            value <= PARAMETERS[parameter]
            for parameter, value in error_budget_used.applied.items()
            if parameter is not Parameter.WATERMARK
        )
    assert outcome.tuning_active.reason == "CrashBudgetExhausted"
    (outcome,) = turned(
        error_budget_used, replace(AUTO, starts={**PARAMETERS, Parameter.MAX_NUM_SEQS: 32}), [make_replica_snapshot()]
    )
    assert outcome.state.crashes == ()


def test_a_value_whose_start_nobody_knows_any_more_is_given_to_no_engine() -> None:
    """Its memory was lost, and the owner wrote no start: nobody could tell whether it had been raised."""
    lost = rebuild_state({"max_num_seqs": 200}, starts={})
    (outcome,) = turned(lost, replace(AUTO, starts={}), [make_replica_snapshot(sample=make_sample(100.0))])
    assert (outcome.state.applied, outcome.patches) == ({}, {})


@pytest.mark.parametrize(
    ("bounds", "inside"),
    [(Bounds(0.5, 0.85), 0.85), (Bounds(0.92, 0.95), 0.92), (Bounds(0.6, 0.6), 0.6)],
)
def test_new_bounds_hold_at_once(bounds: Bounds, inside: float) -> None:
    (outcome,) = turned(RAISED, replace(AUTO, bounds={UTILIZATION: bounds}), [serving(100.0)])
    assert outcome.state.applied[UTILIZATION] == inside
    assert [decision.reason for decision in outcome.decisions] == [Reason.BOUNDS_CHANGED]


def test_a_count_above_every_engines_cap_goes_to_the_nearest_once() -> None:
    state = TunerState(applied={Parameter.MAX_NUM_SEQS: 999}, starts=PARAMETERS)
    first, second = turned(
        state,
        AUTO,
        [make_replica_snapshot(sample=make_sample(100.0))],
        [make_replica_snapshot(sample=make_sample(115.0))],
    )
    assert first.state.applied[Parameter.MAX_NUM_SEQS] == 256
    assert len(first.decisions) == 1
    assert not second.decisions


def test_each_engine_is_asked_for_the_nearest_that_it_takes() -> None:
    sample = make_sample(100.0)
    small = replace(
        make_replica_snapshot("m-1", sample),
        config=Config(1, PARAMETERS, {**FIELDS, UTILIZATION: FieldRange(True, 0.5, 0.85)}),
    )
    (outcome,) = turned(RAISED, AUTO, [make_replica_snapshot("m-0", sample), small])
    assert outcome.patches == {"m-0": {UTILIZATION: 0.9}, "m-1": {UTILIZATION: 0.85}}


def test_others_that_take_the_devices_memory_are_given_way() -> None:
    snapshot = serving(100.0)
    assert snapshot.ledger is not None
    full = replace(snapshot, ledger=replace(snapshot.ledger, free_bytes=0))
    (outcome,) = turned(RAISED, AUTO, [full])
    assert [decision.reason for decision in outcome.decisions] == [Reason.DEVICE_MEMORY_PRESSURE]
    assert outcome.state.applied[UTILIZATION] == 0.89


def test_one_dead_replica_holds_no_safety_move_of_the_others() -> None:
    _, after = turned(
        RAISED,
        AUTO,
        [serving(100.0), make_replica_snapshot("m-1", problem="down")],
        [crash(115.0), make_replica_snapshot("m-1")],
    )
    assert after.state.applied[UTILIZATION] == 0.8
    assert after.metrics_available.reason == "MetricsPartial"


def test_off_applies_nothing_and_says_so() -> None:
    (outcome,) = turned(RAISED, replace(AUTO, mode=Mode.OFF), [serving(100.0)])
    assert (outcome.patches, outcome.tuning_active.reason) == ({}, "Off")


def test_replicas_never_leave_their_bounds_without_numbers() -> None:
    settings = replace(AUTO, scaling=Scaling(2, 5))
    (outcome,) = turned(TunerState(starts=PARAMETERS), settings, [make_replica_snapshot("m-0", problem="down")])
    assert outcome.replicas == 2


def test_a_new_start_value_is_the_owners_word() -> None:
    (outcome,) = turned(RAISED, replace(AUTO, starts={**PARAMETERS, UTILIZATION: 0.75}), [serving(100.0)])
    assert UTILIZATION not in outcome.state.applied


@pytest.mark.parametrize("pause", [10.0, 130.0, 1800.0])
def test_an_engine_that_dies_some_time_after_each_raise_crashes_twice_at_most(pause: float) -> None:
    """For want of room a third of the work is done twice; any raise of the memory kills the engine `pause` later."""
    state, value, restarts, raised_at, began = TunerState(starts=PARAMETERS), 0.8, 0, None, 0.0
    for tick in range(600):
        now = 1000.0 + 15.0 * tick
        raised_at = (raised_at or now) if value > 0.8 else None
        is_dead = raised_at is not None and now - raised_at >= pause
        if is_dead:
            restarts, value, raised_at, began = restarts + 1, 0.8, None, now - 1.0
        age = now - began
        sample = make_sample(now, kv_usage=0.99, preemptions={"capacity": 2 * age}, recomputed_tokens=80 * age)
        snapshot = make_replica_snapshot(
            sample=sample, values={UTILIZATION: value}, restarts=restarts, was_oom_killed=is_dead
        )
        outcome = decide([snapshot], state, AUTO, now)
        state = outcome.state
        value = float(outcome.patches.get("m-0", {}).get(UTILIZATION, value))
    assert 1 <= restarts <= 2
    assert value == 0.8


def test_an_engine_that_still_runs_what_its_owner_wrote_before_was_told_nothing() -> None:
    """Its owner wrote a lower start: it goes soon, and nothing of it is worth a write."""
    state = TunerState(starts={**PARAMETERS, UTILIZATION: 0.8})
    (after,) = turned(state, AUTO, [serving(100.0)])
    assert after.state.raised == {}
