"""Faults of a replica's metrics, and the reason that each gets."""

import math
from typing import Any

import pytest
from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.observation import Observation, ReplicaObservation, Track, observe
from trimtab_operator.tuner.observation.track import FaultTimeouts
from trimtab_operator.tuner.samples import Phase, ReplicaSnapshot
from tuner_snapshots import make_replica_snapshot, make_sample

TIMEOUTS = FaultTimeouts.for_tick(15.0)


def watched(*snapshots: tuple[float, ReplicaSnapshot]) -> ReplicaObservation:
    """Return the observation after all these snapshots."""
    tracks: dict[str, Track] = {}
    observation = Observation(0.0, ())
    for now, snapshot in snapshots:
        observation, tracks = observe(tracks, [snapshot], now=now, timeouts=TIMEOUTS)
    (seen,) = observation.replicas
    return seen


def sampled(*times: float, **changes: Any) -> list[tuple[float, ReplicaSnapshot]]:
    return [(at, make_replica_snapshot(sample=make_sample(at, **changes))) for at in times]


def test_two_samples_make_an_interval() -> None:
    seen = watched(*sampled(100.0, 115.0))
    (interval,) = seen.intervals
    assert (interval.seconds, interval.generated_tokens, interval.arrived) == (15.0, 600.0, 15.0)
    assert seen.has_new_interval
    assert seen.is_trusted


def test_first_interval_of_started_replica_begins_when_ready() -> None:
    starting = make_replica_snapshot(phase=Phase.STARTING, since=20.0)
    serving = make_replica_snapshot(sample=make_sample(115.0, arrived=30.0), since=110.0)
    seen = watched((100.0, starting), (115.0, serving))
    (interval,) = seen.intervals
    assert (interval.start, interval.end, interval.arrived) == (110.0, 115.0, 30.0)
    assert seen.start_seconds == 90.0


def test_first_sample_of_running_replica_gives_no_interval() -> None:
    assert watched((115.0, make_replica_snapshot(sample=make_sample(115.0), since=110.0))).intervals == ()


def test_a_repeated_sample_adds_nothing() -> None:
    seen = watched(*sampled(100.0, 115.0), (130.0, make_replica_snapshot(sample=make_sample(115.0))))
    assert len(seen.intervals) == 1
    assert not seen.has_new_interval


def test_a_gap_is_a_long_interval_and_no_fault() -> None:
    seen = watched(*sampled(100.0, 115.0, 175.0))
    assert [interval.seconds for interval in seen.intervals] == [15.0, 60.0]
    assert seen.finding is None


def test_falling_counters_reset_intervals_without_crash() -> None:
    seen = watched(
        *sampled(100.0, 115.0), (130.0, make_replica_snapshot(sample=make_sample(130.0, generated_tokens=5.0)))
    )
    assert seen.intervals == ()
    assert seen.is_trusted
    assert not seen.has_crashed


def test_restarted_engine_in_same_pod_has_crashed() -> None:
    again = make_replica_snapshot(sample=make_sample(1.0), restarts=1, was_oom_killed=True)
    seen = watched(*sampled(100.0, 115.0), (130.0, again))
    assert seen.has_crashed
    assert seen.was_oom_killed


def test_another_pod_is_no_crash() -> None:
    seen = watched(
        *sampled(100.0, 115.0), (130.0, make_replica_snapshot(sample=make_sample(1.0), instance="uid-2", restarts=0))
    )
    assert not seen.has_crashed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_usage": math.nan}, "not a number"),
        ({"generated_tokens": math.inf}, "not a number"),
        ({"running": -1.0}, "negative"),
        ({"kv_usage": 1.5}, "KV cache usage"),
        ({"preemptions": {"capacity": -2.0}}, "negative"),
    ],
)
def test_impossible_values_are_inconsistent(changes: dict[str, Any], message: str) -> None:
    seen = watched(*sampled(100.0), (115.0, make_replica_snapshot(sample=make_sample(115.0, **changes))))
    assert seen.finding is not None
    assert seen.finding.fault is Reason.METRICS_INCONSISTENT
    assert message in seen.finding.message
    assert seen.intervals == ()


