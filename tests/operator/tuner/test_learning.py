"""State updates from observations: demand during a start-up, lost requests, attainment."""

from __future__ import annotations

import pytest
from trimtab_operator.tuner.decide import decide
from trimtab_operator.tuner.learning import estimate_drain
from trimtab_operator.tuner.samples import Phase, ReplicaSnapshot, RequestUpdates, Unfinished
from trimtab_operator.tuner.settings import Mode, Settings
from trimtab_operator.tuner.state import AttainmentCounts, RequestOutcome, TunerState
from tuner_snapshots import PARAMETERS, make_replica_snapshot, make_sample


def watched(*ticks: list[ReplicaSnapshot]) -> TunerState:
    """Return the state after snapshots of all replicas, every 15 s."""
    state, settings = TunerState(), Settings(Mode.AUTO, starts=PARAMETERS)
    for index, snapshots in enumerate(ticks):
        state = decide(snapshots, state, settings, 15.0 * (index + 1)).state
    return state


def serving(name: str, now: float, arrived: float, *, since: float = 0.0) -> ReplicaSnapshot:
    return make_replica_snapshot(name, make_sample(now, arrived=arrived), since=since)


def test_starting_replica_counts_only_its_own_arrivals() -> None:
    starting = [make_replica_snapshot(name, phase=Phase.STARTING, since=1.0) for name in ("m-1", "m-2")]
    state = watched(
        [serving("m-0", 15.0, 150.0), *starting],
        [serving("m-0", 30.0, 300.0), *starting],
        [serving("m-0", 45.0, 430.0), *(serving(name, 45.0, 10.0, since=43.0) for name in ("m-1", "m-2"))],
    )
    assert [point.rate for point in state.demand.points] == pytest.approx([10.0, 10.0])


def test_unreadable_replica_counts_mean_arrivals() -> None:
    state = watched(
        [serving("m-0", 15.0, 150.0), serving("m-1", 15.0, 150.0)],
        [serving("m-0", 30.0, 300.0), make_replica_snapshot("m-1", problem="no answer")],
    )
    assert [point.rate for point in state.demand.points] == pytest.approx([20.0])


def test_requests_of_removed_replica_become_lost() -> None:
    def with_requests(name: str, now: float, *tokens: int) -> ReplicaSnapshot:
        updates = RequestUpdates((), tuple(Unfinished(1.0, 50, count) for count in tokens))
        return make_replica_snapshot(name, make_sample(now, requests=updates), since=0.0)

    before = [with_requests("m-0", 15.0, 10, 20), with_requests("m-1", 15.0, 30)]
    goes = watched(before, [with_requests("m-0", 30.0, 200), make_replica_snapshot("m-1", phase=Phase.DRAINING)])
    assert [row.output_tokens for row in goes.lengths.lost] == [30]
    assert [row.output_tokens for row in goes.lengths.unfinished] == [200]
    silent = watched(before, [with_requests("m-0", 30.0, 200), make_replica_snapshot("m-1", problem="no answer")])
    assert silent.lengths.lost == ()  # it serves and will report them


def test_drain_time_is_99th_percentile_of_durations() -> None:
    state = TunerState(
        request_outcomes=tuple(RequestOutcome(float(index), True, float(index % 100)) for index in range(400))
    )
    assert estimate_drain(state) == pytest.approx(99.0)
    assert estimate_drain(TunerState()) == 0.0


def test_cold_start_ignores_replicas_that_waited_for_a_node() -> None:
    def started(name: str, seconds: float) -> tuple[ReplicaSnapshot, ReplicaSnapshot]:
        starting = make_replica_snapshot(name, phase=Phase.STARTING, since=10_000.0 - seconds)
        return starting, make_replica_snapshot(name, make_sample(10_015.0), since=10_000.0)

    state, settings = TunerState(), Settings(Mode.AUTO, starts=PARAMETERS)
    replicas = [
        started("m-0", 40.0),
        started("m-1", 60.0),
        started("m-2", 7200.0),
    ]  # the last replica waited for a node
    for now, snapshots in zip((9_990.0, 10_015.0), zip(*replicas, strict=True), strict=True):
        state = decide(snapshots, state, settings, now).state
    assert state.cold_starts == (40.0, 60.0)


def test_error_budget_use_decays() -> None:
    kept = AttainmentCounts().later(15.0, met=1990, missed=10)
    assert kept.error_budget_used(0.99) == pytest.approx(0.5)
    assert AttainmentCounts().later(15.0, met=10, missed=10).error_budget_used(0.99) is None  # too few requests
    later = kept.later(3600.0, met=0, missed=0)
    assert (later.met, later.missed) == pytest.approx((995.0, 5.0))
