"""Closed tuning loop from PromQL, in virtual time.

Prometheus scrapes an engine; the operator reads it, decides, and patches the engine. KV memory and the batch budget
follow the load in both directions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from engine_model_samples import sample_of
from fake_prometheus import NAMESPACE, FakePrometheus, exposed
from trimtab_operator.engines.prometheus import Connection, Prometheus
from trimtab_operator.tuner.decide import decide
from trimtab_operator.tuner.engine_model import EngineModel, EngineModelPolicy, KvBlocks, Sequence, StepCost
from trimtab_operator.tuner.moves import Decision
from trimtab_operator.tuner.objectives import Itl, Objectives, Ttft
from trimtab_operator.tuner.parameters import FieldRange, Parameter, Value
from trimtab_operator.tuner.samples import Config, Ledger, Phase, ReplicaSnapshot, RequestUpdates, Sample
from trimtab_operator.tuner.settings import Mode, Pace, Settings
from trimtab_operator.tuner.state import TunerState

COST = StepCost(8e-3, 1 / 16_000, 3e-5, 4e-9)
TICK = 15.0
POD = "m-g0-0"
DEVICE, BLOCK = 100_000, 16  # the device holds so many KV blocks
UTILIZATION, BUDGET = Parameter.GPU_MEMORY_UTILIZATION, Parameter.MAX_NUM_BATCHED_TOKENS
PROMISES = Objectives(Ttft(2.0, 1 / 8000, 0.99), Itl(0.08, share=0.99))
FIELDS = {
    UTILIZATION: FieldRange(True, 0.501, 0.95),
    Parameter.WATERMARK: FieldRange(True, 0.0, 0.9),
    Parameter.MAX_NUM_SEQS: FieldRange(True, 1, 512),
    BUDGET: FieldRange(True, 64, 16_384),
}
Lengths = Callable[[random.Random], tuple[int, int]]


def chats(rng: random.Random) -> tuple[int, int]:
    return 1 + int(rng.expovariate(1 / 300)), 1 + int(rng.expovariate(1 / 400))


def completions(rng: random.Random) -> tuple[int, int]:
    return 1 + int(rng.expovariate(1 / 2000)), 1 + int(rng.expovariate(1 / 25))


@dataclass
class Scene:
    """One engine in virtual time whose metrics are read only by Prometheus, which scrapes it at every tick."""

    start: dict[Parameter, Value]
    now: float = 1000.0
    memory: TunerState = field(default_factory=TunerState)
    decisions: list[Decision] = field(default_factory=list)
    told: int = 0
    generation: int = 1

    def __post_init__(self) -> None:
        self.values = dict(self.start)
        self.rng = random.Random(1)
        self.engine = EngineModel(COST, self._policy(), KvBlocks(self._blocks(), BLOCK), now=self.now)
        self.fake = FakePrometheus(lambda: self.now)
        connection = Connection("http://prometheus:9090", scrape_seconds=TICK)
        self.prometheus = Prometheus(connection, clock=lambda: self.now, transport=self.fake.transport)
        self.settings = Settings(
            Mode.AUTO, PROMISES, starts=self.start, pace=Pace(tick_seconds=TICK, sample_seconds=TICK)
        )

    def _policy(self) -> EngineModelPolicy:
        v = self.values
        return EngineModelPolicy(int(v[Parameter.MAX_NUM_SEQS]), int(v[BUDGET]), float(v[Parameter.WATERMARK]))

    def _blocks(self) -> int:
        return max(100, int((self.values[UTILIZATION] - 0.5) * DEVICE))

    async def steer(self, seconds: float, rate: float, lengths: Lengths) -> None:
        """Run at a request rate for some seconds, with one observation per tick."""
        for _ in range(round(seconds / TICK)):
            at, end = self.now, self.now + TICK
            while (at := at + self.rng.expovariate(rate)) < end:
                self.engine.run_until(at)
                self.engine.add(Sequence(at, *lengths(self.rng)))
            self.engine.run_until(end)
            self.now = end
            self.fake.stored.clear()  # only the newest scrape is needed
            news, self.told = self.engine.finished[self.told :], len(self.engine.finished)
            sample = sample_of(self.engine, news, at=end, generation=self.generation)
            self.fake.scrape(exposed(sample), pod=POD)
            await self._turn(sample.requests)

    async def _turn(self, requests: RequestUpdates | None) -> None:
        stored = (await self.prometheus.samples(NAMESPACE, {POD: 0.0}, {}))[POD]
        assert isinstance(stored, Sample)
        outcome = decide([self._look(replace(stored, requests=requests))], self.memory, self.settings, self.now)
        self.memory = outcome.state
        self.decisions += outcome.decisions
        for values in outcome.patches.values():
            self.values.update(values)
            self.generation += 1
            self.engine.set_policy(self._policy())
            self.engine.resize(self._blocks())

    def _look(self, sample: Sample) -> ReplicaSnapshot:
        """Return the stored sample joined with the admin API's state."""
        free = int((1 - self.values[UTILIZATION]) * DEVICE)
        return ReplicaSnapshot(
            "m-g0",
            Phase.READY,
            "uid",
            sample=sample,
            config=Config(self.generation, dict(self.values), FIELDS, 8192),
            ledger=Ledger(DEVICE, self._blocks(), BLOCK, 1, free_bytes=free),
        )

    def moves(self, knob: Parameter) -> list[tuple[Value | None, Value | None]]:
        return [(d.move.before, d.move.after) for d in self.decisions if d.move.target is knob]


def starting_at(utilization: float, budget: int) -> dict[Parameter, Value]:
    return {UTILIZATION: utilization, Parameter.WATERMARK: 0.0, Parameter.MAX_NUM_SEQS: 256, BUDGET: budget}


async def test_kv_memory_follows_load() -> None:
    scene = Scene(starting_at(0.515, 1024))
    while not scene.moves(UTILIZATION):
        await scene.steer(TICK, 4.5, chats)
        assert scene.now < 1600.0, "nothing was decided within ten minutes of preemption"
    await scene.steer(2100, 0.2, chats)
    (before, after), back = scene.moves(UTILIZATION)
    assert before == 0.515
    assert after is not None
    assert after > 0.515
    assert back == (after, 0.515)
    assert scene.values[UTILIZATION] == 0.515


@pytest.mark.parametrize(
    ("start", "lengths", "rate", "direction"),
    [
        (8192, completions, 1.0, -1),  # chunks so large that concurrent decodes wait
        (128, chats, 3.0, 1),  # chunks so small that prompts wait
    ],
)
async def test_the_batch_budget_moves_both_ways(start: int, lengths: Lengths, rate: float, direction: int) -> None:
    scene = Scene(starting_at(0.9, start))
    while not scene.moves(BUDGET):
        await scene.steer(TICK, rate, lengths)
        assert scene.now < 1600.0, "nothing was decided within ten minutes"
    ((before, after),) = scene.moves(BUDGET)
    assert before == start
    assert after is not None
    assert (after - start) * direction > 0
    assert scene.values[BUDGET] == after
