"""Safety comes first: bounds, crashes, memory that others took, and what each engine can be asked for."""

from dataclasses import replace

import pytest
from trimtab_operator.tuner.decide import Outcome, decide
from trimtab_operator.tuner.knobs import FieldRange, Knob
from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.samples import Config, Look, Phase
from trimtab_operator.tuner.settings import Bounds, Mode, Scaling, Settings
from trimtab_operator.tuner.state import Memory
from trimtab_operator.tuner.stored import from_json, rebuilt, to_json
from tuner_looks import FIELDS, KNOBS, a_look, a_sample

UTILIZATION = Knob.GPU_MEMORY_UTILIZATION
AUTO = Settings(Mode.AUTO, starts=KNOBS)
RAISED = Memory(applied={UTILIZATION: 0.9}, starts=KNOBS)


def serving(at: float, name: str = "m-0", **changes: object) -> Look:
    return a_look(name, a_sample(at), values={UTILIZATION: 0.9}, **changes)


def turned(memory: Memory, settings: Settings, *ticks: list[Look], start: float = 100.0) -> list[Outcome]:
    outcomes = []
    for index, looks in enumerate(ticks):
        outcome = decide(looks, memory, settings, start + 15.0 * index)
        memory = outcome.memory
        outcomes.append(outcome)
    return outcomes


def crash(at: float, restarts: int = 1, *, oom: bool = True) -> Look:
    return serving(at, restarts=restarts, was_oom_killed=oom)


@pytest.mark.parametrize("oom", [True, False])
def test_a_crash_above_the_start_lowers_at_once_and_pins(oom: bool) -> None:
    before, after = turned(RAISED, AUTO, [serving(100.0)], [crash(115.0, oom=oom)])
    assert not before.decisions
    (decision,) = after.decisions
    assert decision.reason is Reason.RESTARTED_AFTER
    assert after.memory.applied[UTILIZATION] == 0.8
    assert after.patches == {"m-0": {UTILIZATION: 0.8}}
    assert after.memory.pins[0].limit == 0.8
    assert ("ran out of memory" in decision.sentence) == oom


def test_a_crash_at_the_start_values_moves_nothing() -> None:
    memory = Memory(starts=KNOBS)
    _, after = turned(memory, AUTO, [a_look(sample=a_sample(100.0))], [a_look(sample=a_sample(115.0), restarts=1)])
    assert not after.decisions


def test_a_crash_is_seen_while_the_engine_still_loads() -> None:
    loading = a_look(phase=Phase.STARTING, restarts=1, was_oom_killed=True, problem="not ready")
    _, after = turned(RAISED, AUTO, [serving(100.0)], [loading])
    assert after.memory.applied[UTILIZATION] == 0.8


def restarted(memory: Memory) -> Memory:
    """What a new operator knows of it."""
    known = from_json(to_json(memory))
    assert known is not None
    return known


def test_a_crash_that_no_operator_saw_is_seen_by_the_next_one() -> None:
    (before,) = turned(RAISED, AUTO, [serving(100.0)])
    (after,) = turned(restarted(before.memory), AUTO, [crash(9000.0)], start=9000.0)
    assert [decision.reason for decision in after.decisions] == [Reason.RESTARTED_AFTER]
    assert after.memory.applied[UTILIZATION] == 0.8
    (later,) = turned(restarted(after.memory), AUTO, [crash(9015.0)], start=9015.0)
    assert (later.decisions, len(later.memory.crashes)) == ((), 1)  # told once


def test_an_engine_that_dies_of_the_raised_values_before_it_ever_serves_is_one_of_their_victims() -> None:
    """A replica on another node, where less is free: it gets the values while it loads."""
    readable = a_look("m-0", a_sample(100.0))
    loading = replace(readable, phase=Phase.STARTING, instance="uid-2", sample=None, ledger=None)
    again = replace(loading, restarts=1, was_oom_killed=True)
    first, second = turned(RAISED, AUTO, [loading], [again])
    assert first.patches == {"m-0": {UTILIZATION: 0.9}}
    assert [decision.reason for decision in second.decisions] == [Reason.RESTARTED_AFTER]
    assert second.patches == {}


def test_an_engine_that_crashes_at_its_own_start_values_blames_nothing() -> None:
    """What an image that cannot start does says nothing of values that it never had."""
    crashing = a_look(phase=Phase.STARTING, instance="uid-2", restarts=1, problem="no answer")
    outcomes = turned(RAISED, AUTO, [serving(100.0)], *([replace(crashing, restarts=n)] for n in range(1, 5)))
    assert not [decision for outcome in outcomes for decision in outcome.decisions]


def test_the_exit_code_of_what_crashed_is_told() -> None:
    _, after = turned(RAISED, AUTO, [serving(100.0)], [serving(115.0, restarts=1, exit_code=1)])
    assert "an engine crashed (exit code 1) above the start values (crash 1)" in after.decisions[0].sentence


def test_when_the_crash_budget_is_spent_no_knob_rises_above_its_start_until_the_owner_writes_another() -> None:
    spent, values = replace(RAISED, applied={}, crashes=(1.0, 2.0)), dict(KNOBS)
    for at in range(1000, 1600, 15):
        sample = a_sample(float(at), kv_usage=0.99, preemptions={"capacity": 2.0 * at}, recomputed_tokens=80.0 * at)
        (outcome,) = turned(spent, AUTO, [a_look(sample=sample, values=values)], start=float(at))
        spent = outcome.memory
        values |= outcome.patches.get("m-0", {})
        assert all(value <= KNOBS[knob] for knob, value in spent.applied.items() if knob is not Knob.WATERMARK)
    assert outcome.tuning_active.reason == "CrashBudgetSpent"
    (outcome,) = turned(spent, replace(AUTO, starts={**KNOBS, Knob.MAX_NUM_SEQS: 32}), [a_look()])
    assert outcome.memory.crashes == ()


