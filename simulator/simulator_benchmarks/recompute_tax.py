"""Share of GPU time spent on computing preempted requests again: `python -m simulator_benchmarks.recompute_tax`.

The scenario is that of vLLM's own report (vllm-project/vllm#44594): Qwen2.5-7B on a GB200 with 299,584 KV tokens and at
most 256 sequences; 128 clients without pause, prompts of about 1,000 and outputs of about 5,000 tokens (±20 %; also
±50 %, as in #54644). Fixed settings are compared with the tuner, and the engine's choice of the request to preempt with
last in, first out, which is vLLM's. The first two minutes do not count.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import NamedTuple

from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.engine_model.engine import VICTIM_CANDIDATES
from trimtab_operator.tuner.parameters import Parameter, Value
from trimtab_simulator.objectives import Objectives
from trimtab_simulator.plant.fleet import FleetSettings
from trimtab_simulator.plant.machine import START_UTILIZATION, Machine
from trimtab_simulator.policies.fixed import Fixed
from trimtab_simulator.policies.policy import Policy, PolicyActions, PolicyInput, PolicySetup
from trimtab_simulator.policies.trimtab import Trimtab
from trimtab_simulator.scores import percentile

from simulator_benchmarks.closed_loop import Clients, run_clients

GB200 = Machine(
    "qwen2.5-7b",
    "gb200",
    StepCost(2.4e-3, 1.25e-5, 1e-5, 0.9e-8),
    kv_tokens=299_584,
    device_bytes=186 * 10**9,
    bytes_per_token=57_344,
    max_num_seqs_cap=1024,
    max_model_len=8192,
    cap_utilization=START_UTILIZATION,
)
"""Weights and KV cache at 80 % of 8 TB/s, prompts at half of 2,500 TFLOP/s. No memory is left for a larger cache."""
CLIENTS = 128
PROMPT, OUTPUT = 1000, 5000
SPREADS = (0.2, 0.5)
SECONDS, WARM_UP_SECONDS, TICK_SECONDS = 900.0, 120.0, 15.0
OBJECTIVES = Objectives(30.0, itl_mean=0.02)
"""Which all requests attain: the tuner acts on the preemptions themselves."""
WATERMARK_OF_REPORT = 0.05


class Tax(NamedTuple):
    """Loss of one run. Shares are of all computed tokens, and of the engine's busy time."""

    token_share: float
    time_share: float
    preemptions_per_minute: float
    tokens_per_s: float
    ttft_p50: float


class _Recorder:
    """A policy, with the engine's counters at each tick."""

    def __init__(self, policy: Policy) -> None:
        self.name = policy.name
        self.tick_seconds = TICK_SECONDS
        self.reads_requests = policy.reads_requests
        self.pages: list[tuple[float, float, float, float, float, float]] = []
        """Time, recomputed and computed tokens, busy seconds, preemptions, and output tokens."""
        self._policy = policy

    def decide(self, view: PolicyInput) -> PolicyActions:
        """Record, and call the policy."""
        (snapshot,) = view.ready
        assert snapshot.sample is not None
        counters = snapshot.sample.counters
        works = [work for work in (counters.decode, counters.prefill) if work is not None]
        self.pages.append(
            (
                view.now,
                counters.recomputed_tokens or 0.0,
                sum(work.tokens for work in works),
                sum(work.seconds for work in works),
                sum(counters.preemptions.values()),
                counters.generated_tokens,
            )
        )
        return self._policy.decide(view)


@dataclass(frozen=True, slots=True)
class Setting:
    """One row: lengths, the choice of the request to preempt, and the settings of the engine."""

    spread: float
    victim_candidates: int
    watermark: float
    is_tuned: bool

    @property
    def label(self) -> str:
        """The first cells of the row."""
        victim = "last in" if self.victim_candidates == 1 else f"cheapest of {self.victim_candidates}"
        name = f"{'tuned from' if self.is_tuned else 'fixed'} watermark {self.watermark:g}"
        return f"±{100 * self.spread:g} % | {victim} | {name}"


SETTINGS = [
    Setting(spread, candidates, watermark, is_tuned)
    for spread, candidates in product(SPREADS, (1, VICTIM_CANDIDATES))
    for watermark, is_tuned in ((0.0, False), (WATERMARK_OF_REPORT, False), (0.0, True))
]


def measure(setting: Setting, seed: int, seconds: float = SECONDS) -> Tax:
    """Run the clients on one engine, and return its tax."""

    def draw(rng: random.Random) -> tuple[int, int]:
        low, high = 1 - setting.spread, 1 + setting.spread
        return round(PROMPT * rng.uniform(low, high)), round(OUTPUT * rng.uniform(low, high))

    parameters: dict[Parameter, Value] = {
        Parameter.MAX_NUM_SEQS: 256,
        Parameter.MAX_NUM_BATCHED_TOKENS: 8192,
        Parameter.WATERMARK: setting.watermark,
        Parameter.GPU_MEMORY_UTILIZATION: START_UTILIZATION,
    }
    settings = FleetSettings(GB200, parameters, 1, 1, 1, 120.0, victim_candidates=setting.victim_candidates)
    setup = PolicySetup(GB200, OBJECTIVES, 1, 1, 1, 120.0, parameters, seed)
    watched = _Recorder(Trimtab(setup) if setting.is_tuned else Fixed("fixed"))
    result = run_clients(settings, watched, Clients(CLIENTS, draw), seconds=seconds, seed=seed)
    first = next(page for page in watched.pages if page[0] >= WARM_UP_SECONDS)
    passed, again, computed, busy, preemptions, outputs = (
        after - before for before, after in zip(first, watched.pages[-1], strict=True)
    )
    waits = sorted(s.ttft for s in result.served if s.arrival >= WARM_UP_SECONDS and s.ttft is not None)
    return Tax(
        token_share=again / computed,
        time_share=again * GB200.cost.per_token / busy,
        preemptions_per_minute=60 * preemptions / passed,
        tokens_per_s=outputs / passed,
        ttft_p50=percentile(waits, 50) or 0.0,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each setting and choice of the preempted request: means over seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    seeds = [int(seed) for seed in parser.parse_args(arguments).seeds.split(",")]
    print("| lengths | preempted | settings | recomputed tokens | GPU time | preemptions/min | output/s | TTFT p50 |")
    print("|---|---|---|---|---|---|---|---|")
    for setting in SETTINGS:
        runs = [measure(setting, seed) for seed in seeds]
        token_share, time_share, preemptions, tokens, ttft = (fmean(column) for column in zip(*runs, strict=True))
        print(
            f"| {setting.label} | {100 * token_share:.1f} % | {100 * time_share:.1f} % | {preemptions:.0f} | "
            f"{tokens:,.0f} | {ttft:.1f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()
