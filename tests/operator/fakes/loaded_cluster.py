"""A cluster whose engines serve, in virtual time: each replica is the tuner's twin of an engine on a CPU. Clients wait
for their answers before they ask again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine_model_samples import sample_of
from operator_cluster import TICK_SECONDS, FakeCluster, FakeEngine
from trimtab_operator.observed.engines import EngineObservation, EngineTarget
from trimtab_operator.observed.groups import is_pod_ready
from trimtab_operator.planning.plan import ReconcilePlan
from trimtab_operator.tuner.engine_model import EngineModel, EngineModelPolicy, KvBlocks, Sequence, StepCost
from trimtab_operator.tuner.parameters import Parameter

ENGINE = {"gpuMemoryUtilization": "0.74", "maxNumSeqs": 32, "maxNumBatchedTokens": 512}
COST = StepCost(9e-3, 7e-4, 4.5e-3, 1e-7)
BLOCKS, BLOCK = 151, 16
STEP_SECONDS = 0.25
PROMPT, OUTPUT = 64, 192
START_SECONDS = 30.0


class LoadedCluster(FakeCluster):
    """A cluster whose engines serve: so many `clients`, each of which pauses between two requests."""

    def __init__(self, **spec: Any) -> None:
        super().__init__(start_seconds=START_SECONDS, **{"engine": ENGINE, **spec})
        self.clients: list[tuple[Sequence | None, float]] = []
        """What each client waits for, and when it asks again."""
        self.pause_seconds = 0.0
        self.twins: dict[str, EngineModel] = {}
        """By the uid of the leader's pod."""
        self.told: dict[str, int] = {}

    def load(self, clients: int, *, pause_seconds: float = 0.0) -> None:
        """From now on so many clients ask."""
        self.clients = [(None, self.now + pause_seconds * n / clients) for n in range(clients)]
        self.pause_seconds = pause_seconds

    def tick(self) -> ReconcilePlan:
        decided = self.plan_reconcile()
        for _ in range(round(TICK_SECONDS / STEP_SECONDS)):
            self.now += STEP_SECONDS
            self._serve()
        self.controllers()
        return decided

    def _serve(self) -> None:
        ready = [self._twin(pod["metadata"]["uid"]) for pod in self.pods.values() if is_pod_ready(pod)]
        for twin in ready:
            twin.run_until(self.now)
        for number, (sequence, at) in enumerate(self.clients):
            if sequence is not None and sequence.finished_at is not None:
                self.clients[number] = (None, self.now + self.pause_seconds)
            elif sequence is None and at <= self.now and ready:
                asked = Sequence(self.now, PROMPT, OUTPUT)
                min(ready, key=lambda twin: twin.num_running + twin.num_waiting).add(asked)
                self.clients[number] = (asked, at)

    def _twin(self, uid: str) -> EngineModel:
        if uid not in self.twins:
            values = self.engines[uid].values
            seqs, tokens = values[Parameter.MAX_NUM_SEQS], values[Parameter.MAX_NUM_BATCHED_TOKENS]
            policy = EngineModelPolicy(int(seqs), int(tokens), 0.0)
            self.twins[uid] = EngineModel(COST, policy, KvBlocks(BLOCKS, BLOCK), now=self.now)
        return self.twins[uid]

    def said(self, target: EngineTarget) -> EngineObservation:
        seen = super().said(target)
        if seen.sample is None:
            return seen
        twin = self._twin(target.instance)
        ended = twin.finished[self.told.get(target.instance, 0) :]
        self.told[target.instance] = len(twin.finished)
        generation = self.engines.get(target.instance, FakeEngine()).generation
        sample = sample_of(twin, ended, at=self.now, generation=generation)
        return EngineObservation(
            True, sample=sample, config=seen.config, ledger=seen.ledger, applied=seen.applied, layout=seen.layout
        )

    def counts(self, seconds: float) -> Iterator[int]:
        """How many replicas are wanted, tick by tick."""
        for _ in range(round(seconds / TICK_SECONDS)):
            self.tick()
            yield int(self.status["desiredReplicas"])
