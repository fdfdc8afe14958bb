"""One replica from the messages of its stream: load, keys, credit, fallbacks and untrusted values."""

import math

import pytest
from trimtab_router.endpoints.endpoint import Endpoint
from trimtab_router.protocol.messages import (
    Acknowledged,
    Coefficients,
    Delta,
    Draining,
    Hello,
    KeyRule,
    Load,
    Resting,
    Snapshot,
    pack_keys,
)
from trimtab_router.protocol.prefix_keys import CUT_BYTES, KEY_RULE
from trimtab_router.scoring.prefix_index import PrefixIndex
from trimtab_router.scoring.state import RoutedRequest, StepTime
from trimtab_router.state_stream.replica import EXPECTED_SECONDS, FORGET_SECONDS, LOST_SECONDS, Replica, SequenceGap

RULE = KeyRule(KEY_RULE, CUT_BYTES, ["base"])
LATER = EXPECTED_SECONDS + 1


def make_hello(*cores: int, rule: KeyRule = RULE) -> Hello:
    return Hello(1, "epoch", list(cores) or [0], 16, rule)


def make_replica() -> Replica:
    return Replica(Endpoint("a", "10.0.0.1", 8000, 8001), 0, PrefixIndex())


def connect(replica: Replica, *snapshots: Snapshot, now: float = 0.0) -> None:
    """Begin a stream with these snapshots, by default one of an idle core."""
    given = snapshots or (Snapshot(0, 0, Load()),)
    replica.receive(make_hello(*(snapshot.core for snapshot in given)), now)
    for snapshot in given:
        replica.receive(snapshot, now)


def held(replica: Replica, *keys: int) -> set[int]:
    return {key for key in keys if replica._index.match((key,), 1e9)}


def test_snapshot_sets_load_limits_and_keys() -> None:
    replica = make_replica()
    load = Load(3, 2, 0, 500, 4000, 5000, 80_000, 2048, 64, 0.25, 0.5, 4.5, ["french"])
    connect(replica, Snapshot(0, 0, load, pack_keys([5, 6]), Coefficients(0.01, 1e-4, 1e-5, 1e-9)), now=10.0)
    state = replica.state
    assert (state.reported_at, state.running, state.waiting, state.prefill_tokens) == (10.0, 3, 2, 500.0)
    assert (state.context_tokens, state.kv_used_tokens, state.kv_total_tokens) == (4000, 5000, 80_000)
    assert (state.token_budget, state.slots, state.prefill_share, state.step_ends_at) == (2048, 64, 0.25, 10.5)
    assert state.step_time == StepTime(0.01, 1e-4, 1e-5, 1e-9)
    assert state.adapters == {"french"}
    assert replica.bytes_per_token == 4.5
    assert held(replica, 4, 5, 6) == {5, 6}


def test_delta_changes_keys_and_keeps_what_it_omits() -> None:
    replica = make_replica()
    connect(replica, Snapshot(7, 0, Load(running=3), pack_keys([1, 2]), Coefficients(1, 1, 1, 1)))
    replica.receive(Delta(8, 0, pack_keys([1]), pack_keys([3])), 1.0)
    assert held(replica, 1, 2, 3) == {2, 3}
    assert replica.state.running == 3
    assert replica.state.step_time is not None


@pytest.mark.parametrize("delta", [Delta(9, 0), Delta(7, 0), Delta(8, 1)])
def test_missing_message_or_core_is_a_gap(delta: Delta) -> None:
    replica = make_replica()
    connect(replica, Snapshot(7, 0, Load()))
    with pytest.raises(SequenceGap):
        replica.receive(delta, 1.0)


def test_new_hello_replaces_keys_and_cores() -> None:
    replica = make_replica()
    connect(replica, Snapshot(0, 0, Load(running=4), pack_keys([1])), Snapshot(0, 1, Load(running=4), pack_keys([2])))
    connect(replica, Snapshot(0, 0, Load(running=2), pack_keys([3])))
    assert (replica.state.running, held(replica, 1, 2, 3)) == (2, {3})


