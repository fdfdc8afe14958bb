"""Loads with shared prefixes, on which routers are compared: fixed replicas with prefix caches.

| name          | load                                                                                            |
|---------------|-------------------------------------------------------------------------------------------------|
| mooncake      | Mooncake conversations at 2.3 times their speed, spread within the trace's grid of 3 s           |
| moonp         | *moon* with the prefixes of its prompts                                                          |
| agents        | 60 agents with a prefix of 41,000 tokens each; 600 new tokens and 300 output tokens per request  |
| shared-prefix | 150 prefixes of 6,000 tokens with 5 questions of 1,200 tokens each, 1,000 output tokens          |
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trimtab_simulator.experiment import Experiment, without_timeline
from trimtab_simulator.plant.routing import RouterSettings
from trimtab_simulator.plant.shared_blocks import shared_blocks
from trimtab_simulator.trace.arrivals import KEY_TOKENS, Arrival, Trace
from trimtab_simulator.trace.load import Transform, load_trace

from simulator_benchmarks.scenarios import LONG, MOONCAKE, Scenario

MOONCAKE_SPEED = 2.3
MOONCAKE_GRID_SECONDS = 3.0

NUM_AGENTS = 60
AGENT_REQUESTS_PER_SECOND = 7.45
AGENT_SECONDS = 900.0
AGENT_PREFIX, AGENT_NEW, AGENT_OUTPUT = 41_000, 600, 300

NUM_PREFIXES, NUM_QUESTIONS = 150, 5
SHARED_PREFIX, QUESTION, ANSWER = 6_000, 1_200, 1_000
SHARED_RATES = (20, 30, 40, 50, 60)
"""Requests/s of the stages; eight replicas saturate at about 50."""
STAGE_SECONDS = 60.0


def _mooncake(folder: Path, seed: int) -> Trace:
    jitter = MOONCAKE_GRID_SECONDS / 2 / MOONCAKE_SPEED
    return load_trace(folder / MOONCAKE, Transform(speed=MOONCAKE_SPEED, jitter=jitter), seed=seed)


def _moonp(folder: Path, seed: int) -> Trace:
    return load_trace(folder / MOONCAKE, Transform(copies=2, jitter=3), seed=seed)


def _agents(folder: Path, seed: int) -> Trace:
    rng = random.Random(f"agents-{seed}")
    num_keys = AGENT_PREFIX // KEY_TOKENS
    arrivals = []
    for at in _poisson(rng, AGENT_REQUESTS_PER_SECOND, 0.0, AGENT_SECONDS):
        first = rng.randrange(NUM_AGENTS) * num_keys
        arrivals.append(Arrival(at, AGENT_PREFIX + AGENT_NEW, AGENT_OUTPUT, tuple(range(first, first + num_keys))))
    return Trace("agents", arrivals, AGENT_SECONDS)


def _shared_prefix(folder: Path, seed: int) -> Trace:
    """Return the profile `shared_prefix` of inference-perf with a rising rate."""
    rng = random.Random(f"shared-prefix-{seed}")
    num_keys = SHARED_PREFIX // KEY_TOKENS
    num_all = (SHARED_PREFIX + QUESTION) // KEY_TOKENS
    arrivals = []
    for stage, rate in enumerate(SHARED_RATES):
        for at in _poisson(rng, rate, stage * STAGE_SECONDS, (stage + 1) * STAGE_SECONDS):
            prefix, question = rng.randrange(NUM_PREFIXES), rng.randrange(NUM_QUESTIONS)
            keys = [prefix * num_keys + index for index in range(num_keys)]
            first = NUM_PREFIXES * num_keys + (prefix * NUM_QUESTIONS + question) * num_all
            keys += range(first, first + num_all - num_keys)
            arrivals.append(Arrival(at, SHARED_PREFIX + QUESTION, ANSWER, tuple(keys)))
    return Trace("shared-prefix", arrivals, len(SHARED_RATES) * STAGE_SECONDS)


def _poisson(rng: random.Random, rate: float, start: float, end: float) -> Sequence[float]:
    times, at = [], start
    while (at := at + rng.expovariate(rate)) < end:
        times.append(at)
    return times


PREFIX_SCENARIOS = (
    Scenario("mooncake", _mooncake, LONG, 8192, 8, 32),
    Scenario("moonp", _moonp, LONG, 1024, 6, 32),
    Scenario("agents", _agents, LONG, 8192, 6, 32),
    Scenario("shared-prefix", _shared_prefix, LONG, 8192, 8, 32),
)


def fixed_fleet(scenario: Scenario, folder: Path, *, seed: int, replicas: int, router: RouterSettings) -> Experiment:
    """Return the experiment of fixed replicas with prefix caches behind this router."""
    experiment = without_timeline(scenario.experiment(folder, seed=seed)).with_replicas(replicas)
    settings = replace(experiment.settings, make_blocks=shared_blocks)
    return replace(experiment, settings=settings, loop=replace(experiment.loop, router=router))
