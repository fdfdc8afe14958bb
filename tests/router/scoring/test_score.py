"""Scores: which replica gets a request, by which rule, and which facts change it."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from trimtab_router.scoring.prefix_index import PrefixIndex
from trimtab_router.scoring.score import LEAST_REQUEST, PREDICTED_TTFT, UNCACHED_WORK, best_replica, choose
from trimtab_router.scoring.state import Choice, ReplicaState, RoutedRequest, StepTime

STEP_TIME = StepTime(8e-3, 1 / 16_000, 3e-5, 4e-9)


def make_state(index: int, **fields: Any) -> ReplicaState:
    known: dict[str, Any] = {
        "reported_at": 0.0,
        "token_budget": 8192,
        "slots": 512,
        "kv_total_tokens": 1_000_000,
        "step_time": STEP_TIME,
    }
    return ReplicaState(f"r{index}", index, **(known | fields))


def pick(
    replicas: list[ReplicaState], request: RoutedRequest | None = None, index: PrefixIndex | None = None, **more: Any
) -> Choice:
    choice = choose(request or RoutedRequest(4000), replicas, index or PrefixIndex(), 0.0, random.Random(0), **more)
    assert choice is not None
    return choice


def test_choose_without_a_usable_replica_returns_none() -> None:
    replicas = [make_state(0, draining=True), make_state(1)]
    assert choose(RoutedRequest(10), replicas, PrefixIndex(), 0.0, random.Random(0), {"r1"}) is None
    assert choose(RoutedRequest(10), [], PrefixIndex(), 0.0, random.Random(0)) is None


def test_choose_skips_draining_and_excluded_replicas() -> None:
    replicas = [make_state(0, draining=True), make_state(1), make_state(2, prefill_tokens=50_000)]
    assert pick(replicas).best.replica == "r1"
    assert pick(replicas, exclude={"r1"}).best.replica == "r2"


def test_predicted_ttft_of_an_idle_replica_is_one_step() -> None:
    choice = pick([make_state(0)], RoutedRequest(1600))
    assert choice.rule == PREDICTED_TTFT
    assert choice.runner_up is None
    assert choice.best.predicted_ttft == pytest.approx(0.008 + 1600 / 16_000)


def test_predicted_ttft_of_a_long_prompt_takes_several_steps() -> None:
    assert pick([make_state(0)], RoutedRequest(81_920)).best.predicted_ttft == pytest.approx(81_920 / 16_000 + 0.08)


def test_predicted_ttft_includes_the_running_step_and_the_queue() -> None:
    state = make_state(0, step_ends_at=0.25, prefill_tokens=8192.0)
    best = pick([state], RoutedRequest(1600)).best
    assert best.queue_seconds == pytest.approx(0.25 + 8192 / 16_000 + 0.008)
    assert best.predicted_ttft == pytest.approx(best.queue_seconds + 0.108)


def test_own_credit_counts_like_the_report() -> None:
    reported = pick([make_state(0, prefill_tokens=5000.0, running=3, context_tokens=9000)])
    own = pick([make_state(0, pending_prefill_tokens=5000.0, pending_requests=3, pending_context_tokens=9000.0)])
    assert own.best.predicted_ttft == pytest.approx(reported.best.predicted_ttft)


def test_cached_prefix_wins_until_its_queue_is_longer_than_the_prefill() -> None:
    index = PrefixIndex()
    index.add(0, range(60))
    request = RoutedRequest(8000, tuple(range(62)), 128.0)
    choice = pick([make_state(0, prefill_tokens=6000.0), make_state(1)], request, index)
    assert (choice.best.replica, choice.best.cached_tokens) == ("r0", 60 * 128)
    assert choice.runner_up is not None
    assert (choice.runner_up.replica, choice.runner_up.cached_tokens) == ("r1", 0)
    assert pick([make_state(0, prefill_tokens=9000.0), make_state(1)], request, index).best.replica == "r1"


def test_last_prompt_token_is_never_cached() -> None:
    index = PrefixIndex()
    index.add(0, range(4))
    best = pick([make_state(0)], RoutedRequest(400, tuple(range(4)), 128.0), index).best
    assert best.cached_tokens == 399
    assert best.predicted_ttft == pytest.approx(0.008 + 1 / 16_000)


def test_displaced_content_that_is_used_again_has_a_price() -> None:
    index = PrefixIndex()
    index.add(0, range(100))
    index.remove(0, range(100))
    replicas = [make_state(0), make_state(1, step_ends_at=0.15)]
    assert pick(replicas, index=index).best.replica == "r0"
    index.add(2, range(100))
    assert pick(replicas, index=index).best.replica == "r1"


def test_busy_prefill_raises_the_price_of_uncached_tokens() -> None:
    index = PrefixIndex()
    index.add(1, range(50))
    request = RoutedRequest(8000, tuple(range(60)), 128.0)

    def best(share: float) -> str:
        replicas = [make_state(0, prefill_share=share), make_state(1, prefill_tokens=9000.0, prefill_share=share)]
        return pick(replicas, request, index).best.replica

    assert (best(0.0), best(0.8)) == ("r0", "r1")


def test_shorter_batch_is_preferred() -> None:
    replicas = [make_state(0, running=100, context_tokens=100_000), make_state(1, step_ends_at=0.004)]
    assert pick(replicas, RoutedRequest(100)).best.replica == "r1"


def test_prompt_that_would_wait_for_this_one_has_a_price() -> None:
    """A prompt ahead of 100 tokens ends in a step that this one fills up with 8,092 tokens."""
    replicas = [make_state(0, prefill_tokens=100.0), make_state(1, step_ends_at=0.3)]
    assert pick(replicas, RoutedRequest(16_000)).best.replica == "r1"


def test_full_kv_cache_does_not_outweigh_a_long_prefix() -> None:
    """Moving a long prompt would displace as much on the other replica, which is nearly full too."""
    index = PrefixIndex()
    index.add(0, range(80))
    replicas = [make_state(0, kv_used_tokens=995_000), make_state(1, kv_used_tokens=940_000)]
    assert pick(replicas, RoutedRequest(41_600, tuple(range(80)), 512.0), index).best.replica == "r0"


def test_full_kv_cache_is_avoided() -> None:
    full = make_state(0, kv_used_tokens=999_000)
    assert pick([full, make_state(1, prefill_tokens=4000.0)], RoutedRequest(6000)).best.replica == "r1"


def test_itl_target_excludes_replicas_with_long_steps() -> None:
    slow = make_state(0, running=400, context_tokens=900_000)
    replicas = [slow, make_state(1, prefill_tokens=20_000.0)]
    assert pick(replicas).best.replica == "r0"
    assert pick(replicas, itl_target=0.03).best.replica == "r1"
    assert pick([slow], itl_target=0.001).best.replica == "r0"


def test_loaded_adapter_is_preferred() -> None:
    replicas = [make_state(0), make_state(1, adapters=frozenset({"law"}), prefill_tokens=2000.0)]
    assert pick(replicas, RoutedRequest(100, adapter="law")).best.replica == "r1"
    assert pick(replicas, RoutedRequest(100)).best.replica == "r0"


def test_ties_spread_over_equal_replicas() -> None:
    rng = random.Random(1)
    replicas = [make_state(index) for index in range(4)]
    names = {
        choice.best.replica
        for _ in range(60)
        if (choice := choose(RoutedRequest(4000), replicas, PrefixIndex(), 0.0, rng))
    }
    assert names == {"r0", "r1", "r2", "r3"}


def test_tie_goes_to_the_less_loaded_of_two() -> None:
    """Scores within 2 % are equal, so the fewer uncached tokens decide."""
    replicas = [make_state(0, step_ends_at=0.004), make_state(1, prefill_tokens=60.0)]
    for seed in range(8):
        choice = choose(RoutedRequest(4000), replicas, PrefixIndex(), 0.0, random.Random(seed))
        assert choice is not None
        assert choice.best.replica == "r0"


def test_session_decides_ties_only() -> None:
    replicas = [make_state(index) for index in range(8)]
    request = RoutedRequest(4000, session="alice")
    names = {
        choice.best.replica
        for seed in range(20)
        if (choice := choose(request, replicas, PrefixIndex(), 0.0, random.Random(seed)))
    }
    assert len(names) == 1
    others = [
        state if state.replica not in names else make_state(state.index, prefill_tokens=5e4) for state in replicas
    ]
    assert pick(others, request).best.replica not in names


def test_sessions_spread_over_tied_replicas() -> None:
    replicas = [make_state(index) for index in range(4)]
    names = [pick(replicas, RoutedRequest(4000, session=f"s{number}")).best.replica for number in range(80)]
    assert all(names.count(f"r{index}") > 8 for index in range(4))


def test_new_replica_is_scored_with_the_step_time_of_others() -> None:
    new = ReplicaState("r0", 0)
    choice = pick([new, make_state(1, prefill_tokens=4000.0)])
    assert (choice.rule, choice.best.replica) == (PREDICTED_TTFT, "r0")


def test_uncached_work_decides_without_step_times() -> None:
    index = PrefixIndex()
    index.add(0, range(30))
    replicas = [
        make_state(0, step_time=None, running=3),
        make_state(1, step_time=None, running=1),
        make_state(2, step_time=None, running=0, pending_prefill_tokens=9000.0),
    ]
    request = RoutedRequest(4000, tuple(range(30)), 128.0)
    choice = pick(replicas, request, index)
    assert (choice.rule, choice.best.replica, choice.best.score) == (UNCACHED_WORK, "r0", 160 * 4)
    assert pick(replicas, RoutedRequest(4000)).best.replica == "r1"


def test_least_request_decides_without_any_state() -> None:
    replicas = [ReplicaState("r0", 0, pending_requests=2), ReplicaState("r1", 1, pending_requests=1)]
    choice = pick(replicas)
    assert (choice.rule, choice.best.replica) == (LEAST_REQUEST, "r1")


def test_room_is_a_queue_of_at_most_one_full_step() -> None:
    """A full step of 8,192 tokens takes 0.52 s."""
    busy = make_state(0, prefill_tokens=20_000.0)
    assert not pick([busy, make_state(1, prefill_tokens=9000.0)]).has_room
    assert pick([busy, make_state(1, prefill_tokens=8000.0)]).has_room
    assert pick([busy, make_state(1, step_ends_at=0.4)]).has_room
    assert pick([ReplicaState("r0", 0, pending_requests=50)]).has_room


def test_best_replica_equals_the_choice_for_given_cached_tokens() -> None:
    replicas = [make_state(0, prefill_tokens=2000.0), make_state(1), make_state(2, step_time=None)]
    assert best_replica(8000, replicas, 0.0, {0: 7680}) == 0
    assert best_replica(8000, replicas, 0.0) == 1
    with pytest.raises(ValueError, match="no step time"):
        best_replica(8000, replicas[2:], 0.0)


def test_choice_takes_little_time() -> None:
    """32 replicas and 64 keys take about 30 µs on an idle core; the bound leaves room for busy ones."""
    rng = random.Random(0)
    keys = tuple(rng.getrandbits(64) for _ in range(64))
    index = PrefixIndex()
    for number in range(32):
        index.add(number, keys[: rng.randint(0, 64)])
    replicas = [make_state(number, prefill_tokens=3000 * rng.random(), prefill_share=0.3) for number in range(32)]
    request = RoutedRequest(32_000, keys, 500.0)
    best = float("inf")
    for _ in range(10):
        began = time.process_time()
        for _ in range(200):
            choose(request, replicas, index, 0.0, rng)
        best = min(best, (time.process_time() - began) / 200)
    assert best < 150e-6