def test_cores_are_reported_as_their_mean() -> None:
    replica = make_replica()
    connect(
        replica,
        Snapshot(0, 0, Load(running=4, prefill_tokens=100, kv_total_tokens=1000, token_budget=512)),
        Snapshot(0, 1, Load(running=1, prefill_tokens=0, kv_total_tokens=1000, token_budget=512)),
    )
    state = replica.state
    assert (state.running, state.prefill_tokens, state.kv_total_tokens, state.token_budget) == (3, 50.0, 1000, 512)


def test_key_is_held_until_last_core_removes_it() -> None:
    replica = make_replica()
    connect(replica, Snapshot(0, 0, Load(), pack_keys([1, 2])), Snapshot(0, 1, Load(), pack_keys([1])))
    replica.receive(Delta(1, 0, pack_keys([1, 2])), 0.0)
    assert held(replica, 1, 2) == {1}
    replica.receive(Delta(1, 1, pack_keys([1])), 0.0)
    assert held(replica, 1, 2) == set()


def test_acknowledged_dispatch_is_no_credit() -> None:
    replica = make_replica()
    connect(replica)
    replica.dispatched(1, RoutedRequest(100), 0.0)
    replica.dispatched(2, RoutedRequest(50), 0.0)
    replica.receive(Acknowledged([1, 77]), 0.1)
    assert (replica.state.pending_requests, replica.state.pending_prefill_tokens) == (1, 50.0)
    replica.finished(1)
    replica.finished(2)
    assert (replica.state.pending_requests, replica.state.pending_prefill_tokens, replica.num_unfinished) == (0, 0.0, 0)


def test_dispatch_that_failed_before_its_acknowledgement_leaks_no_credit() -> None:
    replica = make_replica()
    connect(replica)
    replica.dispatched(1, RoutedRequest(100), 0.0)
    replica.finished(1)
    replica.receive(Acknowledged([1]), 0.1)
    assert (replica.state.pending_requests, replica.state.pending_prefill_tokens) == (0, 0.0)


def test_dispatched_keys_are_expected_until_after_the_first_token() -> None:
    replica = make_replica()
    connect(replica)
    replica.dispatched(1, RoutedRequest(100, keys=(1,)), 0.0, expected_ttft=20.0)
    assert replica._index.match((1,), 20.0 + EXPECTED_SECONDS - 0.1) == {0: 1}
    assert replica._index.match((1,), 20.0 + EXPECTED_SECONDS + 0.1) == {}


def test_dispatched_keys_expire_unless_the_engine_announces_them() -> None:
    replica = make_replica()
    connect(replica)
    replica.dispatched(1, RoutedRequest(100, keys=(1, 2)), 0.0)
    assert replica._index.match((1, 2), 1.0) == {0: 2}
    replica.receive(Delta(1, 0, added=pack_keys([1])), 1.0)
    assert replica._index.match((1, 2), LATER) == {0: 1}


@pytest.mark.parametrize(
    ("message", "end"),
    [(Resting(pause="keep"), Resting()), (Resting(sleep=1), Resting()), (Draining(5.0), make_hello())],
)
def test_draining_and_resting_replicas_take_no_requests(message: Draining | Resting, end: Resting | Hello) -> None:
    replica = make_replica()
    connect(replica)
    replica.receive(message, 0.0)
    assert replica.state.draining
    replica.receive(end, 0.0)
    assert not replica.state.draining


def test_lost_stream_keeps_last_report_and_counts_own_requests() -> None:
    replica = make_replica()
    connect(replica, Snapshot(0, 0, Load(running=3, context_tokens=400), pack_keys([1])))
    replica.dispatched(1, RoutedRequest(100), 0.0)
    replica.receive(Acknowledged([1]), 0.0)
    replica.check_age(LOST_SECONDS + 0.1)
    replica.dispatched(2, RoutedRequest(50, keys=(8, 9)), 3.0)
    replica.finished(1)
    state = replica.state
    assert (state.running, state.context_tokens, state.pending_requests) == (2, 300, 1)
    assert held(replica, 1, 8, 9) == {1, 8, 9}  # dispatched keys are remembered, as without any stream