def test_future_sample_is_inconsistent_until_next_valid_one() -> None:
    skewed = (115.0, make_replica_snapshot(sample=make_sample(3715.0)))
    assert watched(*sampled(100.0), skewed).finding is not None
    assert watched(*sampled(100.0), skewed, *sampled(130.0)).is_trusted


def test_clock_set_back_resets_intervals() -> None:
    seen = watched(
        (3700.0, make_replica_snapshot(sample=make_sample(3700.0))),
        (115.0, make_replica_snapshot(sample=make_sample(115.0))),
    )
    assert seen.is_trusted
    assert seen.intervals == ()


def test_lagging_metrics_are_stale_after_three_samples() -> None:
    stuck = [(now, make_replica_snapshot(sample=make_sample(100.0))) for now in (130.0, 145.0)]
    assert watched(*sampled(100.0), *stuck).finding is None
    late = (160.0, make_replica_snapshot(sample=make_sample(100.0)))
    finding = watched(*sampled(100.0), *stuck, late).finding
    assert finding is not None
    assert finding.fault is Reason.METRICS_STALE


def frozen(at: float) -> tuple[float, ReplicaSnapshot]:
    """Return fresh pages with the same values every time."""
    old, new = make_sample(100.0, running=200.0), make_sample(at)
    return at, make_replica_snapshot(sample=type(new)(at, old.counters, old.gauges))


def test_requests_without_progress_are_a_frozen_engine() -> None:
    seen = watched(*[frozen(at) for at in (100.0, 115.0, 130.0, 145.0, 160.0)])
    assert seen.finding is not None
    assert seen.finding.fault is Reason.METRICS_FROZEN


def test_an_idle_engine_is_not_frozen() -> None:
    snapshots = []
    for at in (100.0, 115.0, 130.0, 145.0, 160.0, 300.0):
        idle = make_sample(100.0, running=0.0)
        snapshots.append((at, make_replica_snapshot(sample=type(idle)(at, idle.counters, idle.gauges))))
    assert watched(*snapshots).is_trusted


def test_unreadable_metrics_are_missing_with_the_problem() -> None:
    seen = watched(*sampled(100.0), (115.0, make_replica_snapshot(problem="connection refused")))
    assert seen.finding is not None
    assert (seen.finding.fault, seen.finding.message) == (Reason.METRICS_MISSING, "connection refused")


def test_a_replica_that_loads_is_no_fault() -> None:
    seen = watched((100.0, make_replica_snapshot(phase=Phase.STARTING, problem="not ready")))
    assert seen.finding is None
    assert not seen.is_trusted


def test_start_seconds_are_reported_once() -> None:
    starting = (100.0, make_replica_snapshot(phase=Phase.STARTING, since=100.0))
    serving = [(at, make_replica_snapshot(sample=make_sample(at), since=220.0)) for at in (225.0, 240.0)]
    assert watched(starting, serving[0]).start_seconds == 120.0
    assert watched(starting, *serving).start_seconds is None


def test_generation_mismatch_is_a_fault_after_three_samples() -> None:
    def behind(at: float) -> tuple[float, ReplicaSnapshot]:
        snapshot = make_replica_snapshot(sample=make_sample(at, generation=2))
        assert snapshot.sample is not None
        return at, make_replica_snapshot(
            sample=make_sample(at, generation=2), config=make_replica_snapshot(sample=make_sample(at)).config
        )

    assert watched(*[behind(at) for at in (100.0, 115.0, 130.0)]).finding is None
    finding = watched(*[behind(at) for at in (100.0, 115.0, 130.0, 145.0, 160.0)]).finding
    assert finding is not None
    assert finding.fault is Reason.METRICS_GENERATION_MISMATCH


def test_unreadable_replica_leaves_observation_incomplete() -> None:
    tracks: dict[str, Track] = {}
    for at in (100.0, 115.0):
        snapshots = [make_replica_snapshot("m-0", make_sample(at)), make_replica_snapshot("m-1", problem="no answer")]
        observation, tracks = observe(tracks, snapshots, now=at, timeouts=TIMEOUTS)
    assert [seen.replica for seen in observation.trusted] == ["m-0"]
    assert not observation.is_complete
    total = observation.total(seconds=60.0)
    assert total is not None
    assert total.seconds == 15.0
