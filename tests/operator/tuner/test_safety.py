"""Safety rules: bounds, crashes, device memory of other processes, and per-engine limits."""

import math
import random
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


def run_ticks(
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
    before, after = run_ticks(RAISED, AUTO, [serving(100.0)], [crash(115.0, oom=oom)])
    assert not before.decisions
    (decision,) = after.decisions
    assert decision.reason is Reason.ROLLED_BACK_AFTER_RESTART
    assert after.state.applied[UTILIZATION] == 0.8
    assert after.patches == {"m-0": {UTILIZATION: 0.8}}
    assert after.state.pins[0].limit == 0.8
    assert ("ran out of memory" in decision.sentence) == oom


def test_a_crash_at_the_start_values_moves_nothing() -> None:
    state = TunerState(starts=PARAMETERS)
    _, after = run_ticks(
        state,
        AUTO,
        [make_replica_snapshot(sample=make_sample(100.0))],
        [make_replica_snapshot(sample=make_sample(115.0), restarts=1)],
    )
    assert not after.decisions


def test_a_crash_is_seen_while_the_engine_still_loads() -> None:
    loading = make_replica_snapshot(phase=Phase.STARTING, restarts=1, was_oom_killed=True, problem="not ready")
    _, after = run_ticks(RAISED, AUTO, [serving(100.0)], [loading])
    assert after.state.applied[UTILIZATION] == 0.8


def restarted(state: TunerState) -> TunerState:
    """Return the state that a new operator reads."""
    known = from_json(to_json(state))
    assert known is not None
    return known


def test_crash_without_operator_is_detected_later() -> None:
    (before,) = run_ticks(RAISED, AUTO, [serving(100.0)])
    (after,) = run_ticks(restarted(before.state), AUTO, [crash(9000.0)], start=9000.0)
    assert [decision.reason for decision in after.decisions] == [Reason.ROLLED_BACK_AFTER_RESTART]
    assert after.state.applied[UTILIZATION] == 0.8
    (later,) = run_ticks(restarted(after.state), AUTO, [crash(9015.0)], start=9015.0)
    assert (later.decisions, len(later.state.crashes)) == ((), 1)  # reported once


def test_crash_before_serving_rolls_raised_values_back() -> None:
    """A replica on another node with less free memory gets the values while it loads."""
    readable = make_replica_snapshot("m-0", make_sample(100.0))
    loading = replace(readable, phase=Phase.STARTING, instance="uid-2", sample=None, ledger=None)
    again = replace(loading, restarts=1, was_oom_killed=True)
    first, second = run_ticks(RAISED, AUTO, [loading], [again])
    assert first.patches == {"m-0": {UTILIZATION: 0.9}}
    assert [decision.reason for decision in second.decisions] == [Reason.ROLLED_BACK_AFTER_RESTART]
    assert second.patches == {}


def test_crash_at_start_values_of_new_engine_moves_nothing() -> None:
    """The crash of an image that cannot start is unrelated to values that it never had."""
    crashing = make_replica_snapshot(phase=Phase.STARTING, instance="uid-2", restarts=1, problem="no answer")
    outcomes = run_ticks(RAISED, AUTO, [serving(100.0)], *([replace(crashing, restarts=n)] for n in range(1, 5)))
    assert not [decision for outcome in outcomes for decision in outcome.decisions]


def test_decision_contains_exit_code() -> None:
    _, after = run_ticks(RAISED, AUTO, [serving(100.0)], [serving(115.0, restarts=1, exit_code=1)])
    assert "an engine crashed (exit code 1) above the start values (crash 1)" in after.decisions[0].sentence


def test_exhausted_crash_budget_blocks_raises_until_new_start() -> None:
    error_budget_used, values = replace(RAISED, applied={}, crashes=(1.0, 2.0)), dict(PARAMETERS)
    for at in range(1000, 1600, 15):
        sample = make_sample(float(at), kv_usage=0.99, preemptions={"capacity": 2.0 * at}, recomputed_tokens=80.0 * at)
        (outcome,) = run_ticks(
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
    (outcome,) = run_ticks(
        error_budget_used, replace(AUTO, starts={**PARAMETERS, Parameter.MAX_NUM_SEQS: 32}), [make_replica_snapshot()]
    )
    assert outcome.state.crashes == ()


def test_value_with_unknown_start_is_not_applied() -> None:
    """The state was lost and the spec has no start value, so it is unknown whether the value had been raised."""
    lost = rebuild_state({"max_num_seqs": 200}, starts={})
    (outcome,) = run_ticks(lost, replace(AUTO, starts={}), [make_replica_snapshot(sample=make_sample(100.0))])
    assert (outcome.state.applied, outcome.patches) == ({}, {})


@pytest.mark.parametrize(
    ("bounds", "inside"),
    [(Bounds(0.5, 0.85), 0.85), (Bounds(0.92, 0.95), 0.92), (Bounds(0.6, 0.6), 0.6)],
)
def test_new_bounds_hold_at_once(bounds: Bounds, inside: float) -> None:
    (outcome,) = run_ticks(RAISED, replace(AUTO, bounds={UTILIZATION: bounds}), [serving(100.0)])
    assert outcome.state.applied[UTILIZATION] == inside
    assert [decision.reason for decision in outcome.decisions] == [Reason.BOUNDS_CHANGED]


def test_count_above_every_cap_is_clamped_once() -> None:
    state = TunerState(applied={Parameter.MAX_NUM_SEQS: 999}, starts=PARAMETERS)
    first, second = run_ticks(
        state,
        AUTO,
        [make_replica_snapshot(sample=make_sample(100.0))],
        [make_replica_snapshot(sample=make_sample(115.0))],
    )
    assert first.state.applied[Parameter.MAX_NUM_SEQS] == 256
    assert len(first.decisions) == 1
    assert not second.decisions


def test_patches_are_clamped_per_engine() -> None:
    sample = make_sample(100.0)
    small = replace(
        make_replica_snapshot("m-1", sample),
        config=Config(1, PARAMETERS, {**FIELDS, UTILIZATION: FieldRange(True, 0.5, 0.85)}),
    )
    (outcome,) = run_ticks(RAISED, AUTO, [make_replica_snapshot("m-0", sample), small])
    assert outcome.patches == {"m-0": {UTILIZATION: 0.9}, "m-1": {UTILIZATION: 0.85}}


def test_device_memory_pressure_lowers_kv_memory() -> None:
    snapshot = serving(100.0)
    assert snapshot.ledger is not None
    full = replace(snapshot, ledger=replace(snapshot.ledger, free_bytes=0))
    (outcome,) = run_ticks(RAISED, AUTO, [full])
    assert [decision.reason for decision in outcome.decisions] == [Reason.DEVICE_MEMORY_PRESSURE]
    assert outcome.state.applied[UTILIZATION] == 0.89


def test_unreadable_replica_does_not_block_safety_moves() -> None:
    _, after = run_ticks(
        RAISED,
        AUTO,
        [serving(100.0), make_replica_snapshot("m-1", problem="down")],
        [crash(115.0), make_replica_snapshot("m-1")],
    )
    assert after.state.applied[UTILIZATION] == 0.8
    assert after.metrics_available.reason == "MetricsPartial"


def test_off_mode_applies_nothing() -> None:
    (outcome,) = run_ticks(RAISED, replace(AUTO, mode=Mode.OFF), [serving(100.0)])
    assert (outcome.patches, outcome.tuning_active.reason) == ({}, "Off")


def test_replicas_never_leave_their_bounds_without_numbers() -> None:
    settings = replace(AUTO, scaling=Scaling(2, 5))
    (outcome,) = run_ticks(TunerState(starts=PARAMETERS), settings, [make_replica_snapshot("m-0", problem="down")])
    assert outcome.replicas == 2


def test_new_start_value_discards_tuned_value() -> None:
    (outcome,) = run_ticks(RAISED, replace(AUTO, starts={**PARAMETERS, UTILIZATION: 0.75}), [serving(100.0)])
    assert UTILIZATION not in outcome.state.applied


@pytest.mark.parametrize("pause", [10.0, 130.0, 1800.0])
def test_delayed_crashes_after_raises_happen_at_most_twice(pause: float) -> None:
    """A third of the work is recomputed for lack of KV blocks; every raise kills the engine `pause` later."""
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


def test_engine_with_old_start_value_is_not_raised() -> None:
    """After a lowered start value its engine is replaced soon, so the state does not change."""
    state = TunerState(starts={**PARAMETERS, UTILIZATION: 0.8})
    (after,) = run_ticks(state, AUTO, [serving(100.0)])
    assert after.state.raised == {}


EXTREMES = (0.0, 1e-300, 1.0, 1e15, 1e300, math.inf, math.nan, -1.0)


@pytest.mark.parametrize("seed", range(60))
def test_numbers_of_engines_never_raise(seed: int) -> None:
    """Whatever one engine reports, the iteration ends with a result: pods of the resource are still replaced."""
    rng = random.Random(seed)
    settings = Settings(Mode.AUTO, scaling=Scaling(1, 6))
    state = TunerState(applied={Parameter.GPU_MEMORY_UTILIZATION: 0.9}, starts={Parameter.GPU_MEMORY_UTILIZATION: 0.8})
    for tick in range(30):
        at = 1000.0 + 15.0 * tick
        sample = make_sample(at)
        for part in ("counters", "gauges"):
            numbers = getattr(sample, part)
            names = [name for name in numbers.__slots__ if isinstance(getattr(numbers, name), float)]
            changed = {name: rng.choice(EXTREMES) for name in names if rng.random() < 0.1}
            sample = replace(sample, **{part: replace(numbers, **changed)})
        snapshot = make_replica_snapshot(sample=sample)
        assert snapshot.ledger is not None
        sizes = {name: rng.choice((0, 1, 10**15, 10**400)) for name in ("device_bytes", "free_bytes", "blocks_total")}
        if rng.random() < 0.3:
            snapshot = replace(snapshot, ledger=replace(snapshot.ledger, **sizes))
        outcome = decide([snapshot, serving(at, "m-1")], state, settings, at)
        state = outcome.state
        assert outcome.replicas is not None
        assert 1 <= outcome.replicas <= 6
        to_json(state)


@pytest.mark.parametrize("error", [OverflowError("too large"), ZeroDivisionError("by zero"), ValueError("nan")])
def test_failed_calculation_keeps_values(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    state = decide([serving(0.0)], TunerState(), Settings(Mode.AUTO, scaling=Scaling(1, 6)), 0.0).state
    monkeypatch.setattr("trimtab_operator.tuner.decide.with_observation", fail)
    outcome = decide([serving(15.0)], state, Settings(Mode.AUTO, scaling=Scaling(1, 6)), 15.0)
    assert outcome.replicas == state.scaling.desired == 1
    assert (outcome.metrics_available.ok, outcome.metrics_available.reason) == (False, Reason.METRICS_INCONSISTENT)
    assert str(error) in outcome.metrics_available.message
    assert not outcome.patches
    monkeypatch.undo()
    assert decide([serving(30.0)], outcome.state, Settings(Mode.AUTO), 30.0).metrics_available.ok
