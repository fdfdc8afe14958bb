"""The engine model and the engine's own scheduler serve the same arrivals alike: every time and every count."""

from __future__ import annotations

import random
from dataclasses import astuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepwise_engine import StepwiseEngine
from trimtab_operator.tuner.engine_model import (
    Allowance,
    EngineModel,
    EngineModelPolicy,
    Gaps,
    KvBlocks,
    Sequence,
    StepCost,
)
from trimtab_operator.tuner.engine_model.gaps import fine_edges
from trimtab_simulator.plant.shared_blocks import SharedBlocks

COST = StepCost(0.008, 1 / 16_000, 3e-5, 4e-9, 1e-10)


def arrivals(rng: random.Random, count: int, rate: float, prompt: int, output: int) -> list[tuple[float, int, int]]:
    """Poisson arrivals with lengths from 1 to the given ones."""
    at, rows = 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        rows.append((at, rng.randint(1, prompt), rng.randint(1, output)))
    return rows


def both(
    rows: list[tuple[float, int, int]],
    policy: EngineModelPolicy,
    num_blocks: int,
    *,
    caches: bool = True,
    changes: dict[int, EngineModelPolicy | int] | None = None,
    max_model_len: int | None = None,
) -> tuple[EngineModel, StepwiseEngine]:
    """Serve the same by both. `changes`: before which arrival the policy, or the number of blocks, becomes another."""
    gaps = Gaps(fine_edges())
    fast = EngineModel(COST, policy, KvBlocks(num_blocks, caches=caches), gaps=gaps)
    slow = StepwiseEngine(COST, policy, num_blocks, caches=caches, max_model_len=max_model_len)
    for engine in (fast, slow):
        for index, row in enumerate(rows):
            engine.run_until(row[0])
            change = (changes or {}).get(index)
            if isinstance(change, EngineModelPolicy):
                engine.set_policy(change)
            elif change is not None:
                engine.resize(change)
            engine.add(Sequence(*row))
        engine.drain()
    return fast, slow


def lives(engine: EngineModel | StepwiseEngine) -> list[tuple[float, ...]]:
    """Return the times and counts of each request, by arrival."""
    return sorted(
        (s.arrival, round(s.first_token_at or 0, 6), round(s.finished_at or 0, 6), s.num_preemptions)
        for s in engine.finished
    )


def assert_alike(fast: EngineModel, slow: StepwiseEngine) -> None:
    assert lives(fast) == lives(slow)
    for kind, sums in slow.sums.items():
        assert astuple(fast.counters.sums[kind]) == pytest.approx(astuple(sums), rel=1e-9), kind
    assert fast.counters.recomputed_tokens == slow.recomputed_tokens
    for reason, seconds in fast.counters.blocked_seconds.items():
        assert seconds == pytest.approx(slow.blocked_seconds.get(reason, 0.0), abs=1e-6), reason
    assert fast.gaps is not None
    assert sum(fast.gaps.counts) == len(slow.gaps)
    assert fast.gaps.total_seconds == pytest.approx(sum(slow.gaps))
    for edge in (fine_edges()[210], fine_edges()[300]):
        assert fast.gaps.at_most(edge) == sum(gap <= edge for gap in slow.gaps)
    assert fast.blocks.free == fast.blocks.total


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rate=st.sampled_from([1.0, 5.0, 20.0, 200.0]),
    prompt=st.sampled_from([20, 200, 1500]),
    output=st.sampled_from([3, 40, 300]),
    slots=st.sampled_from([2, 5, 16]),
    budget=st.sampled_from([16, 64, 512, 4096]),
    blocks=st.sampled_from([115, 150, 300, 2000]),
    watermark=st.sampled_from([0.0, 0.05, 0.3]),
    caches=st.booleans(),
)
def test_engine_model_matches_scheduler_token_times(
    seed: int,
    rate: float,
    prompt: int,
    output: int,
    slots: int,
    budget: int,
    blocks: int,
    watermark: float,
    caches: bool,
) -> None:
    rows = arrivals(random.Random(seed), 60, rate, prompt, output)
    assert_alike(*both(rows, EngineModelPolicy(slots, budget, watermark), blocks, caches=caches))


