"""WVA's token-based analyzer, with values from its published rules.

Prompts have 1,000 tokens and outputs 200; the KV cache has 100,000 tokens, the engine 64 slots.
"""

from __future__ import annotations

import pytest
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.samples import Counters, Gauges, Ledger, Phase, ReplicaSnapshot, Sample
from trimtab_simulator.objectives import Objectives
from trimtab_simulator.plant.machine import machine_of
from trimtab_simulator.policies.policy import PolicyInput, PolicySetup
from trimtab_simulator.policies.wva import wva

SETUP = PolicySetup(machine_of("llama-3.1-8b", "h200"), Objectives(2.0), 1, 16, 2, 120.0, {})
LEDGER = Ledger(10**9, 6250, 16, 1, 0, 6250)


def make_view(now: float, pods: int, usage: float, waiting: float = 0.0, *, starting: int = 0) -> PolicyInput:
    counters = Counters(200 * now, 0, now, {}, arrived=now, arrived_prompt_tokens=1000 * now)
    sample = Sample(now, counters, Gauges(10, waiting, usage))
    ready = [ReplicaSnapshot(f"r{i}", Phase.READY, sample=sample, ledger=LEDGER) for i in range(pods)]
    parameters = {Parameter.MAX_NUM_BATCHED_TOKENS: 1024, Parameter.MAX_NUM_SEQS: 64}
    snapshots = (*ready, *(ReplicaSnapshot(f"s{i}", Phase.STARTING) for i in range(starting)))
    return PolicyInput(now, len(snapshots), parameters, snapshots)


@pytest.mark.parametrize(
    ("pods", "usage", "waiting", "starting", "wanted"),
    [
        (2, 0.3, 0, 0, 2),  # 64 · 1,100 = 70,400 per pod; spare 140,800 - 60,000 / 0.7 is less than one of it
        (2, 0.7, 0, 0, 3),  # 140,000 / 0.85 exceeds 140,800 by 23,900
        (1, 0.7, 0, 1, 2),  # a starting pod counts as supply: 70,000 / 0.85 < 140,800
        (4, 0.2, 0, 0, 2),  # spare 281,600 - 80,000 / 0.7 = 167,300, two pods
        (2, 0.3, 6, 0, 3),  # saturated at 30,000 tokens: (2 · 37,200) / 0.85 - 60,000 = 27,500, one pod
        (4, 0.9, 0, 0, 7),  # 360,000 / 0.85 - 281,600 = 141,900, three pods
    ],
)
def test_wva_compares_tokens_with_capacity(pods: int, usage: float, waiting: float, starting: int, wanted: int) -> None:
    policy = wva(SETUP)
    views = [make_view(15.0 * i, pods, usage, waiting, starting=starting) for i in range(1, 14)]
    assert [policy.decide(view).replicas for view in views][-1] == wanted


def test_wva_remembers_the_tokens_at_which_a_queue_formed() -> None:
    """After the queue 30,000 tokens per pod remain the capacity: 60,000 / 0.85 - 60,000 gives one pod."""
    policy = wva(SETUP)
    waits = [6.0] * 6 + [0.0] * 24
    views = [make_view(15.0 * i, 2, 0.3, waiting) for i, waiting in enumerate(waits, 1)]
    assert [policy.decide(view).replicas for view in views][-1] == 3
