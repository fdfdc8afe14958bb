"""Predictions for sessions with long cached prompts, compared with a replica that has a prefix cache."""

from __future__ import annotations

import random

import pytest
from trimtab_operator.tuner.engine_model import EngineModel, EngineModelPolicy, KvBlocks, Sequence, StepCost
from trimtab_operator.tuner.load import Pair, Sharing
from trimtab_operator.tuner.objectives import Itl, Objectives, Ttft
from trimtab_operator.tuner.prediction import Candidate, Load, predict
from trimtab_simulator.plant.shared_blocks import SharedBlocks

COST = StepCost(8e-3, 1 / 16_000, 3e-5, 4e-9)
OBJECTIVES = Objectives(Ttft(2.0, 1 / 8000, 0.99), Itl(0.08, share=0.99))
KV_TOKENS, BUDGET, KEY_TOKENS = 1_000_000, 2048, 512
PREFIX_KEYS, NEW_TOKENS, OUTPUT_TOKENS = 80, 600, 300
SECONDS, WARM_UP_SECONDS = 300.0, 60.0


def serve_sessions(sessions: int, rate: float, *, seed: int = 1) -> tuple[list[Sequence], Sharing]:
    """Serve turns of sessions, each with its own prompt prefix of 40,960 tokens; return those after the warm-up, and
    the observed sharing.
    """
    rng = random.Random(seed)
    blocks, sharing = SharedBlocks(KV_TOKENS // 16, 16), Sharing()
    engine = EngineModel(COST, EngineModelPolicy(512, BUDGET), blocks)
    for session in range(sessions):  # the prefixes are in the cache, as far as it holds them
        engine.add(Sequence(0.0, PREFIX_KEYS * KEY_TOKENS + 1, 1, tuple(range(session * 1000, session * 1000 + 80))))
    engine.drain()
    engine.finished.clear()
    begin = at = engine.now
    while at < begin + SECONDS:
        at += rng.expovariate(rate)
        session = rng.randrange(sessions)
        keys = tuple(range(session * 1000, session * 1000 + PREFIX_KEYS))
        engine.run_until(at)
        running = [(one, tokens) for one, tokens in engine.unfinished() if tokens]
        own = sum(one.num_prompt - one.num_cached + tokens for one, tokens in running)
        cached = sum(one.num_cached for one, _ in running)
        sharing = sharing.with_sample(own=own, cached=cached, used=16 * (blocks.total - blocks.free))
        engine.add(Sequence(at, PREFIX_KEYS * KEY_TOKENS + NEW_TOKENS, OUTPUT_TOKENS, keys))
    engine.drain()
    return [one for one in engine.finished if one.arrival >= begin + WARM_UP_SECONDS], sharing


def share_of_attained(served: list[Sequence]) -> float:
    met = sum(OBJECTIVES.is_met(prompt=one.num_prompt, ttft=one.ttft, mean_gap=one.mean_gap) for one in served)
    return met / len(served)


@pytest.mark.parametrize(("sessions", "rate"), [(8, 4.0), (8, 8.0), (20, 8.0)])
def test_cached_prompts_prediction_agrees_with_replica(sessions: int, rate: float) -> None:
    served, sharing = serve_sessions(sessions, rate)
    pairs = tuple(Pair(0.0, one.num_prompt, one.num_output, one.num_cached) for one in served)
    candidate = Candidate(1, 512, BUDGET, KV_TOKENS // 16)
    load = Load.drawn(pairs, variation=1.0, count=2700, sharing=sharing.share)
    predicted = predict(candidate, COST, load, rate, OBJECTIVES)
    assert predicted.attainment == pytest.approx(share_of_attained(served), abs=0.1)


def test_shared_part_of_cached_prompts_takes_no_blocks() -> None:
    blocks = KvBlocks(100, 16, sharing=1.0)
    engine = EngineModel(COST, EngineModelPolicy(8, 512), blocks)
    for _ in range(4):  # each 640 + 160 tokens, of which 640 are shared: 50 blocks alone, 10 each together
        engine.add(Sequence(0.0, 641, 160, num_hit=640))
    engine.run_until(0.5)
    assert engine.num_running == 4
    engine.drain()
    assert (blocks.free, engine.counters.cached_prompt_tokens) == (100, 4 * 640)


def test_cached_prompt_is_attended_to_and_not_computed() -> None:
    def seconds(prompt: int, hit: int) -> float:
        engine = EngineModel(StepCost(0.01, 1e-4, 0.0, 1e-6), EngineModelPolicy(8, 512), KvBlocks(1000))
        engine.add(Sequence(0.0, prompt, 100, num_hit=hit))
        engine.drain()
        return engine.now

    assert seconds(101, 0) < seconds(8101, 8000) < seconds(8101, 0)