ALLOWANCES = st.sampled_from([Allowance(0.1), Allowance(0.05, 0.002), Allowance(1.0), Allowance(0.01, 0.0001)])


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rate=st.sampled_from([2.0, 10.0, 40.0, 200.0]),
    prompt=st.sampled_from([20, 200, 1500]),
    output=st.sampled_from([1, 3, 40, 300]),
    slots=st.sampled_from([1, 2, 5, 16]),
    budget=st.sampled_from([16, 64, 512, 4096]),
    blocks=st.sampled_from([115, 150, 300, 2000]),
    watermark=st.sampled_from([0.0, 0.05, 0.3]),
    caches=st.booleans(),
    allowance=ALLOWANCES,
    changes=st.booleans(),
)
def test_deadline_queue_order_matches_scheduler(
    seed: int,
    rate: float,
    prompt: int,
    output: int,
    slots: int,
    budget: int,
    blocks: int,
    watermark: float,
    caches: bool,
    allowance: Allowance,
    changes: bool,
) -> None:
    """From the start; or by arrival first, then ordered, under another allowance, and by arrival again."""
    rows = arrivals(random.Random(seed), 90, rate, prompt, output)
    by_arrival, ordered = (EngineModelPolicy(slots, budget, watermark, each) for each in (None, allowance))
    other = EngineModelPolicy(
        slots, budget, watermark, Allowance(2 * allowance.seconds, allowance.seconds_per_prompt_token)
    )
    policy = by_arrival if changes else ordered
    later: dict[int, EngineModelPolicy | int] = {20: ordered, 50: other, 60: ordered, 75: by_arrival} if changes else {}
    assert_alike(*both(rows, policy, blocks, caches=caches, changes=later))


def test_the_comparison_has_late_requests_and_preempted_ones_in_it() -> None:
    rows = arrivals(random.Random(5), 300, 20.0, 600, 120)
    fast, slow = both(rows, EngineModelPolicy(16, 256, 0.0, Allowance(1.0, 0.001)), 150)
    late = [sequence for sequence in fast.finished if sequence.was_late]
    assert 50 < len(late) < 250
    assert any(sequence.num_preemptions for sequence in late)
    assert any(sequence.num_preemptions for sequence in fast.finished if sequence not in late)
    assert_alike(fast, slow)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    slots=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    budgets=st.tuples(st.integers(20, 600), st.integers(20, 600)),
    caches=st.booleans(),
)
def test_a_new_policy_is_followed_alike(
    seed: int, slots: tuple[int, int], budgets: tuple[int, int], caches: bool
) -> None:
    rows = arrivals(random.Random(seed), 60, 20.0, 300, 60)
    changes: dict[int, EngineModelPolicy | int] = {
        20: EngineModelPolicy(slots[1], budgets[1]),
        40: EngineModelPolicy(slots[0], budgets[1]),
    }
    assert_alike(*both(rows, EngineModelPolicy(slots[0], budgets[0]), 120, caches=caches, changes=changes))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), blocks=st.integers(25, 200))
def test_a_smaller_kv_cache_preempts_alike(seed: int, blocks: int) -> None:
    rows = arrivals(random.Random(seed), 60, 30.0, 300, 60)
    fast, slow = both(
        rows, EngineModelPolicy(16, 256), 200, caches=False, changes={20: blocks, 40: 200}, max_model_len=400
    )
    assert_alike(fast, slow)


def test_comparison_covers_preemptions_partial_prompts_and_stalls() -> None:
    rows = arrivals(random.Random(1), 300, 20.0, 1500, 300)
    fast, slow = both(rows, EngineModelPolicy(16, 64), 150)
    assert sum(s.num_preemptions for s in slow.finished) > 50
    assert slow.recomputed_tokens > 1000
    assert max(slow.gaps) > 1.0
    assert_alike(fast, slow)


