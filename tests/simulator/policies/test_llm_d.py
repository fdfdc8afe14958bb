"""llm-d's formula, with values from its published text."""

from __future__ import annotations

import math

from trimtab_operator.tuner.samples import Counters, Gauges, Histogram, Phase, ReplicaSnapshot, Sample
from trimtab_simulator.objectives import Objectives
from trimtab_simulator.plant.machine import machine_of
from trimtab_simulator.policies.llm_d import llm_d_slo
from trimtab_simulator.policies.policy import Policy, PolicyInput, PolicySetup

EDGES = (0.3, 0.6, 1.2, 2.4, 4.8, math.inf)
SETUP = PolicySetup(machine_of("llama-3.1-8b", "h200"), Objectives(3.0, itl_mean=0.1), 1, 16, 4, 120.0, {})


def make_view(now: float, seconds: float, pods: int, *, starting: int = 0) -> PolicyInput:
    """Pods that serve 100 requests every 15 s each, with TTFT spread over the bucket that ends at `seconds`."""
    served = 100 * now / 15 + 100
    counts = tuple(served if edge >= seconds else 0.0 for edge in EDGES)
    sample = Sample(
        now,
        Counters(0, 0, 0, {}, arrived=served, arrived_prompt_tokens=1000 * served),
        Gauges(1, 0, 0.1),
        ttft=Histogram(EDGES, counts, 0.0),
        mean_itl=Histogram((0.01, math.inf), (served, served), 0.0),  # P90 9 ms: 0.09 of the target
    )
    ready = [ReplicaSnapshot(f"r{i}", Phase.READY, sample=sample) for i in range(pods)]
    return PolicyInput(now, pods, {}, (*ready, *(ReplicaSnapshot(f"s{i}", Phase.STARTING) for i in range(starting))))


def run(policy: Policy, *views: PolicyInput) -> list[int | None]:
    return [policy.decide(view).replicas for view in views]


def test_scale_out_divides_the_share_by_its_threshold_after_30_seconds() -> None:
    """P90 of the bucket 1.2-2.4 is 2.28 s, 0.76 of the target: 4 + ceil(4 (0.76 / 0.55 - 1)) = 6.

    The first page has no increase, so the mean of 45 s is 0, 0.38, 0.51 and then 0.76, which gives 6 from 45 s on.
    """
    views = [make_view(15.0 * i, 2.4, 4) for i in range(7)]
    assert run(llm_d_slo(SETUP), *views) == [4, 4, 4, 4, 6, 6, 6]


def test_starting_pods_are_credited() -> None:
    """With 4 of 6 pods ready: 6 + ceil(6 (0.76 · 4/6 / 0.55 - 1)) = 6."""
    views = [make_view(15.0 * i, 2.4, 4, starting=2) for i in range(8)]
    assert run(llm_d_slo(SETUP), *views)[-1] == 6


def test_scale_out_is_clamped_at_twice_the_target() -> None:
    """4.56 s is 1.52 of the target: 4 + ceil(4 (1.52 / 0.55 - 1)) = 12, at most the double or 4 more in a minute."""
    views = [make_view(15.0 * i, 4.8, 4) for i in range(8)]
    assert run(llm_d_slo(SETUP), *views)[-1] == 8


def test_scale_in_removes_one_pod_per_two_minutes() -> None:
    """P90 0.57 s is 0.19 of the target: 10 - floor(10 (1 - 0.19 / 0.40)) = 5, down one pod at a time."""
    policy = llm_d_slo(SETUP)
    pods, seen = 10, []
    for i in range(32):
        pods = policy.decide(make_view(15.0 * i, 0.6, pods)).replicas or pods
        seen.append(pods)
    assert seen.index(9) == 12  # the pods at the start are a recommendation, for 180 s
    assert seen.index(8) - seen.index(9) == 8


def test_band_between_thresholds_holds() -> None:
    """The target of a mean prompt of 1,000 tokens is 1 + 1 s: 1.14 s is 0.57; with 1.4 s it is 0.475."""
    wide = PolicySetup(SETUP.machine, Objectives(1.4, 1e-3, itl_mean=0.1), 1, 16, 4, 120.0, {})
    narrow = PolicySetup(SETUP.machine, Objectives(1.0, 1e-3, itl_mean=0.1), 1, 16, 4, 120.0, {})
    views = [make_view(15.0 * i, 1.2, 4) for i in range(20)]
    assert run(llm_d_slo(wide), *views)[-1] == 4
    assert run(llm_d_slo(narrow), *views)[-1] == 5


def test_pool_without_traffic_shrinks_to_one_pod() -> None:
    first = make_view(0.0, 0.3, 2)
    idle = [PolicyInput(15.0 * i, 2, {}, first.snapshots) for i in range(14)]
    assert run(llm_d_slo(SETUP), *idle)[-3:] == [2, 1, 1]
