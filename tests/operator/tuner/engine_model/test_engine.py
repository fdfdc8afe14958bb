"""One engine in virtual time. tests/simulator/test_stepwise.py compares it with the real scheduler."""

from __future__ import annotations

import pytest
from trimtab_operator.tuner.engine_model import EngineModel, EngineModelPolicy, KvBlocks, Sequence, StepCost

COST = StepCost(0.01, 0.001, 0.0, 0.0)  # 10 ms a step and 1 ms a token: times are easy to calculate


def make_engine(*, slots: int = 8, budget: int = 100, blocks: int = 100, slow_gap: float = 1.0) -> EngineModel:
    return EngineModel(COST, EngineModelPolicy(slots, budget), KvBlocks(blocks), slow_gap=slow_gap)


def test_single_request_takes_prefill_plus_one_step_per_token() -> None:
    engine, sequence = make_engine(), Sequence(5.0, 50, 4)
    engine.run_until(5.0)
    engine.add(sequence)
    engine.drain()
    assert sequence.ttft == pytest.approx(0.060)
    assert sequence.mean_gap == pytest.approx(0.011)
    assert sequence.finished_at == pytest.approx(5.093)
    assert engine.now == sequence.finished_at


def test_a_prompt_longer_than_the_budget_is_cut() -> None:
    engine, sequence = make_engine(budget=20), Sequence(0.0, 50, 1)
    engine.add(sequence)
    engine.drain()
    assert sequence.ttft == pytest.approx(2 * 0.030 + 0.020)
    assert engine.counters.sums["prefill"].steps == 3


def test_a_request_that_the_cache_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="holds 160 tokens"):
        make_engine(blocks=10).add(Sequence(0.0, 100, 61))


def test_slow_gaps_are_counted_per_request() -> None:
    engine = make_engine(slow_gap=0.05)
    first, second = Sequence(0.0, 10, 30), Sequence(0.1, 60, 2)
    engine.add(first)
    engine.run_until(0.1)
    engine.add(second)
    engine.drain()
    assert (first.num_slow_gaps, second.num_slow_gaps) == (1, 0)


def test_in_flight_counts_requests_of_the_current_step() -> None:
    engine, sequence = make_engine(), Sequence(0.0, 50, 1)
    engine.add(sequence)
    engine.run_until(0.01)
    assert engine.now == pytest.approx(0.060)
    assert (engine.in_flight(0.01), engine.in_flight(engine.now)) == (1, 0)


def test_no_request_ends_before_quiet_until() -> None:
    engine = make_engine()
    engine.add(Sequence(0.0, 10, 20))
    engine.run_until(0.02)
    quiet = engine.quiet_until()
    engine.run_until(quiet)
    assert engine.in_flight(quiet) == 1
    engine.run_until(quiet + 0.02)
    assert engine.in_flight(quiet + 0.02) == 0


def test_blocked_seconds_count_missing_sequence_slots() -> None:
    engine = make_engine(slots=1)
    for _ in range(2):
        engine.add(Sequence(0.0, 10, 10))
    engine.drain()
    assert engine.counters.blocked_seconds["seqs"] == pytest.approx(0.020 + 9 * 0.011)


def test_unfinished_yields_requests_with_output_tokens() -> None:
    engine = make_engine(slots=1)
    running, waiting = Sequence(0.0, 10, 10), Sequence(0.0, 10, 10)
    engine.add(running)
    engine.add(waiting)
    engine.run_until(0.025)
    assert dict(engine.unfinished()) == {running: 2, waiting: 0}
    assert (engine.num_running, engine.num_waiting, engine.waiting_tokens) == (1, 1, 10)


def test_engine_started_from_in_flight_requests_continues_alike() -> None:
    cost = StepCost(8e-3, 1 / 16_000, 3e-5, 4e-9)
    policy = EngineModelPolicy(64, 512)
    original = EngineModel(cost, policy, KvBlocks(2000))
    for index in range(20):
        original.run_until(0.3 * index)
        original.add(Sequence(0.3 * index, 200, 300 + 20 * index))
    original.run_until(6.0)
    copy = EngineModel(cost, policy, KvBlocks(2000), now=original.now)
    rest = list(original.unfinished())
    for there, generated in rest:
        copy.add_in_progress(Sequence(there.arrival, there.num_prompt, there.num_output), generated)
    assert (copy.num_running, copy.blocks.free) == (original.num_running, original.blocks.free)
    original.drain()
    copy.drain()
    assert copy.now == pytest.approx(original.now, rel=1e-3)


def test_in_flight_requests_without_slot_or_blocks_are_queued() -> None:
    engine = make_engine(slots=1, blocks=10)
    engine.add_in_progress(Sequence(0.0, 32, 20), 5)
    engine.add_in_progress(Sequence(0.0, 32, 20), 5)
    assert (engine.num_running, engine.num_waiting, engine.waiting_tokens) == (1, 1, 37)
    engine.drain()
    assert len(engine.finished) == 2
    with pytest.raises(ValueError, match="holds 160 tokens"):
        make_engine(blocks=10).add_in_progress(Sequence(0.0, 150, 20), 5)
