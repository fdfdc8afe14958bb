"""The demo's second scene: clients whose requests the KV cache does not hold. Predictions from the requests in flight,
compared with the engine's own scheduler under the same clients.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from stepwise_engine import StepwiseEngine
from trimtab_operator.tuner.engine_model import EngineModelPolicy, Sequence, StepCost
from trimtab_operator.tuner.load import Pair
from trimtab_operator.tuner.objectives import Itl, Objectives, Ttft
from trimtab_operator.tuner.prediction import Candidate, InFlightRequest, Load
from trimtab_operator.tuner.prediction.prediction import predict_clients

COST = StepCost(0.02, 0.004, 0.002, 1e-6)  # a small model on a few processor cores
OBJECTIVES = Objectives(Ttft(5.0), Itl(0.15))
CLIENTS, PROMPT, OUTPUT, STAGGER_SECONDS = 16, 64, 192, 0.5
BEGIN_SECONDS, END_SECONDS, POLL_SECONDS = 60.0, 900.0, 0.05
CANDIDATE = Candidate(1, 32, 512, 2240 // 16)


class Scene:
    """The scheduler in virtual time; each client sends its next request when it has a response."""

    def __init__(self) -> None:
        self.engine = StepwiseEngine(COST, policy_of(CANDIDATE), CANDIDATE.kv_blocks)
        self.sequences: list[Sequence] = []
        self.now = 0.0
        self._followed = 0

    def run_until(self, until: float) -> None:
        while self.now < until:
            self.now += POLL_SECONDS
            self.engine.run_until(self.now)
            while len(self.sequences) < CLIENTS and STAGGER_SECONDS * len(self.sequences) <= self.now:
                self.send()
            for _ in self.engine.finished[self._followed :]:
                self.send()
            self._followed = len(self.engine.finished)

    def send(self) -> None:
        self.sequences.append(Sequence(max(self.now, self.engine.now), PROMPT, OUTPUT))
        self.engine.add(self.sequences[-1])

    def in_flight(self) -> list[InFlightRequest]:
        return [
            InFlightRequest(self.now - one.arrival_time, PROMPT, OUTPUT, one.num_output_tokens)
            for one in sorted(self.engine.scheduler.unfinished(), key=lambda one: one.order)
        ]

    @property
    def computed_tokens(self) -> int:
        return sum(sums.tokens for sums in self.engine.sums.values())


def policy_of(candidate: Candidate) -> EngineModelPolicy:
    return EngineModelPolicy(candidate.max_num_seqs, candidate.max_num_batched_tokens, candidate.watermark)


@pytest.mark.parametrize("watermark", [0.0, 0.05, 0.1])
def test_recomputed_share_prediction_agrees_with_scheduler(watermark: float) -> None:
    scene, candidate = Scene(), replace(CANDIDATE, watermark=watermark)
    scene.run_until(BEGIN_SECONDS)
    load = Load.drawn([Pair(0.0, PROMPT, OUTPUT)] * 20, variation=1.0, count=900)
    predicted = predict_clients(candidate, COST, load, 0.4, OBJECTIVES, scene.in_flight())
    computed, recomputed = scene.computed_tokens, scene.engine.recomputed_tokens
    scene.engine.set_policy(policy_of(candidate))
    scene.run_until(END_SECONDS)
    observed = (scene.engine.recomputed_tokens - recomputed) / (scene.computed_tokens - computed)
    assert predicted.recomputed_share == pytest.approx(observed, rel=0.2)