def test_long_lost_stream_counts_own_requests_only() -> None:
    replica = make_replica()
    connect(replica, Snapshot(0, 0, Load(running=3)))
    replica.dispatched(1, RoutedRequest(100), 0.0)
    replica.receive(Acknowledged([1]), 0.0)
    replica.check_age(FORGET_SECONDS + 1.0)
    assert (replica.state.reported_at, replica.state.running, replica.state.pending_requests) == (None, 0, 1)
    assert replica.received_at is None


def test_returned_stream_replaces_approximate_keys() -> None:
    replica = make_replica()
    connect(replica, Snapshot(0, 0, Load(), pack_keys([1])))
    replica.check_age(LOST_SECONDS + 1.0)
    replica.dispatched(1, RoutedRequest(50, keys=(8,)), 3.0)
    connect(replica, Snapshot(0, 0, Load(), pack_keys([2])), now=4.0)
    assert held(replica, 1, 2, 8) == {2}


def test_stream_that_resumes_after_the_fallback_must_begin_again() -> None:
    replica = make_replica()
    connect(replica)
    replica.check_age(LOST_SECONDS + 1.0)
    with pytest.raises(SequenceGap, match="silent"):
        replica.receive(Delta(1, 0), 4.0)
    connect(replica, now=5.0)
    replica.receive(Delta(1, 0), 5.0)


def test_keys_of_another_rule_are_ignored() -> None:
    replica = make_replica()
    replica.receive(make_hello(rule=KeyRule(KEY_RULE + 1, CUT_BYTES)), 0.0)
    replica.receive(Snapshot(0, 0, Load(running=1), pack_keys([1])), 0.0)
    assert (held(replica, 1), replica.state.running) == (set(), 1)


@pytest.mark.parametrize("value", [-5, 2**63 - 1, math.nan, math.inf, -math.inf])
def test_numbers_of_a_lying_engine_are_bounded(value: float) -> None:
    replica = make_replica()
    number = int(value) if math.isfinite(value) else 0
    load = Load(number, number, 0, number, number, number, number, number, number, value, value, value)
    connect(replica, Snapshot(0, 0, load, b"12345", Coefficients(value, value, value, value)))
    state = replica.state
    numbers = [state.running, state.waiting, state.prefill_tokens, state.context_tokens, state.kv_used_tokens]
    numbers += [state.kv_total_tokens, state.token_budget, state.slots]
    assert all(0 <= each <= 2**40 for each in numbers)
    assert 0 <= state.prefill_share <= 1
    assert state.step_ends_at is None or state.step_ends_at <= 3600
    assert state.step_time is None
    assert 0 <= replica.bytes_per_token <= CUT_BYTES


def test_number_of_keys_of_a_lying_engine_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab_router.state_stream.replica.MAX_KEYS", 10)
    replica = make_replica()
    connect(replica, Snapshot(0, 0, Load(), pack_keys(range(100))))
    replica.receive(Delta(1, 0, added=pack_keys(range(200, 300))), 0.0)
    assert replica._index.num_keys(0) == 10


def test_equal_keys_of_many_cores_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab_router.state_stream.replica.MAX_KEYS", 10)
    replica = make_replica()
    connect(replica, *(Snapshot(0, core, Load(), pack_keys(range(6))) for core in range(50)))
    assert sum(len(core.keys or ()) for core in replica._cores.values()) == 10


def test_best_core_holds_most_leading_keys_and_has_a_slot() -> None:
    replica = make_replica()
    free = Load(slots=4)
    connect(
        replica,
        Snapshot(0, 0, free, pack_keys([1, 3])),
        Snapshot(0, 1, free, pack_keys([1, 2])),
        Snapshot(0, 2, Load(running=1, slots=4), pack_keys([1, 2])),
    )
    assert replica.best_core((1, 2, 3)) == 1
    assert replica.best_core((1, 3)) == 0
    assert replica.best_core((7,)) is None
    assert replica.best_core(()) is None
    replica.receive(Delta(1, 0, load=Load(waiting=1, slots=4)), 0.0)
    assert replica.best_core((1, 3)) is None


def test_replica_with_one_core_has_no_best_core() -> None:
    replica = make_replica()
    connect(replica, Snapshot(0, 0, Load(slots=4), pack_keys([1])))
    assert replica.best_core((1,)) is None
