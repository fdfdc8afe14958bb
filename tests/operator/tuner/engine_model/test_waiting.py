"""Queue order `deadline`: requests in time and late requests. tests/simulator/test_stepwise.py compares it with the
engine.
"""

from __future__ import annotations

import itertools
import random

import pytest
from trimtab_operator.tuner.engine_model import Allowance, EngineModel, EngineModelPolicy, KvBlocks, Sequence, StepCost

COST = StepCost(0.01, 0.001, 0.0, 0.0)  # 10 ms a step and 1 ms a token
TWO_SECONDS = Allowance(2.0)


def serve(rows: list[tuple[float, int, int]], allowance: Allowance | None, *, slots: int = 1) -> list[Sequence]:
    """Serve these arrivals with one engine; return the sequences in order of arrival."""
    engine = EngineModel(COST, EngineModelPolicy(slots, 200, allowance=allowance), KvBlocks(1000))
    sequences = [Sequence(*row) for row in rows]
    for sequence in sequences:
        engine.run_until(sequence.arrival)
        engine.add(sequence)
    engine.drain()
    return sequences


def in_time(sequences: list[Sequence], seconds: float = 2.0) -> list[bool]:
    return [sequence.ttft is not None and sequence.ttft <= seconds for sequence in sequences]


def overload(seconds: float) -> list[tuple[float, int, int]]:
    """Return requests of 0.11 s each on one slot, arriving every 0.08 s."""
    return [(0.08 * number, 100, 1) for number in range(int(seconds / 0.08))]


def test_overload_delays_only_requests_beyond_capacity() -> None:
    by_arrival = in_time(serve(overload(60.0), None))
    ordered = in_time(serve(overload(60.0), TWO_SECONDS))
    assert sum(by_arrival) < 0.15 * len(by_arrival)
    assert sum(ordered) > 0.9 * (0.08 / 0.11) * len(ordered) * 0.9  # the capacity, less one in ten
    assert not any(by_arrival[-100:])
    assert sum(ordered[-100:]) > 50


def test_without_overload_the_order_is_that_of_arrival() -> None:
    dice = random.Random(3)
    rows = [(0.2 * number, dice.randint(1, 100), dice.randint(1, 3)) for number in range(200)]
    times = [[s.first_token_at for s in serve(rows, allowance)] for allowance in (None, TWO_SECONDS)]
    assert times[0] == times[1]


def test_every_tenth_admission_is_the_oldest_late_request() -> None:
    sequences = serve(overload(60.0), TWO_SECONDS)
    by_start = sorted(sequences, key=lambda sequence: sequence.first_token_at or 0.0)
    late = [sequence.was_late for sequence in by_start]
    first = late.index(True)
    places = [
        place for place in range(first, len(late)) if late[place] and (by_start[place].first_token_at or 0) < 55.0
    ]
    assert len(places) > 10
    assert {after - before for before, after in itertools.pairwise(places)} == {10}
    served_late = [s.arrival for s in by_start if s.was_late]
    assert served_late == sorted(served_late)


def test_a_longer_prompt_may_wait_for_longer() -> None:
    allowance = Allowance(0.4, 0.01)
    # After a prompt of one second both have waited for 0.9 s: more than 0.75 of 0.5 s, less than 0.75 of 2.4 s.
    rows = [(0.0, 1000, 1), (0.1, 10, 1), (0.1, 200, 1)]
    _, short, long = serve(rows, allowance)
    assert (short.was_late, long.was_late) == (True, False)
    assert (long.first_token_at or 0.0) < (short.first_token_at or 0.0)


def test_preempted_request_with_a_token_is_never_late() -> None:
    engine = EngineModel(COST, EngineModelPolicy(4, 100, allowance=Allowance(0.2)), KvBlocks(6))
    first, second = Sequence(0.0, 40, 40), Sequence(0.0, 30, 50)
    for sequence in (first, second):
        engine.add(sequence)
    engine.run_until(0.5)
    assert second.num_preemptions == 1
    engine.add(Sequence(0.5, 20, 1))
    engine.drain()
    assert not second.was_late


def test_admitted_late_request_keeps_blocks_before_younger_ones() -> None:
    engine = EngineModel(COST, EngineModelPolicy(2, 200, allowance=Allowance(0.1)), KvBlocks(8))
    late, young = Sequence(0.0, 20, 100), Sequence(0.8, 16, 60)
    engine.add(Sequence(0.0, 100, 1))
    engine.add(Sequence(0.0, 16, 40))
    engine.add(late)
    engine.run_until(0.8)
    engine.add(young)
    engine.drain()
    assert late.was_late
    assert (late.num_preemptions, young.num_preemptions > 0) == (0, True)


def test_longer_allowance_ends_lateness_of_waiting_requests() -> None:
    engine = EngineModel(COST, EngineModelPolicy(1, 200, allowance=Allowance(0.2)), KvBlocks(1000))
    sequences = [Sequence(0.0, 100, 5) for _ in range(8)]
    for sequence in sequences:
        engine.add(sequence)
    engine.run_until(0.5)
    assert sequences[-1].was_late
    engine.set_policy(EngineModelPolicy(1, 200, allowance=Allowance(100.0)))
    engine.add(Sequence(0.5, 10, 1))
    engine.drain()
    starts = [sequence.first_token_at for sequence in engine.finished]
    assert starts == sorted(starts, key=lambda start: start or 0.0)
    assert engine.finished[-1].arrival == 0.5


def test_order_of_arrival_ends_all_lateness() -> None:
    engine = EngineModel(COST, EngineModelPolicy(1, 200, allowance=Allowance(0.2)), KvBlocks(1000))
    sequences = [Sequence(0.01 * number, 100, 5) for number in range(20)]
    for sequence in sequences:
        engine.run_until(sequence.arrival)
        engine.add(sequence)
    engine.run_until(1.0)
    assert any(sequence.was_late for sequence in sequences)
    engine.set_policy(EngineModelPolicy(1, 200))
    engine.drain()
    rest = [s for s in sequences if (s.first_token_at or 0.0) > 1.1]
    assert [s.arrival for s in sorted(rest, key=lambda s: s.first_token_at or 0.0)] == [s.arrival for s in rest]


@pytest.mark.parametrize("seed", range(20))
def test_no_request_ends_before_quiet_until_under_overload(seed: int) -> None:
    dice = random.Random(seed)
    policy = EngineModelPolicy(32, 64, 0.5, Allowance(0.3, 0.001))  # a watermark, so that no request is preempted
    engine = EngineModel(COST, policy, KvBlocks(40))
    at = 0.0
    for _ in range(150):
        at += dice.expovariate(12.0)
        quiet = engine.quiet_until()
        before = len(engine.finished)
        engine.run_until(min(at, quiet - 1e-9))
        assert len(engine.finished) == before
        engine.run_until(at)
        engine.add(Sequence(at, dice.randint(1, 150), dice.randint(1, 60)))
    engine.drain()
    assert len(engine.finished) == 150
    assert sum(engine.counters.preempted.values()) == 0
    assert any(sequence.was_late for sequence in engine.finished)
    assert engine.is_idle
    assert engine.blocks.free == engine.blocks.total
