"""What one observation teaches: demand through a start-up, the account of promises kept."""

from __future__ import annotations

import pytest
from trimtab_operator.tuner.decide import decide
from trimtab_operator.tuner.learning import estimate_drain
from trimtab_operator.tuner.samples import Phase, ReplicaSnapshot, RequestUpdates, Unfinished
from trimtab_operator.tuner.settings import Mode, Settings
from trimtab_operator.tuner.state import AttainmentCounts, RequestOutcome, TunerState
from tuner_snapshots import PARAMETERS, make_replica_snapshot, make_sample


def watched(*ticks: list[ReplicaSnapshot]) -> TunerState:
    """What is remembered after looks at all replicas, every 15 s."""
    state, settings = TunerState(), Settings(Mode.AUTO, starts=PARAMETERS)
    for index, snapshots in enumerate(ticks):
        state = decide(snapshots, state, settings, 15.0 * (index + 1)).state
    return state


def serving(name: str, now: float, arrived: float, *, since: float = 0.0) -> ReplicaSnapshot:
    return make_replica_snapshot(name, make_sample(now, arrived=arrived), since=since)


def test_a_replica_that_begins_to_serve_is_not_taken_to_have_got_what_the_others_got() -> None:
    starting = [make_replica_snapshot(name, phase=Phase.STARTING, since=1.0) for name in ("m-1", "m-2")]
    state = watched(
        [serving("m-0", 15.0, 150.0), *starting],
        [serving("m-0", 30.0, 300.0), *starting],
        [serving("m-0", 45.0, 430.0), *(serving(name, 45.0, 10.0, since=43.0) for name in ("m-1", "m-2"))],
    )
    assert [point.rate for point in state.demand.points] == pytest.approx([10.0, 10.0])


def test_one_that_cannot_be_read_is_taken_to_have_got_what_the_others_got() -> None:
    state = watched(
        [serving("m-0", 15.0, 150.0), serving("m-1", 15.0, 150.0)],
        [serving("m-0", 30.0, 300.0), make_replica_snapshot("m-1", problem="no answer")],
    )
    assert [point.rate for point in state.demand.points] == pytest.approx([20.0])


def test_what_ran_in_a_replica_that_goes_is_kept_as_longer_than_it_was() -> None:
    def with_requests(name: str, now: float, *tokens: int) -> ReplicaSnapshot:
        updates = RequestUpdates((), tuple(Unfinished(1.0, 50, count) for count in tokens))
        return make_replica_snapshot(name, make_sample(now, requests=updates), since=0.0)

    before = [with_requests("m-0", 15.0, 10, 20), with_requests("m-1", 15.0, 30)]
    goes = watched(before, [with_requests("m-0", 30.0, 200), make_replica_snapshot("m-1", phase=Phase.DRAINING)])
    assert [row.output_tokens for row in goes.lengths.lost] == [30]
    assert [row.output_tokens for row in goes.lengths.unfinished] == [200]
    silent = watched(before, [with_requests("m-0", 30.0, 200), make_replica_snapshot("m-1", problem="no answer")])
    assert silent.lengths.lost == ()  # it serves, and will tell


def test_a_replica_drains_for_as_long_as_all_but_the_longest_requests_take() -> None:
    state = TunerState(
        request_outcomes=tuple(RequestOutcome(float(index), True, float(index % 100)) for index in range(400))
    )
    assert estimate_drain(state) == pytest.approx(99.0)
    assert estimate_drain(TunerState()) == 0.0


def test_how_long_replicas_take_to_start_is_learned_from_those_that_came_by_themselves() -> None:
    def started(name: str, seconds: float) -> tuple[ReplicaSnapshot, ReplicaSnapshot]:
        starting = make_replica_snapshot(name, phase=Phase.STARTING, since=10_000.0 - seconds)
        return starting, make_replica_snapshot(name, make_sample(10_015.0), since=10_000.0)

    state, settings = TunerState(), Settings(Mode.AUTO, starts=PARAMETERS)
    replicas = [started("m-0", 40.0), started("m-1", 60.0), started("m-2", 7200.0)]  # the last one waited for a node
    for now, snapshots in zip((9_990.0, 10_015.0), zip(*replicas, strict=True), strict=True):
        state = decide(snapshots, state, settings, now).state
    assert state.cold_starts == (40.0, 60.0)


def test_misses_are_counted_against_those_that_the_promise_allows_and_fade() -> None:
    kept = AttainmentCounts().later(15.0, met=1990, missed=10)
    assert kept.error_budget_used(0.99) == pytest.approx(0.5)
    assert AttainmentCounts().later(15.0, met=10, missed=10).error_budget_used(0.99) is None  # too few to say
    later = kept.later(3600.0, met=0, missed=0)
    assert (later.met, later.missed) == pytest.approx((995.0, 5.0))
