"""Dynamo's planner, with values from its published rules.

The engine takes 10 ms a step and 0.1 ms a token; prompts have 1,000 tokens, outputs 100, and steps 100 prompt tokens.
"""

from __future__ import annotations

import pytest
from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.samples import Counters, Gauges, Ledger, Phase, ReplicaSnapshot, Sample, Work
from trimtab_simulator.objectives import Objectives
from trimtab_simulator.plant.machine import Machine
from trimtab_simulator.policies.dynamo import Dynamo, dynamo_hybrid, dynamo_load, dynamo_throughput
from trimtab_simulator.policies.policy import PolicyInput, PolicySetup

MACHINE = Machine("m", "g", StepCost(0.01, 1e-4, 0.0, 0.0), kv_tokens=100_000)
LEDGER = Ledger(10**9, 6250, 16, 1, 0, 6250)


def make_setup(*, ttft: float = 0.4, itl: float = 0.05) -> PolicySetup:
    return PolicySetup(MACHINE, Objectives(ttft, itl_mean=itl), 1, 16, 2, 60.0, {})


def make_view(now: float, *engines: tuple[float, float], rate: float = 20.0, starting: int = 0) -> PolicyInput:
    """Engines with (queued prompt tokens, KV usage), which share `rate` requests a second since 0 s."""
    count = rate * now / len(engines)
    snapshots = [ReplicaSnapshot(f"s{i}", Phase.STARTING) for i in range(starting)]
    for index, (queued, usage) in enumerate(engines):
        counters = Counters(
            generated_tokens=100 * count,
            prompt_tokens=1000 * count,
            finished=count,
            preemptions={},
            arrived=count,
            arrived_prompt_tokens=1000 * count,
            prefill=Work(steps=10 * count),
        )
        sample = Sample(now, counters, Gauges(10, 0, usage, waiting_tokens=queued))
        snapshots.append(ReplicaSnapshot(f"r{index}", Phase.READY, sample=sample, ledger=LEDGER))
    parameters = {Parameter.MAX_NUM_BATCHED_TOKENS: 2048, Parameter.MAX_NUM_SEQS: 256}
    return PolicyInput(now, len(snapshots), parameters, tuple(snapshots))


def decide_twice(policy: Dynamo, *engines: tuple[float, float], starting: int = 0) -> int | None:
    policy.decide(make_view(0, *engines, starting=starting))
    return policy.decide(make_view(5, *engines, starting=starting)).replicas


@pytest.mark.parametrize(
    ("queues", "wanted"),
    [
        ((3096.0, 3096.0), 3),  # 4,096 tokens in two steps: 0.43 s in all engines
        ((3096.0, 1500.0), 2),  # 0.27 s in the second; with the double queue 0.64 s, too much for one engine
        ((0.0, 0.0), 1),  # 0.11 s, with 0.8 · (0.4 - 0.11) s left for a queue
    ],
)
def test_load_scaling_compares_ttft_of_all_engines(queues: tuple[float, float], wanted: int) -> None:
    engines = [(queue, 0.105) for queue in queues]
    assert decide_twice(dynamo_load(make_setup()), *engines) == wanted


def test_load_scaling_keeps_replicas_whose_kv_would_not_fit() -> None:
    assert decide_twice(dynamo_load(make_setup()), (0.0, 0.5), (0.0, 0.5)) == 2


@pytest.mark.parametrize(("itl", "wanted"), [(0.025, 2), (0.03, 1), (0.02, 3)])
def test_load_scaling_compares_itl(itl: float, wanted: int) -> None:
    """A step with 100 prompt tokens takes 21.1 ms with 10.5k KV tokens and one more request, 22.1 ms with 21k."""
    assert decide_twice(dynamo_load(make_setup(itl=itl)), (0.0, 0.105), (0.0, 0.105)) == wanted


def test_load_scaling_waits_for_starting_replicas() -> None:
    assert decide_twice(dynamo_load(make_setup()), (9000.0, 0.1), starting=1) is None


def test_throughput_scaling_divides_requests_by_an_engines_most() -> None:
    """36 requests at once: 49.6 ms a step, 36 / (100 · 0.0496) = 7.26 requests/s; 20 requests/s need 3."""
    policy = dynamo_throughput(make_setup())
    assert [policy.decide(make_view(5.0 * i, (0.0, 0.1), (0.0, 0.1))).replicas for i in range(37)][35:] == [None, 3]


def test_hybrid_scales_in_to_the_floor_of_throughput_scaling() -> None:
    policy = dynamo_hybrid(make_setup())
    engines = [(0.0, 0.01)] * 4
    wanted = [policy.decide(make_view(5.0 * i, *engines)).replicas for i in range(38)]
    assert wanted[35:] == [3, 3, 3]
    assert policy.decide(make_view(190, *engines[:3])).replicas == 3
