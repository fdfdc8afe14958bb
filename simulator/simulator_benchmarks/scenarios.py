"""Named loads with suitable objectives: the rows of the result table.

`folder` has the files of the development slice; each scenario names its files. Every policy starts from the
same replicas and token budget: the fewest fixed replicas that attain the objectives, and their best budget (what
`static-n` finds). The scenarios `…-from-1` start from one replica instead, and `…-real` run at the trace's own
speed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.parameters import Parameter, Value
from trimtab_simulator.experiment import Experiment
from trimtab_simulator.objectives import Objectives
from trimtab_simulator.plant.fleet import FleetSettings
from trimtab_simulator.plant.machine import START_UTILIZATION, Machine, machine_of
from trimtab_simulator.replay import ReplaySettings
from trimtab_simulator.trace.arrivals import Arrival, Trace
from trimtab_simulator.trace.load import Transform, draw_of, load_trace

SMALL_RATES = "servegen_m-small_rates_first.csv.gz"
MID_RATES = "servegen_m-mid_rates_first.csv.gz"
R1_RATES = "servegen_deepseek-r1_rates_first.csv.gz"
R1_LENGTHS = "servegen_deepseek-r1_lengths_first.jsonl.gz"
CONVERSATIONS = "azure2023_conv_first.csv.gz"
CODE = "azure2023_code_first.csv.gz"
MOONCAKE = "mooncake_conversation_first.jsonl.gz"

DAY_SECONDS = 86_400.0
DAY = Transform(start=DAY_SECONDS, duration=DAY_SECONDS, speed=12, peak=30, cv=1)
"""The second day of a service, in two hours."""
SWITCH_SECONDS = 600.0
CODE_SHARES = (1.0, 0.15)  # of its load, alternating
HALF_DAY_SECONDS = DAY_SECONDS / 2
RAMP = ((0.0, 5.0), (600.0, 5.0), (1200.0, 30.0), (2400.0, 30.0), (3000.0, 5.0), (3600.0, 5.0))
"""(seconds, requests/s), linear in between."""
LLM_D_STAGES = ((2, 330), (4, 360), (6, 360), (8, 360), (10, 360), (4, 360), (1, 300))
"""(requests/s, seconds), at equal distances: guides/workload-autoscaling/slo-aware/benchmark-templates/
scored-config.yml of llm-d release-0.10. Prompts of 4,000 ± 300 tokens and outputs of 1,000 ± 80, both cut at ± 500
and ± 100.
"""
SLOTS = 512

LLAMA_8B = machine_of("llama-3.1-8b", "h200")
QWEN3_32B = Machine(
    "qwen3-32b",
    "h100 tp2",
    StepCost(13e-3, 1 / 18_000, 0.0, 4.5e-8),
    kv_tokens=300_000,
    device_bytes=160 * 10**9,
    bytes_per_token=262_144,
    max_num_seqs_cap=1024,
    max_model_len=40_960,
    num_gpus=2,
)
"""Qwen3-32B on two H100 as in llm-d's guide: weights (66 GB) and KV cache (256 KiB a token) at three quarters of
6.7 TB/s, prompts at 60 % of 1,979 TFLOP/s. One replica then serves 1.5 requests/s of that load; the guide reports 1.4
to 1.5.
"""

Load = Callable[[Path, int], Trace]
"""(folder of the traces, seed) → arrivals."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load, its objectives, and the start values of all policies: token budget and replicas."""

    name: str
    load: Load
    objectives: Objectives
    budget: int
    start_replicas: int
    max_replicas: int
    min_replicas: int = 1
    machine: Machine = LLAMA_8B
    cold_start: float | None = None
    """The only cold start of this scenario, in seconds; None if it is run with several."""

    def experiment(self, folder: Path, *, seed: int = 0, cold_start: float = 120.0) -> Experiment:
        """Return the experiment of this scenario."""
        parameters: dict[Parameter, Value] = {
            Parameter.MAX_NUM_SEQS: SLOTS,
            Parameter.MAX_NUM_BATCHED_TOKENS: self.budget,
            Parameter.WATERMARK: 0.0,
            Parameter.GPU_MEMORY_UTILIZATION: START_UTILIZATION,
        }
        settings = FleetSettings(
            self.machine,
            parameters,
            self.start_replicas,
            self.min_replicas,
            self.max_replicas,
            cold_start,
            slow_gap=self.objectives.slow_gap,
        )
        return Experiment(self.load(folder, seed), settings, ReplaySettings(seed=seed), self.objectives)


def _from_rates(rates: str, transform: Transform, lengths: str) -> Load:
    def load(folder: Path, seed: int) -> Trace:
        return load_trace(folder / rates, transform, lengths=folder / lengths, seed=seed)

    return load


