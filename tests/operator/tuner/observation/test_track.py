"""Faults of a replica's metrics, and the reason that each gets."""

import math
from dataclasses import replace
from typing import Any

import pytest
from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.observation import Observation, ReplicaObservation, Track, observe
from trimtab_operator.tuner.observation.track import FaultTimeouts
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.samples import Phase, ReplicaSnapshot, Work
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


RANKS = frozenset({("trimtab_arrived_requests_total", "0"), ("trimtab_arrived_requests_total", "1")})
ONE_RANK = frozenset({("trimtab_arrived_requests_total", "0")})


def ranked(at: float, ranks: frozenset[tuple[str, str]], **changes: Any) -> tuple[float, ReplicaSnapshot]:
    """Return a snapshot of an engine with these ranks on its metrics page. Rank 1 has done a million requests more."""
    done = 1e6 if ranks == RANKS else 0.0
    sample = make_sample(at, arrived=done + at, finished=done + at, **changes)
    return at, make_replica_snapshot(sample=replace(sample, ranks=ranks))


def test_missing_rank_is_a_fault_and_its_return_no_traffic() -> None:
    pages = [ranked(100.0, RANKS), ranked(115.0, ONE_RANK), ranked(130.0, ONE_RANK)]
    seen = watched(*pages)
    assert seen.finding is not None
    assert seen.finding.fault is Reason.METRICS_INCONSISTENT
    assert seen.finding.message == "the metrics page lacks trimtab_arrived_requests_total of rank 1"
    seen = watched(*pages, ranked(145.0, RANKS))
    assert seen.finding is None
    assert [(part.seconds, part.arrived) for part in seen.intervals] == [(45.0, 45.0)]


def test_appearing_rank_begins_with_its_first_value() -> None:
    seen = watched(ranked(100.0, ONE_RANK), ranked(115.0, RANKS), ranked(130.0, RANKS))
    assert [part.arrived for part in seen.intervals] == [15.0]
    assert seen.is_trusted


def test_restarted_engine_may_have_fewer_ranks() -> None:
    at, snapshot = ranked(115.0, ONE_RANK)
    seen = watched(ranked(100.0, RANKS), (at, replace(snapshot, restarts=1)))
    assert seen.finding is None


@pytest.mark.parametrize("glitch", [1e5, 1e9])
def test_unexplained_arrivals_are_a_fault(glitch: float) -> None:
    """A jump of one counter is no load: neither ended requests nor requests in flight explain it."""
    pages = [*sampled(100.0, 115.0), (130.0, make_replica_snapshot(sample=make_sample(130.0, arrived=glitch + 130.0)))]
    seen = watched(*pages)
    assert seen.finding is not None
    assert seen.finding.fault is Reason.METRICS_INCONSISTENT
    assert not any((part.arrived or 0.0) > 1000.0 for part in seen.intervals)
    seen = watched(*pages, (145.0, make_replica_snapshot(sample=make_sample(145.0, arrived=glitch + 145.0))))
    assert seen.finding is None, "the jump happened once"
    assert not any((part.arrived or 0.0) > 1000.0 for part in seen.intervals)


def test_arrivals_that_wait_are_explained() -> None:
    seen = watched(
        *sampled(100.0), (115.0, make_replica_snapshot(sample=make_sample(115.0, arrived=5100.0, waiting=5000.0)))
    )
    assert seen.finding is None
    assert seen.intervals[-1].arrived == 5000.0


@pytest.mark.parametrize(
    "changes",
    [
        {"generated_tokens": 1e300},
        {"arrived": 1e17},
        {"waiting": 1e300},
        {"decode": Work(8, 32, 32, 3200, 1e300, 0.08)},
        {"cached_prompt_tokens": math.nan},
        {"aborted": -1.0},
    ],
)
def test_absurd_numbers_are_a_fault(changes: dict[str, Any]) -> None:
    seen = watched((100.0, make_replica_snapshot(sample=make_sample(100.0, **changes))))
    assert seen.finding is not None
    assert seen.finding.fault is Reason.METRICS_INCONSISTENT


@pytest.mark.parametrize("field", ["device_bytes", "blocks_total", "block_size", "bytes_per_block", "free_bytes"])
def test_absurd_ledger_is_a_fault(field: str) -> None:
    snapshot = make_replica_snapshot(sample=make_sample(100.0))
    assert snapshot.ledger is not None
    seen = watched((100.0, replace(snapshot, ledger=replace(snapshot.ledger, **{field: 10**400}))))
    assert seen.finding is not None
    assert seen.finding.fault is Reason.METRICS_INCONSISTENT


def test_absurd_configuration_is_a_fault() -> None:
    snapshot = make_replica_snapshot(sample=make_sample(100.0), values={Parameter.MAX_NUM_SEQS: 10**400})
    seen = watched((100.0, snapshot))
    assert seen.finding is not None
    assert seen.finding.fault is Reason.METRICS_INCONSISTENT


@pytest.mark.parametrize(
    "other",
    [
        frozenset({("trimtab_arrived_requests_total", "")}),  # Prometheus drops the label
        frozenset({("vllm:generation_tokens_total", "0")}),  # or the family
    ],
)
def test_other_metrics_source_is_no_fault(other: frozenset[tuple[str, str]]) -> None:
    seen = watched(ranked(100.0, ONE_RANK), ranked(115.0, other), ranked(130.0, ONE_RANK), ranked(145.0, ONE_RANK))
    assert seen.finding is None
    assert seen.intervals[-1].arrived == 15.0