def short_and_long(rng: random.Random) -> list[tuple[float, int, int]]:
    """Arrivals of which half have short prompts and half have long ones."""
    at, rows = 0.0, []
    for _ in range(30):
        at += rng.expovariate(20.0)
        rows.append((at, rng.choice([rng.randrange(1, 30), rng.randrange(30, 300)]), rng.randrange(1, 100)))
    return rows


@pytest.mark.parametrize(("seed", "slots", "blocks"), [(43, 16, 40), (123, 16, 40), (126, 8, 26)])
def test_victim_before_partial_prompt_leaves_its_token(seed: int, slots: int, blocks: int) -> None:
    fast, slow = both(short_and_long(random.Random(seed)), EngineModelPolicy(slots, 24), blocks, max_model_len=400)
    assert_alike(fast, slow)


def test_victim_before_partial_prompt_with_many_arrivals() -> None:
    rows = arrivals(random.Random(18), 60, 20.0, 200, 300)
    assert_alike(*both(rows, EngineModelPolicy(16, 16), 115))


KEY_TOKENS = 32  # two blocks


def conversations(rng: random.Random, count: int) -> list[tuple[float, int, int, tuple[int, ...]]]:
    """Prompts with shared prefixes: a conversation's next message, or one of a few common prefixes."""
    at, rows = 0.0, []
    begun: list[tuple[int, ...]] = [(key,) for key in range(3)]
    for number in range(count):
        at += rng.expovariate(20.0)
        before = rng.choice(begun)
        keys = (*before, *(100 + 10 * number + i for i in range(rng.randint(0, 3))))
        begun.append(keys)
        named = rng.choice([KEY_TOKENS * len(keys), rng.randint(1, KEY_TOKENS * len(keys))])
        prompt = max(1, min(named + rng.choice([0, 0, 40]), 450))
        rows.append((at, prompt, rng.randint(1, 60), keys[: -(-prompt // KEY_TOKENS)]))
    return rows


def both_of_conversations(seed: int, policy: EngineModelPolicy, num_blocks: int) -> tuple[EngineModel, StepwiseEngine]:
    """Serve 60 requests with shared prefixes by both."""
    fast = EngineModel(COST, policy, SharedBlocks(num_blocks, key_tokens=KEY_TOKENS), gaps=Gaps(fine_edges()))
    slow = StepwiseEngine(COST, policy, num_blocks, key_tokens=KEY_TOKENS)
    for engine in (fast, slow):
        for row in conversations(random.Random(seed), 60):
            engine.run_until(row[0])
            engine.add(Sequence(*row))
        engine.drain()
    return fast, slow


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    slots=st.sampled_from([2, 6, 16]),
    budget=st.sampled_from([32, 128, 1024]),
    blocks=st.sampled_from([34, 60, 120, 1000]),
    allowance=st.one_of(st.none(), ALLOWANCES, st.just(Allowance(0.4))),
)
def test_shared_prefix_blocks_match_scheduler(
    seed: int, slots: int, budget: int, blocks: int, allowance: Allowance | None
) -> None:
    fast, slow = both_of_conversations(seed, EngineModelPolicy(slots, budget, allowance=allowance), blocks)
    assert_alike(fast, slow)
    found = [sorted((s.arrival, s.num_cached) for s in engine.finished) for engine in (fast, slow)]
    assert found[0] == found[1]
    assert any(cached for _, cached in found[0])


@pytest.mark.parametrize(("seed", "allowance"), [(7191, 0.1), (3010, 1.0), (349, 1.0)])
def test_step_that_changes_lateness_of_a_waiting_head_matches(seed: int, allowance: float) -> None:
    """A head that waits for blocks becomes late earlier, because the step that found no blocks computed prompts and
    took longer than all before it.
    """
    fast, slow = both_of_conversations(seed, EngineModelPolicy(16, 1024, allowance=Allowance(allowance)), 34)
    assert_alike(fast, slow)


def test_head_that_waits_for_a_slot_becomes_late_before_a_preemption() -> None:
    """The preempted request comes before it, so its lateness is not looked at for a while."""
    policy = EngineModelPolicy(6, 32, allowance=Allowance(0.05, 0.002))
    assert_alike(*both_of_conversations(4946, policy, 34))