def _mix(folder: Path, seed: int) -> Trace:
    """Return conversations, and code load that switches on and off."""
    parts = [
        load_trace(
            folder / SMALL_RATES,
            Transform(DAY.start, DAY.duration, DAY.speed, peak=peak, cv=1),
            lengths=folder / lengths,
            seed=2 * seed + index,
        )
        for index, (peak, lengths) in enumerate(((16.0, CONVERSATIONS), (10.0, CODE)))
    ]
    rng = random.Random(f"mix-{seed}")
    arrivals: list[Arrival] = list(parts[0].arrivals)
    for arrival in parts[1].arrivals:
        if rng.random() < CODE_SHARES[int(arrival.at / SWITCH_SECONDS) % len(CODE_SHARES)]:
            arrivals.append(arrival)
    arrivals.sort(key=lambda arrival: arrival.at)
    return Trace("mix", arrivals, parts[0].seconds)


def _code(folder: Path, seed: int) -> Trace:
    return load_trace(folder / CODE, Transform(copies=3, jitter=20), seed=seed)


def _moon(folder: Path, seed: int) -> Trace:
    """Return long prompts: two copies, shifted within the trace's grid of three seconds. Every prompt is computed
    whole.
    """
    trace = load_trace(folder / MOONCAKE, Transform(copies=2, jitter=3), seed=seed)
    return Trace(trace.name, [arrival._replace(prefix=()) for arrival in trace.arrivals], trace.seconds)


def _ramp(folder: Path, seed: int) -> Trace:
    """Return conversations whose rate rises sixfold in ten minutes, and falls again."""
    draw = draw_of(folder / CONVERSATIONS)
    rng = random.Random(f"ramp-{seed}")
    arrivals = []
    for (start, rate), (end, last) in pairwise(RAMP):
        at, most = start, max(rate, last)
        while (at := at + rng.expovariate(most)) < end:
            if rng.random() * most < rate + (last - rate) * (at - start) / (end - start):
                arrivals.append(Arrival(at, *draw(rng, "", at)))
    return Trace("ramp", arrivals, RAMP[-1][0])


def _llm_d(folder: Path, seed: int) -> Trace:
    """Return the load of llm-d's own benchmark of its SLO-aware autoscaler."""
    rng = random.Random(f"llm-d-{seed}")
    arrivals, start = [], 0.0
    for rate, seconds in LLM_D_STAGES:
        for index in range(rate * seconds):
            prompt = min(4500, max(3500, round(rng.gauss(4000, 300))))
            output = min(1100, max(900, round(rng.gauss(1000, 80))))
            arrivals.append(Arrival(start + index / rate, prompt, output))
        start += seconds
    return Trace("llm-d", arrivals, start)


CHAT = Objectives(2.0, 1 / 8000, itl_mean=0.08)
REASONING = Objectives(4.0, 1 / 4000, itl_mean=0.08)
LONG = Objectives(10.0, 1 / 4000, itl_mean=0.1)
LLM_D = Objectives(3.0, itl_mean=0.1)

_DAYTIME = Transform(DAY.start, HALF_DAY_SECONDS, peak=DAY.peak, cv=1)
_BURSTS = replace(DAY, cv=4)
_TWO_DAYS = Transform(3.5 * DAY_SECONDS, 2 * DAY_SECONDS, speed=24, peak=DAY.peak, cv=1)
"""The dataset has no dates; this is its largest change from one day to the next, as at the end of a week end."""

_FROM_PEAK = (
    Scenario("day", _from_rates(SMALL_RATES, DAY, CONVERSATIONS), CHAT, 1024, 4, 16),
    Scenario("burst", _from_rates(SMALL_RATES, _BURSTS, CONVERSATIONS), CHAT, 1024, 4, 16),
    Scenario("r1", _from_rates(R1_RATES, Transform(speed=6, peak=12), R1_LENGTHS), REASONING, 8192, 3, 16),
    Scenario("mix", _mix, CHAT, 1024, 4, 16),
    Scenario("code", _code, CHAT, 1024, 6, 28),
    Scenario("moon", _moon, LONG, 1024, 8, 28),
    Scenario("ramp", _ramp, CHAT, 1024, 4, 16),
    Scenario("week-end", _from_rates(MID_RATES, _TWO_DAYS, CONVERSATIONS), CHAT, 1024, 4, 16),
)
SCENARIOS = (
    *_FROM_PEAK,
    *(replace(each, name=f"{each.name}-from-1", start_replicas=1) for each in _FROM_PEAK),
    Scenario("day-real", _from_rates(SMALL_RATES, _DAYTIME, CONVERSATIONS), CHAT, 1024, 4, 16),
    Scenario("r1-real", _from_rates(R1_RATES, Transform(peak=12), R1_LENGTHS), REASONING, 8192, 3, 16),
    Scenario("llm-d", _llm_d, LLM_D, 8192, 3, 8, min_replicas=3, machine=QWEN3_32B, cold_start=100.0),
)
