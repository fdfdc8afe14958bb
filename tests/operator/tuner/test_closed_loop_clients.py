"""Closed-loop clients in virtual time, compared with the same load without changes: the demo's two scenes, on an engine
whose KV cache holds half of the outputs, with and without device headroom; and random ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from engine_model_samples import sample_of
from trimtab_operator.tuner.decide import decide
from trimtab_operator.tuner.engine_model import EngineModel, EngineModelPolicy, KvBlocks, Sequence, StepCost
from trimtab_operator.tuner.moves import Decision, Reason
from trimtab_operator.tuner.objectives import Itl, Objectives, Ttft
from trimtab_operator.tuner.parameters import FieldRange, Parameter, Value
from trimtab_operator.tuner.samples import Config, Ledger, Phase, ReplicaSnapshot
from trimtab_operator.tuner.settings import Bounds, Mode, Settings
from trimtab_operator.tuner.state import TunerState

COST = StepCost(0.02, 0.004, 0.002, 1e-6)  # a small model on a few processor cores
CLIENTS, PROMPT, ANSWER = 16, 64, 192
BLOCK, LEAST_BLOCKS, MOST_BLOCKS = 16, 127, 305
LEAST, MOST = 0.80, 0.95  # of the device, with these numbers of KV blocks
TICK = 15.0
TTFT_OBJECTIVE = Objectives(ttft=Ttft(5.0))
ITL_OBJECTIVE = Objectives(itl=Itl(0.15))


@dataclass
class Scene:
    """An engine and closed-loop clients."""

    headroom: bool
    clients: int = CLIENTS
    cost: StepCost = COST
    draw: Callable[[random.Random], tuple[int, int]] = lambda _: (PROMPT, ANSWER)
    """Returns the lengths of one request."""
    fewest_blocks: int = LEAST_BLOCKS
    values: dict[Parameter, Value] = field(
        default_factory=lambda: {
            Parameter.GPU_MEMORY_UTILIZATION: LEAST,
            Parameter.WATERMARK: 0.0,
            Parameter.MAX_NUM_SEQS: 32,
            Parameter.MAX_NUM_BATCHED_TOKENS: 256,
        }
    )
    now: float = 0.0
    told: int = 0
    generation: int = 1

    def __post_init__(self) -> None:
        self.engine = EngineModel(self.cost, self.policy, KvBlocks(self.blocks, BLOCK))
        self.rng = random.Random(1)
        for at in sorted(self.rng.uniform(0.0, 5.0) for _ in range(self.clients)):
            self.engine.run_until(at)
            self.engine.add(Sequence(at, *self.draw(self.rng)))

    @property
    def policy(self) -> EngineModelPolicy:
        v = self.values
        return EngineModelPolicy(
            int(v[Parameter.MAX_NUM_SEQS]), int(v[Parameter.MAX_NUM_BATCHED_TOKENS]), float(v[Parameter.WATERMARK])
        )

    @property
    def blocks(self) -> int:
        share = (float(self.values[Parameter.GPU_MEMORY_UTILIZATION]) - LEAST) / (MOST - LEAST)
        return round(self.fewest_blocks * (1 + share * (MOST_BLOCKS / LEAST_BLOCKS - 1)))

    @property
    def most(self) -> float:
        return MOST if self.headroom else LEAST

    def patch(self, values: dict[Parameter, Value]) -> None:
        self.values = {**self.values, **values}
        self.generation += 1
        self.engine.set_policy(self.policy)
        self.engine.resize(self.blocks)

    def serve(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.25)
            count = len(self.engine.finished)
            self.engine.run_until(self.now)
            for done in self.engine.finished[count:]:
                assert done.finished_at is not None
                self.engine.add(Sequence(done.finished_at, *self.draw(self.rng)))

    def snapshot(self) -> ReplicaSnapshot:
        engine = self.engine
        updates, self.told = engine.finished[self.told :], len(engine.finished)
        sample = sample_of(engine, updates, at=self.now, generation=self.generation)
        fields = {
            Parameter.GPU_MEMORY_UTILIZATION: FieldRange(True, LEAST, self.most),
            Parameter.WATERMARK: FieldRange(True, 0.0, 0.9),
            Parameter.MAX_NUM_SEQS: FieldRange(True, 1, 32),
            Parameter.MAX_NUM_BATCHED_TOKENS: FieldRange(True, 64, 2048),
        }
        device = round(self.fewest_blocks * (MOST_BLOCKS / LEAST_BLOCKS - 1) / (MOST - LEAST))
        free = int((1 - float(self.values[Parameter.GPU_MEMORY_UTILIZATION])) * device) if self.headroom else 0
        config = Config(self.generation, dict(self.values), fields, 2048)
        ledger = Ledger(device, engine.blocks.total, BLOCK, 1, free_bytes=free)
        return ReplicaSnapshot("m-0", Phase.READY, "uid", 0.0, sample, config, ledger)

    @property
    def computed_tokens(self) -> int:
        return sum(sums.tokens for sums in self.engine.counters.sums.values())

    def good_tokens(self, objectives: Objectives, since: float) -> int:
        """Return output tokens of requests that started after `since` and attained the objectives."""
        done = [s for s in self.engine.finished if s.arrival >= since]
        return sum(
            s.num_output for s in done if objectives.is_met(prompt=s.num_prompt, ttft=s.ttft, mean_gap=s.mean_gap)
        )


def played(scene: Scene, objectives: Objectives | None, seconds: float) -> Scene:
    """Return the scene after this time, tuned for these objectives; None runs without the tuner."""
    state = TunerState()
    while scene.now < seconds:
        scene.serve(TICK)
        if objectives is None:
            continue
        bounds = {Parameter.GPU_MEMORY_UTILIZATION: Bounds(LEAST, scene.most)}
        settings = Settings(Mode.AUTO, objectives, bounds, prior=_guess(scene.cost))
        outcome = decide([scene.snapshot()], state, settings, scene.now)
        state = outcome.state
        for values in outcome.patches.values():
            scene.patch(dict(values))
    return scene


@pytest.fixture(scope="module")
def off() -> Scene:
    return played(Scene(headroom=True), None, 900.0)


@pytest.mark.parametrize("objectives", [TTFT_OBJECTIVE, ITL_OBJECTIVE], ids=["ttft", "itl"])
def test_tuning_with_headroom_raises_goodput(objectives: Objectives, off: Scene) -> None:
    tuned = played(Scene(headroom=True), objectives, 480.0)
    assert tuned.good_tokens(objectives, 120.0) / 360 > 1.5 * off.good_tokens(objectives, 120.0) / 780


@pytest.mark.parametrize(("objectives", "least"), [(TTFT_OBJECTIVE, 1.0), (ITL_OBJECTIVE, 1.1)], ids=["ttft", "itl"])
def test_tuning_without_headroom_keeps_goodput(objectives: Objectives, least: float, off: Scene) -> None:
    tuned = played(Scene(headroom=False), objectives, 900.0)
    assert tuned.good_tokens(objectives, 120.0) >= least * off.good_tokens(objectives, 120.0)


@pytest.mark.parametrize("seed", range(4))
def test_tuning_keeps_goodput_for_random_clients(seed: int) -> None:
    """Random numbers of clients, lengths, engine speed and cache size. Lengths vary from request to request, so that
    differences within a tenth of about 1,000 are chance.
    """
    rng = random.Random(seed)
    prompt, answer, clients = rng.randint(40, 600), rng.randint(40, 400), rng.randint(6, 40)
    cost = StepCost(*(value * rng.uniform(0.1, 1.0) for value in (0.02, 0.004, 0.002, 1e-6)))
    held = rng.uniform(0.3, 0.8) * clients * (prompt + answer / 2) / BLOCK
    scene = Scene(
        headroom=False,
        clients=clients,
        cost=cost,
        draw=lambda draws: (round(prompt * draws.uniform(0.5, 1.5)), round(answer * draws.uniform(0.5, 1.5))),
        fewest_blocks=max(2 * (2 * prompt + 2 * answer) // BLOCK, round(held)),
    )
    untuned = played(replace(scene), None, 600.0)
    done = [s for s in untuned.engine.finished if s.arrival >= 60.0]
    ttfts, gaps = sorted(s.ttft or 0.0 for s in done), sorted(s.mean_gap or 0.0 for s in done)
    middle = round(rng.uniform(0.3, 0.8) * len(done))  # an objective that some requests attain
    objectives = rng.choice([Objectives(ttft=Ttft(ttfts[middle])), Objectives(itl=Itl(gaps[middle]))])
    tuned = played(replace(scene), objectives, 600.0)
    assert tuned.good_tokens(objectives, 120.0) >= 0.9 * untuned.good_tokens(objectives, 120.0)


def _guess(cost: StepCost) -> StepCost:
    """Return the tuner's prior, a third off."""
    return StepCost(1.3 * cost.per_step, 1.3 * cost.per_token, 1.3 * cost.per_sequence, 1.3 * cost.per_context)


