"""One tick after the other: when the tuner holds, acts, rolls back, re-applies and forgets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from trimtab_operator.tuner import (
    Bounds,
    EngineConfig,
    EngineLoad,
    EnginePatch,
    FieldRange,
    GroupReading,
    Knob,
    Mode,
    Pace,
    Reason,
    Settings,
    TickResult,
    TunerState,
    Value,
    tick,
)

UTILIZATION, SEQS, TOKENS = Knob.GPU_MEMORY_UTILIZATION, Knob.MAX_NUM_SEQS, Knob.MAX_NUM_BATCHED_TOKENS
STARTS: dict[Knob, Value] = {UTILIZATION: 0.74, SEQS: 32, TOKENS: 512}
AUTO = Settings(Mode.AUTO, {UTILIZATION: Bounds(0.5, 0.95), SEQS: Bounds(2, 64), TOKENS: Bounds(64, 1024)}, STARTS)
AUTO_WITHOUT_BOUNDS = Settings(Mode.AUTO, {}, STARTS)
T0 = 1_000_000.0


def a_reading(
    at: float,
    preemptions: float = 0,
    *,
    group: str = "a",
    ready: bool = True,
    values: Mapping[Knob, Value] = STARTS,
    generation: int = 1,
    tokens: float | None = None,
    running: float = 8,
    waiting: float = 8,
    kv_usage: float = 0.98,
) -> GroupReading:
    fields = {
        UTILIZATION: FieldRange(True, 0.5, 0.95),
        SEQS: FieldRange(True, 1, 64),
        TOKENS: FieldRange(True, 1, 1024),
    }
    tokens = (at - T0 + 1000) * 50 if tokens is None else tokens
    load = EngineLoad(
        at, generation, preemptions, tokens, running, waiting, kv_usage, 151, 148, 16, 737_280, 1_572_864_000
    )
    return GroupReading(group, ready, EngineConfig(generation, dict(values), fields, 1024), load)


def run(
    state: TunerState, ticks: Sequence[Sequence[GroupReading]], settings: Settings = AUTO, *, start: float = T0
) -> list[TickResult]:
    """Tick every five seconds with the given readings."""
    results = []
    for number, readings in enumerate(ticks):
        results.append(tick(state, readings, settings, start + 5 * number))
        state = results[-1].state
    return results


def preempting(
    n: int, *, per_tick: int = 2, start: float = T0, first: int = 0, **reading: object
) -> list[list[GroupReading]]:
    return [[a_reading(start + 5 * i, first + per_tick * i, **reading)] for i in range(n)]  # type: ignore[arg-type]


def after_a_raise() -> TunerState:
    """A state in which the utilisation was just raised; the raise is under watch."""
    result = run(TunerState(), preempting(3))[-1]
    assert [d.knob for d in result.decisions] == [UTILIZATION]
    return result.state


# --- evidence ---------------------------------------------------------------------------------------------------------


def test_sustained_preemptions_lead_to_one_decision_a_patch_and_a_history_entry() -> None:
    results = run(TunerState(), preempting(3))
    assert [len(result.decisions) for result in results] == [0, 0, 1]
    last = results[-1]
    assert last.patches == (EnginePatch("a", {UTILIZATION: 0.86}),)
    assert last.applied == {UTILIZATION: 0.86}
    assert last.history == last.decisions
    assert last.decisions[0].reason is Reason.KV_CACHE_TOO_SMALL


@pytest.mark.parametrize(
    "counts",
    [
        [0, 0, 0, 0, 0],  # none
        [5, 5, 5, 5, 5],  # some, long ago
        [0, 1, 2, 2, 2],  # fewer than three
        [0, 40, 40, 40, 40],  # one burst is not sustained
        [0, 2, 4, 4, 4, 4, 4],  # it has stopped before there was enough to act upon
    ],
)
def test_what_is_not_sustained_moves_nothing(counts: list[int]) -> None:
    ticks = [[a_reading(T0 + 5 * i, count)] for i, count in enumerate(counts)]
    if counts[-1] == 4:
        ticks[1] = [GroupReading("a", True, problem="time-out")]  # the second look failed
        ticks[2] = [GroupReading("a", True, problem="time-out")]
    assert all(not result.decisions for result in run(TunerState(), ticks))


def test_preemptions_with_an_empty_kv_cache_are_not_believed() -> None:
    assert all(not result.decisions for result in run(TunerState(), preempting(10, kv_usage=0.1)))


def test_the_group_under_most_pressure_decides_for_all() -> None:
    ticks = [[a_reading(T0 + 5 * i, 3 * i, group="b"), a_reading(T0 + 5 * i, 0, group="a")] for i in range(3)]
    last = run(TunerState(), ticks)[-1]
    assert last.patches == (EnginePatch("a", {UTILIZATION: 0.86}), EnginePatch("b", {UTILIZATION: 0.86}))


def test_the_metrics_of_a_group_that_is_not_ready_are_not_used() -> None:
    ticks = [[a_reading(T0 + 5 * i, 9 * i, group="b", ready=False), a_reading(T0 + 5 * i, 0)] for i in range(5)]
    results = run(TunerState(), ticks)
    assert all(not result.decisions and result.metrics_available.ok for result in results)


# --- holding ----------------------------------------------------------------------------------------------------------


def unreadable(at: float) -> list[GroupReading]:
    return [GroupReading("a", True, problem="no answer within 5 s")]


def partial(at: float) -> list[GroupReading]:
    return [a_reading(at, 100, group="b"), GroupReading("a", True, problem="no answer within 5 s")]


def stale(at: float) -> list[GroupReading]:
    return [a_reading(at - 31, 100)]


def not_ready(at: float) -> list[GroupReading]:
    return [a_reading(at, 100, ready=False)]


def not_a_number(at: float) -> list[GroupReading]:
    return [a_reading(at, math.nan)]


@pytest.mark.parametrize(
    ("readings", "reason", "message"),
    [
        (unreadable, "MetricsMissing", "no metrics from a: no answer within 5 s"),
        (partial, "MetricsPartial", "metrics from 1 of 2 ready replicas; a: no answer within 5 s"),
        (stale, "MetricsStale", "metrics of a are older than 30 s"),
        (not_ready, "NoReadyReplica", "no replica is ready; nothing is measured"),
        (not_a_number, "MetricsInconsistent", "metrics of a contradict themselves: a metric is not a number"),
    ],
)
def test_metrics_that_cannot_be_trusted_hold_everything_and_say_so(readings: object, reason: str, message: str) -> None:
    assert callable(readings)
    pressed = run(TunerState(), preempting(2))[-1].state
    results = run(pressed, [readings(T0 + 10 + 5 * i) for i in range(4)], start=T0 + 10)
    for result in results:
        assert (result.metrics_available.ok, result.metrics_available.reason) == (False, reason)
        assert result.metrics_available.message == message
        assert (result.tuning_active.ok, result.tuning_active.reason) == (False, "MetricsUnavailable")
        assert result.decisions == ()
        assert result.patches == ()


def test_metrics_may_trail_the_configuration_for_a_moment_and_no_longer() -> None:
    pressed = run(TunerState(), preempting(2))[-1].state
    readings = [a_reading(T0 + 10 + 5 * i, 4 + 9 * i, generation=1) for i in range(8)]
    trailing = [
        [replace(r, config=replace(r.config, generation=2))]  # type: ignore[type-var]
        for r in readings
    ]
    results = run(pressed, trailing, start=T0 + 10)
    assert [result.metrics_available.ok for result in results] == [True] * 7 + [False]
    assert results[-1].metrics_available.reason == "MetricsInconsistent"
    assert all(not result.decisions for result in results)


def test_a_counter_that_starts_again_is_a_restart_and_not_a_burst() -> None:
    ticks = [[a_reading(T0, 1000)], [a_reading(T0 + 5, 1000)], [a_reading(T0 + 10, 4)], [a_reading(T0 + 15, 4)]]
    results = run(TunerState(), ticks)
    assert all(not result.decisions and result.metrics_available.ok for result in results)


def test_the_same_sample_twice_is_no_new_evidence() -> None:
    ticks = [[a_reading(T0, 0)], [a_reading(T0 + 5, 9)], [a_reading(T0 + 5, 9)], [a_reading(T0 + 5, 9)]]
    assert all(not result.decisions for result in run(TunerState(), ticks))


# --- after a change ---------------------------------------------------------------------------------------------------


def test_nothing_moves_again_before_the_last_change_has_been_judged() -> None:
    state = after_a_raise()
    values = {**STARTS, UTILIZATION: 0.86}
    ticks = preempting(7, start=T0 + 15, first=6, values=values, generation=2)
    results = run(state, ticks, start=T0 + 15)
    first = next(number for number, result in enumerate(results) if result.decisions)
    assert 5 * first + 5 >= AUTO.pace.settle_seconds + AUTO.pace.judge_seconds
    assert results[first].decisions[0].before == 0.86


def test_a_change_that_made_things_worse_is_rolled_back_and_not_tried_again_for_a_while() -> None:
    state = after_a_raise()
    values: dict[Knob, Value] = {**STARTS, UTILIZATION: 0.86}
    ticks = preempting(6, per_tick=30, start=T0 + 15, first=6, values=values, generation=2)
    results = run(state, ticks, start=T0 + 15)
    made = [decision for result in results for decision in result.decisions]
    assert made[0].reason is Reason.MADE_WORSE
    assert (made[0].before, made[0].after) == (0.86, 0.74)
    assert made[0].sentence.startswith(
        "Rolled gpu_memory_utilization back from 0.86 to 0.74: preemptions rose from 8.0 to 120.0 per 1,000 tokens"
    )
    later = preempting(8, start=T0 + 50, first=500, generation=3)
    again = [d for result in run(results[-1].state, later, start=T0 + 50) for d in result.decisions]
    assert [decision.knob for decision in again] == [SEQS]  # the next rule, not the same knob again


def test_a_remembered_bad_value_expires() -> None:
    state = after_a_raise()
    ticks = preempting(6, per_tick=30, start=T0 + 15, first=6, values={**STARTS, UTILIZATION: 0.86}, generation=2)
    state = run(state, ticks, start=T0 + 15)[-1].state
    late = T0 + 40 + AUTO.pace.bad_value_seconds + 1
    results = run(state, preempting(3, start=late, first=900, generation=3), start=late)
    assert [d.knob for d in results[-1].decisions] == [UTILIZATION]


def test_more_preemptions_under_a_heavier_load_are_not_blamed_on_the_change() -> None:
    state = after_a_raise()
    values = {**STARTS, UTILIZATION: 0.86}
    ticks = preempting(5, per_tick=30, start=T0 + 15, first=6, values=values, generation=2, waiting=40)
    assert all(d.reason is not Reason.MADE_WORSE for r in run(state, ticks, start=T0 + 15) for d in r.decisions)


def test_an_engine_that_restarts_right_after_a_raise_gets_the_old_value_back() -> None:
    state = run(
        after_a_raise(),
        preempting(1, start=T0 + 15, first=6, values={**STARTS, UTILIZATION: 0.86}, generation=2),
        start=T0 + 15,
    )[-1].state
    result = tick(state, [a_reading(T0 + 30, 0, tokens=0)], AUTO, T0 + 30)
    assert [d.reason for d in result.decisions] == [Reason.RESTARTED_AFTER]
    assert result.applied == {UTILIZATION: 0.74}
    assert result.patches == ()  # it started with that value


@pytest.mark.parametrize("with_another_replica", [False, True])
def test_a_crash_after_a_raise_is_seen_however_long_the_model_loads(with_another_replica: bool) -> None:
    raised = {**STARTS, UTILIZATION: 0.86}

    def others(at: float) -> list[GroupReading]:
        return [a_reading(at, 0, group="b", values=raised, generation=2)] if with_another_replica else []

    serving = [[a_reading(T0 + 15, 6, values=raised, generation=2), *others(T0 + 15)]]
    loading = [[GroupReading("a", False, problem="not ready"), *others(T0 + 20 + 5 * i)] for i in range(60)]
    state = run(after_a_raise(), serving + loading, start=T0 + 15)[-1].state
    result = tick(state, [a_reading(T0 + 320, 0, tokens=0), *others(T0 + 320)], AUTO, T0 + 320)
    assert [d.reason for d in result.decisions] == [Reason.RESTARTED_AFTER]
    assert result.applied == {UTILIZATION: 0.74}


def test_a_pod_that_was_replaced_after_a_raise_has_not_crashed() -> None:
    values = {**STARTS, UTILIZATION: 0.86}
    before = replace(a_reading(T0 + 15, 6, values=values, generation=2), instance="uid-1")
    state = tick(after_a_raise(), [before], AUTO, T0 + 15).state
    after = replace(a_reading(T0 + 30, 0, tokens=0), instance="uid-2")
    result = tick(state, [after], AUTO, T0 + 30)
    assert result.decisions == ()
    assert result.patches == (EnginePatch("a", {UTILIZATION: 0.86}),)


def test_many_looks_in_a_moment_are_not_sustained_pressure() -> None:
    state = TunerState()
    for number in range(20):
        at = T0 + 0.3 * number
        result = tick(state, [a_reading(at, 3 * number)], AUTO, at)
        assert result.decisions == ()
        state = result.state


@pytest.mark.parametrize("tick_seconds", [1.0, 5.0, 15.0, 60.0, 300.0])
def test_pressure_is_seen_at_every_pace_within_a_few_ticks(tick_seconds: float) -> None:
    settings = replace(AUTO, pace=Pace.for_tick(tick_seconds))
    state, made = TunerState(), 0
    for number in range(12):
        at = T0 + tick_seconds * number
        result = tick(state, [a_reading(at, 5 * number)], settings, at)
        state, made = result.state, made + len(result.decisions)
        if made:
            break
    assert made == 1


# --- applied values ---------------------------------------------------------------------------------------------------


def test_engines_that_run_other_values_are_patched_again_ready_or_not_and_that_is_no_decision() -> None:
    state = replace(TunerState(), applied={UTILIZATION: 0.86, SEQS: 16}, starts=STARTS)
    tuned = {**STARTS, UTILIZATION: 0.86, SEQS: 16}
    readings = [
        a_reading(T0, group="a", values=tuned),
        a_reading(T0, group="b"),
        a_reading(T0, group="c", ready=False, values={**STARTS, SEQS: 16}),
        GroupReading("d", False, problem="not ready"),
    ]
    result = tick(state, readings, AUTO, T0)
    assert result.patches == (EnginePatch("b", {UTILIZATION: 0.86, SEQS: 16}), EnginePatch("c", {UTILIZATION: 0.86}))
    assert result.decisions == ()
    assert result.tuning_active.reason == "NotYetApplied"


def test_an_engine_that_cannot_take_the_applied_utilisation_gets_the_nearest_and_is_then_left_alone() -> None:
    state = replace(TunerState(), applied={UTILIZATION: 0.45}, starts=STARTS)
    assert tick(state, [a_reading(T0)], AUTO_WITHOUT_BOUNDS, T0).patches == (EnginePatch("a", {UTILIZATION: 0.5}),)
    at_its_limit = a_reading(T0, values={**STARTS, UTILIZATION: 0.5})
    assert tick(state, [at_its_limit], AUTO_WITHOUT_BOUNDS, T0).patches == ()


def test_values_are_applied_again_even_while_the_metrics_are_missing() -> None:
    state = replace(TunerState(), applied={SEQS: 16}, starts=STARTS)
    reading = replace(a_reading(T0), load=None, problem="no metrics")
    assert tick(state, [reading], AUTO, T0).patches == (EnginePatch("a", {SEQS: 16}),)


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.RECOMMEND])
def test_only_auto_patches(mode: Mode) -> None:
    state = replace(TunerState(), applied={SEQS: 16}, starts=STARTS)
    results = run(state, preempting(6), replace(AUTO, mode=mode))
    assert all(result.patches == () and result.applied == {} for result in results)


def test_off_does_nothing_and_says_so() -> None:
    result = run(TunerState(), preempting(6), replace(AUTO, mode=Mode.OFF))[-1]
    assert (result.tuning_active.ok, result.tuning_active.reason) == (False, "Off")
    assert (result.decisions, result.recommendation) == ((), None)


def test_new_bounds_move_an_applied_value_at_once() -> None:
    state = replace(TunerState(), applied={SEQS: 48}, starts=STARTS)
    settings = replace(AUTO, bounds={SEQS: Bounds(2, 24)})
    result = tick(state, [a_reading(T0, values={**STARTS, SEQS: 48})], settings, T0)
    assert result.patches == (EnginePatch("a", {SEQS: 24}),)
    assert [d.reason for d in result.decisions] == [Reason.BOUNDS_CHANGED]
    assert result.decisions[0].sentence == "Moved max_num_seqs from 48 to 24: its bounds no longer allow 48."


def test_a_new_start_value_is_the_owners_word_and_the_tuned_one_is_forgotten() -> None:
    state = replace(TunerState(), applied={SEQS: 16, UTILIZATION: 0.86}, starts=STARTS)
    result = tick(state, [a_reading(T0)], replace(AUTO, starts={**STARTS, SEQS: 8}), T0)
    assert result.applied == {UTILIZATION: 0.86}


# --- what is written --------------------------------------------------------------------------------------------------


def test_an_idle_resource_changes_neither_state_nor_verdicts() -> None:
    results = run(TunerState(), [[a_reading(T0 + 5 * i, 0, running=0, waiting=0)] for i in range(50)])
    assert len({result.state.to_json() for result in results}) == 1
    assert len({(result.metrics_available, result.tuning_active) for result in results}) == 1


def test_the_state_survives_its_json() -> None:
    state = after_a_raise()
    again = TunerState.from_json(state.to_json())
    assert again is not None
    assert again == replace(state, windows={})


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "[" * 100_000, "{}", '{"version": 99}', '{"version": 1, "applied": {"x": 1}}']
)
def test_a_damaged_state_is_no_state(text: str) -> None:
    assert TunerState.from_json(text) is None


def test_a_rebuilt_state_keeps_the_applied_values_that_make_sense() -> None:
    applied = {"gpu_memory_utilization": 0.86, "max_num_seqs": "many", "unknown": 1, "max_num_batched_tokens": True}
    assert TunerState.rebuilt(applied, starts=STARTS).applied == {UTILIZATION: 0.86}


def test_the_history_keeps_the_ten_latest_decisions() -> None:
    state = TunerState(applied={SEQS: 64}, starts=STARTS)
    for most in range(40, 20, -1):
        settings = replace(AUTO, bounds={SEQS: Bounds(2, most)})
        state = tick(state, [a_reading(T0)], settings, T0 + 5 * (40 - most)).state
    assert [decision.after for decision in state.history] == list(range(30, 20, -1))


def test_every_decision_has_an_id_of_its_own() -> None:
    state = TunerState(applied={SEQS: 64, TOKENS: 1024}, starts=STARTS)
    settings = replace(AUTO, bounds={SEQS: Bounds(2, 32), TOKENS: Bounds(64, 512)})
    made = tick(state, [a_reading(T0)], settings, T0).decisions
    assert len({decision.id for decision in made}) == 2


def test_a_lowered_limit_is_given_time_to_drain_down_before_the_next_decision() -> None:
    state = replace(TunerState(), applied={UTILIZATION: 0.95, SEQS: 6}, starts=STARTS)
    values = {**STARTS, UTILIZATION: 0.95, SEQS: 6}
    assert all(not result.decisions for result in run(state, preempting(10, values=values, running=8)))
    drained = run(state, preempting(10, values=values, running=6))
    assert next(d.knob for result in drained for d in result.decisions) is SEQS
