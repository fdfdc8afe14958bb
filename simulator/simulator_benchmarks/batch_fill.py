"""Batch requests in what interactive ones leave, by `priority`: `python -m simulator_benchmarks.batch_fill`.

One replica of llama-3.1-8b on an H200, scheduled by the engine's own scheduler (`trimtab_engine.scheduling`) in virtual
time, because the engine model has no priorities. Interactive conversations arrive at 25 to 90 % of the rate at which
the replica attains 99 % with a budget of 1,024; batch requests of the same lengths always wait. Idle capacity is the
replica's highest output, which batch requests have it produce, less the output of the interactive ones.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab_engine.scheduling.block_manager import BlockManager
from trimtab_engine.scheduling.policy import SchedulingPolicy
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.scheduling.scheduler import Scheduler
from trimtab_operator.tuner.engine_model import Sequence as Served
from trimtab_simulator.trace.load import draw_of
from trimtab_simulator.trace.sampling import Draw

from simulator_benchmarks.scenarios import CHAT, CONVERSATIONS, LLAMA_8B, SLOTS

BUDGETS = (512, 1024)
FULL_RATE = 7.39  # requests/s of which 99 % attain the objectives with a budget of 1,024
LOADS = (0.25, 0.5, 0.75, 0.9)
SECONDS, WARM_UP_SECONDS = 600.0, 60.0
BACKLOG = 64  # batch requests that always wait
INTERACTIVE, BATCH = 0, 1  # the engine's `priority`: the lowest number runs first


@dataclass(frozen=True, slots=True)
class Run:
    """Interactive requests that attained the objectives, and output tokens a second of each class."""

    attained: float
    interactive_tokens: float
    batch_tokens: float


class _Engine:
    """The engine's scheduler with the machine's step times."""

    def __init__(self, budget: int) -> None:
        policy = SchedulingPolicy(
            max_num_seqs=min(SLOTS, budget),
            max_num_batched_tokens=budget,
            scheduling_policy="priority",
            enable_prefix_caching=False,
        )
        num_blocks = LLAMA_8B.kv_tokens // LLAMA_8B.block_size
        blocks = BlockManager(num_blocks, num_blocks, LLAMA_8B.block_size)
        self.now = 0.0
        self.scheduler = Scheduler(blocks, policy, max_model_len=LLAMA_8B.max_model_len)
        self.requests: dict[str, tuple[Served, int]] = {}
        """Each request with its priority."""
        self.output: list[tuple[float, int]] = []
        """Time and priority of each output token."""

    def add(self, arrival: float, prompt: int, output: int, priority: int) -> None:
        """Add a request."""
        name = str(len(self.requests))
        sampling = Sampling(max_tokens=output, ignore_eos=True)
        self.scheduler.add(Request.of(name, [1] * prompt, sampling, arrival_time=arrival, priority=priority))
        self.requests[name] = Served(arrival, prompt, output), priority

    def step(self) -> None:
        """Run one step."""
        batch = self.scheduler.schedule(self.now)
        context = sum(each.start + each.num_tokens for each in batch.sequences)
        self.now += LLAMA_8B.cost.seconds(batch.num_tokens, len(batch.sequences), context, context)
        tokens: list[int | list[int]] = [2] * len(batch.sampling)
        for request, _, status in self.scheduler.update(batch, tokens, self.now):
            served, priority = self.requests[request.request_id]
            served.first_token_at = served.first_token_at or self.now
            self.output.append((self.now, priority))
            if status is not None:
                served.finished_at = self.now


def run(draw: Draw, *, budget: int, rate: float, has_batch: bool, seed: int = 0, seconds: float = SECONDS) -> Run:
    """Serve interactive requests at `rate`, and batch requests without end if `has_batch`."""
    rng, lengths = random.Random(f"interactive-{seed}"), random.Random(f"batch-{seed}")
    engine = _Engine(budget)
    due = rng.expovariate(rate) if rate else math.inf
    while engine.now < seconds:
        while due <= engine.now:
            engine.add(due, *draw(rng, "", due), INTERACTIVE)
            due += rng.expovariate(rate)
        while has_batch and engine.scheduler.num_waiting < BACKLOG:
            engine.add(engine.now, *draw(lengths, "", engine.now), BATCH)
        if engine.scheduler.is_idle:
            engine.now = due
        else:
            engine.step()
    judged = [
        served
        for served, priority in engine.requests.values()
        if priority == INTERACTIVE and served.arrival >= WARM_UP_SECONDS and served.finished_at is not None
    ]
    counted = [priority for at, priority in engine.output if at >= WARM_UP_SECONDS]
    passed = engine.now - WARM_UP_SECONDS
    return Run(
        attained=sum(CHAT.met_by(served) for served in judged) / len(judged) if judged else 1.0,
        interactive_tokens=counted.count(INTERACTIVE) / passed,
        batch_tokens=counted.count(BATCH) / passed,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row per token budget and interactive load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the development slice")
    draw = draw_of(parser.parse_args(arguments).traces / CONVERSATIONS)
    print("| budget | interactive | attained alone | with batch | batch, tokens/s | idle capacity, tokens/s | used |")
    print("|---|---|---|---|---|---|---|")
    for budget in BUDGETS:
        most = run(draw, budget=budget, rate=0.0, has_batch=True).batch_tokens
        for load in LOADS:
            alone, both = (
                run(draw, budget=budget, rate=load * FULL_RATE, has_batch=has_batch) for has_batch in (False, True)
            )
            idle = most - alone.interactive_tokens
            print(
                f"| {budget} | {100 * load:g} % | {100 * alone.attained:.2f} % | {100 * both.attained:.2f} % | "
                f"{both.batch_tokens:,.0f} | {idle:,.0f} | {100 * both.batch_tokens / idle:.0f} % |",
                flush=True,
            )


if __name__ == "__main__":
    main()
