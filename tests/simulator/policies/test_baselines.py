"""Baseline policies follow their published rules."""

from __future__ import annotations

import pytest
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.samples import Counters, Gauges, Phase, ReplicaSnapshot, Sample
from trimtab_simulator.errors import BadRequest
from trimtab_simulator.policies.aibrix import Apa, Kpa
from trimtab_simulator.policies.aimd import Aimd
from trimtab_simulator.policies.gpustack import gpustack
from trimtab_simulator.policies.hpa import Behavior, Hpa, hpa_running, keda_queue, total
from trimtab_simulator.policies.kubeai import KubeAi
from trimtab_simulator.policies.names import PolicySpec, parse_policy_specs
from trimtab_simulator.policies.policy import Policy, PolicyInput
from trimtab_simulator.policies.signals import in_flight


def make_snapshot(
    name: str, running: float, waiting: float = 0.0, *, kv: float = 0.1, preemptions: float = 0.0, ready: bool = True
) -> ReplicaSnapshot:
    sample = Sample(0.0, Counters(0, 0, 0, {"capacity": preemptions}), Gauges(running, waiting, kv))
    return ReplicaSnapshot(name, Phase.READY, sample=sample) if ready else ReplicaSnapshot(name, Phase.STARTING)


def make_policy_input(
    now: float, *snapshots: ReplicaSnapshot, desired: int | None = None, slots: int = 64
) -> PolicyInput:
    return PolicyInput(now, len(snapshots) if desired is None else desired, {Parameter.MAX_NUM_SEQS: slots}, snapshots)


def pods(now: float, running: float, count: int = 2, *, waiting: float = 0.0, starting: int = 0) -> PolicyInput:
    """So many equal replicas, and some that start."""
    snapshots = [make_snapshot(f"r{i}", running, waiting) for i in range(count)]
    return make_policy_input(now, *snapshots, *(make_snapshot(f"s{i}", 0, ready=False) for i in range(starting)))


def targets(policy: Policy, *views: PolicyInput) -> list[int | None]:
    return [policy.decide(view).replicas for view in views]


@pytest.mark.parametrize(
    ("running", "wanted"),
    [
        (10.0, 2),  # at its target
        (10.9, 2),  # within 10 %
        (11.5, 3),
        (40.0, 6),  # the double, or four more
        (4.0, 1),
    ],
)
def test_an_hpa_divides_the_mean_by_its_target(running: float, wanted: int) -> None:
    assert targets(hpa_running(10), pods(0, running), pods(301, running))[-1] == wanted


def test_new_hpa_holds_the_present_pods_for_five_minutes() -> None:
    assert targets(hpa_running(10), *(pods(15.0 * i, 4.0) for i in range(22)))[-3:] == [2, 1, 1]


def test_hpa_scales_in_to_highest_of_five_minutes() -> None:
    policy = hpa_running(10)
    views = [pods(0, 20.0, 4), *(pods(15.0 * i, 5.0, 4) for i in range(1, 22))]
    assert targets(policy, *views) == [8, *[4] * 19, 2, 2]


@pytest.mark.parametrize(
    ("running", "starting", "wanted"),
    [
        (20.0, 2, 4),  # two ready ones at twice their target, and two that start: enough
        (30.0, 2, 6),  # they count as idle: 60 / 4 = 1.5 times the target
        (5.0, 1, 2),  # on the way down they count as full
    ],
)
def test_an_hpa_counts_pods_that_start_against_its_own_wish(running: float, starting: int, wanted: int) -> None:
    views = [pods(at, running, 2, starting=starting) for at in (0, 301)]
    assert targets(hpa_running(10), *views)[-1] == wanted


def test_keda_divides_the_whole_queue_and_polls_every_30_seconds() -> None:
    policy = keda_queue(5)
    views = [pods(0, 9, waiting=10), pods(15, 9, waiting=1), pods(30, 9, waiting=1)]
    assert targets(policy, *views) == [4, 4, 2]  # the second look is not polled; then down at the highest of 5 minutes


def test_kubeai_scales_in_after_three_lower_means() -> None:
    policy = KubeAi(10)
    assert targets(policy, pods(0, 30)) == [6]
    later = [pods(10.0 * i, 0.0, 6) for i in range(1, 5)]
    assert targets(policy, *later) == [None, None, 2, 2]