def watermark_scene() -> Scene:
    return Scene(headroom=False, fewest_blocks=140)


def test_watermark_prediction_comes_true_and_beats_off() -> None:
    """The demo's second scene, without objectives: throughput decides."""
    tuned, state = watermark_scene(), TunerState()
    decisions: list[Decision] = []
    while tuned.now < 900.0:
        tuned.serve(TICK)
        bounds = {Parameter.GPU_MEMORY_UTILIZATION: Bounds(LEAST, LEAST)}
        outcome = decide([tuned.snapshot()], state, Settings(Mode.AUTO, bounds=bounds, prior=_guess(COST)), tuned.now)
        state, decisions = outcome.state, [*decisions, *outcome.decisions]
        for values in outcome.patches.values():
            tuned.patch(dict(values))
    first = decisions[0]
    assert (first.reason, first.at <= 135.0) == (Reason.ADMITTED_TOO_EARLY, True)
    observed = watermark_scene()
    observed.serve(first.at)
    before = observed.engine.counters.recomputed_tokens, observed.computed_tokens
    observed.patch({Parameter.WATERMARK: first.move.after or 0.0})
    observed.serve(300.0)
    share = (observed.engine.counters.recomputed_tokens - before[0]) / (observed.computed_tokens - before[1])
    assert first.move.expected[0].after == pytest.approx(share, rel=0.2)
    off = played(watermark_scene(), None, 900.0)
    assert tuned.engine.counters.generated_tokens > 1.05 * off.engine.counters.generated_tokens