def test_a_value_whose_start_nobody_knows_any_more_is_given_to_no_engine() -> None:
    """Its memory was lost, and the owner wrote no start: nobody could tell whether it had been raised."""
    lost = rebuilt({"max_num_seqs": 200}, starts={})
    (outcome,) = turned(lost, replace(AUTO, starts={}), [a_look(sample=a_sample(100.0))])
    assert (outcome.memory.applied, outcome.patches) == ({}, {})


@pytest.mark.parametrize(
    ("bounds", "inside"),
    [(Bounds(0.5, 0.85), 0.85), (Bounds(0.92, 0.95), 0.92), (Bounds(0.6, 0.6), 0.6)],
)
def test_new_bounds_hold_at_once(bounds: Bounds, inside: float) -> None:
    (outcome,) = turned(RAISED, replace(AUTO, bounds={UTILIZATION: bounds}), [serving(100.0)])
    assert outcome.memory.applied[UTILIZATION] == inside
    assert [decision.reason for decision in outcome.decisions] == [Reason.BOUNDS_CHANGED]


def test_a_count_above_every_engines_cap_goes_to_the_nearest_once() -> None:
    memory = Memory(applied={Knob.MAX_NUM_SEQS: 999}, starts=KNOBS)
    first, second = turned(memory, AUTO, [a_look(sample=a_sample(100.0))], [a_look(sample=a_sample(115.0))])
    assert first.memory.applied[Knob.MAX_NUM_SEQS] == 256
    assert len(first.decisions) == 1
    assert not second.decisions


def test_each_engine_is_asked_for_the_nearest_that_it_takes() -> None:
    sample = a_sample(100.0)
    small = replace(
        a_look("m-1", sample), config=Config(1, KNOBS, {**FIELDS, UTILIZATION: FieldRange(True, 0.5, 0.85)})
    )
    (outcome,) = turned(RAISED, AUTO, [a_look("m-0", sample), small])
    assert outcome.patches == {"m-0": {UTILIZATION: 0.9}, "m-1": {UTILIZATION: 0.85}}


def test_others_that_take_the_devices_memory_are_given_way() -> None:
    look = serving(100.0)
    assert look.ledger is not None
    full = replace(look, ledger=replace(look.ledger, free_bytes=0))
    (outcome,) = turned(RAISED, AUTO, [full])
    assert [decision.reason for decision in outcome.decisions] == [Reason.MEMORY_TAKEN]
    assert outcome.memory.applied[UTILIZATION] == 0.89


def test_one_dead_replica_holds_no_safety_move_of_the_others() -> None:
    _, after = turned(RAISED, AUTO, [serving(100.0), a_look("m-1", problem="down")], [crash(115.0), a_look("m-1")])
    assert after.memory.applied[UTILIZATION] == 0.8
    assert after.metrics_available.reason == "MetricsPartial"


def test_off_applies_nothing_and_says_so() -> None:
    (outcome,) = turned(RAISED, replace(AUTO, mode=Mode.OFF), [serving(100.0)])
    assert (outcome.patches, outcome.tuning_active.reason) == ({}, "Off")


def test_replicas_never_leave_their_bounds_without_numbers() -> None:
    settings = replace(AUTO, scaling=Scaling(2, 5))
    (outcome,) = turned(Memory(starts=KNOBS), settings, [a_look("m-0", problem="down")])
    assert outcome.replicas == 2


def test_a_new_start_value_is_the_owners_word() -> None:
    (outcome,) = turned(RAISED, replace(AUTO, starts={**KNOBS, UTILIZATION: 0.75}), [serving(100.0)])
    assert UTILIZATION not in outcome.memory.applied


@pytest.mark.parametrize("pause", [10.0, 130.0, 1800.0])
def test_an_engine_that_dies_some_time_after_each_raise_crashes_twice_at_most(pause: float) -> None:
    """For want of room a third of the work is done twice; any raise of the memory kills the engine `pause` later."""
    memory, value, restarts, raised_at, began = Memory(starts=KNOBS), 0.8, 0, None, 0.0
    for tick in range(600):
        now = 1000.0 + 15.0 * tick
        raised_at = (raised_at or now) if value > 0.8 else None
        is_dead = raised_at is not None and now - raised_at >= pause
        if is_dead:
            restarts, value, raised_at, began = restarts + 1, 0.8, None, now - 1.0
        age = now - began
        sample = a_sample(now, kv_usage=0.99, preemptions={"capacity": 2 * age}, recomputed_tokens=80 * age)
        look = a_look(sample=sample, values={UTILIZATION: value}, restarts=restarts, was_oom_killed=is_dead)
        outcome = decide([look], memory, AUTO, now)
        memory = outcome.memory
        value = float(outcome.patches.get("m-0", {}).get(UTILIZATION, value))
    assert 1 <= restarts <= 2
    assert value == 0.8


def test_an_engine_that_still_runs_what_its_owner_wrote_before_was_told_nothing() -> None:
    """Its owner wrote a lower start: it goes soon, and nothing of it is worth a write."""
    memory = Memory(starts={**KNOBS, UTILIZATION: 0.8})
    (after,) = turned(memory, AUTO, [serving(100.0)])
    assert after.memory.raised == {}