def test_kpa_panics_when_a_minute_is_twice_the_three() -> None:
    policy = Kpa(10)
    calm = [pods(10.0 * i, 10.0) for i in range(18)]
    assert targets(policy, *calm)[-1] == 2
    surge = [pods(180.0 + 10.0 * i, 100.0) for i in range(6)]
    assert targets(policy, *surge)[-1] == 4  # at most the double at once
    assert (policy.decide(pods(240.0, 0.0, 4)).replicas or 0) >= 4  # never down in panic


def test_gpustack_divides_the_total_by_its_target() -> None:
    """Three pods with 9 + 1 requests each, 8 per pod: ceil(30 / 8) = 4; 8.7 per pod are within the tolerance."""
    assert targets(gpustack(8), pods(0, 9, 3, waiting=1)) == [4]
    assert targets(gpustack(8), pods(0, 8.7, 3)) == [3]


def test_hpa_behavior_limits_each_period() -> None:
    """At most the double in a minute up, one pod in two minutes down."""
    behavior = Behavior(up_pods=0, up_period=60, down_window=0, down_pods=1, down_period=120)
    policy = Hpa("test", total(in_flight, 1.0), behavior=behavior)
    count, seen = 2, []
    for i in range(20):
        count = policy.decide(pods(15.0 * i, 100 if i < 5 else 0, count)).replicas or count
        seen.append(count)
    assert seen == [4, 4, 4, 4, 8, *[7] * 8, *[6] * 7]


def test_apa_multiplies_the_pods_that_there_are() -> None:
    assert targets(Apa(10), pods(0, 15.0)) == [3]
    assert targets(Apa(10), pods(0, 10.9)) == [2]


def test_aibrix_takes_the_lowest_of_its_window_on_the_way_down() -> None:
    policy = Apa(10)
    assert targets(policy, pods(0, 10.0, 4), pods(200, 5.0, 4), pods(210, 8.0, 4)) == [4, 2, 2]


@pytest.mark.parametrize(
    ("running", "kv", "slots", "wanted"),
    [
        (60.0, 0.5, 64, 69),  # used, and there is room: it grows by 20 % × (1 − 0.5/0.8)
        (10.0, 0.5, 64, None),  # the cap is not used
        (60.0, 0.84, 64, 50),  # soft: 60 × 0.7 / 0.84
        (60.0, 0.95, 64, 42),  # hard
    ],
)
def test_aimd_changes_slots_by_kv_usage(running: float, kv: float, slots: int, wanted: int | None) -> None:
    moves = Aimd(1024).decide(make_policy_input(0, make_snapshot("r0", running, kv=kv), slots=slots))
    assert moves.parameters.get(Parameter.MAX_NUM_SEQS) == wanted


def test_aimd_cuts_when_preemptions_rise() -> None:
    policy = Aimd(1024)
    policy.decide(make_policy_input(0, make_snapshot("r0", 60, kv=0.5, preemptions=3)))
    assert policy.decide(make_policy_input(15, make_snapshot("r0", 60, kv=0.5, preemptions=4))).parameters == {
        Parameter.MAX_NUM_SEQS: 42
    }


@pytest.mark.parametrize("policy", [hpa_running(5), keda_queue(5), Aimd(10), Apa(5)])
def test_without_a_sample_nothing_moves(policy: Policy) -> None:
    moves = policy.decide(make_policy_input(0, make_snapshot("r0", 0, ready=False)))
    assert (moves.replicas, dict(moves.parameters)) == (None, {})


def test_policies_are_named_with_their_targets() -> None:
    assert parse_policy_specs("trimtab, hpa-running@30,trimtab,kubeai") == [
        PolicySpec("trimtab"),
        PolicySpec("hpa-running", 30.0),
        PolicySpec("kubeai"),
    ]
    assert len(parse_policy_specs("all")) == 19
    assert parse_policy_specs("hpa-running@30")[0].label == "hpa-running@30"


@pytest.mark.parametrize("text", ["", "hpa", "trimtab@3", "kubeai@", "kubeai@0", "kubeai@nan", "kubeai@x"])
def test_unknown_policy_is_rejected_with_known_ones(text: str) -> None:
    with pytest.raises(BadRequest, match="--policy"):
        parse_policy_specs(text)
