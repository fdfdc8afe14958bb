"""Alternatives for `deadline` scheduling in virtual time: when a request counts as late, and which fraction of
admissions late requests get. Shows the first tokens in time and the longest wait, with the engine's scheduler.

A step takes 20 ms, plus half a millisecond per token and one per sequence. Prompts of about 300 tokens and outputs of
about 60, with lengths and Poisson arrivals from a seed, at `load` times the scheduler's capacity for requests submitted
at once.

    python -m engine_benchmarks.deadline_choices
"""

import argparse
import itertools
import math
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trimtab_engine.scheduling import waiting_queue
from trimtab_engine.scheduling.block_manager import BlockManager
from trimtab_engine.scheduling.policy import QueueOrder, SchedulingPolicy
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.scheduling.scheduler import Scheduler
from trimtab_engine.scheduling.swap_space import SwapSpace
from trimtab_engine.scheduling.waiting_queue import LATE_SHARE

NUM_REQUESTS, MAX_NUM_SEQS, BUDGET, BLOCKS = 600, 16, 512, 4000
MEDIAN_PROMPT, LONGEST_PROMPT, MEAN_OUTPUT, LONGEST_OUTPUT = 256, 1500, 64, 400
STEP_SECONDS, TOKEN_SECONDS, SEQUENCE_SECONDS = 0.02, 0.0005, 0.001
LOADS, TARGETS, SEEDS = (1.2, 1.5, 2.0), (1.0, 2.0), 4
ALL_AT_ONCE = 1e6  # requests per second
NEVER = 10**9  # no admission for late requests


@dataclass(frozen=True, slots=True, kw_only=True)
class ByShare(SchedulingPolicy):
    """A request is late after a fraction of its allowance, independent of its prompt length."""

    share: float

    def is_too_late(self, waited: float, num_prompt_tokens: int, prompt_seconds: float) -> bool:
        return waited > self.share * (self.ttft_target + self.ttft_target_per_prompt_token * num_prompt_tokens)


@dataclass(frozen=True, slots=True)
class Choice:
    """A row of the table."""

    name: str
    order: QueueOrder = "deadline"
    share: float | None = None
    """Fraction of the allowance; None: the remaining time must suffice for the prompt, as in the engine."""
    late_share: int = LATE_SHARE

    def policy(self, target: float) -> SchedulingPolicy:
        limits = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": BUDGET, "enable_prefix_caching": False}
        queue = {"scheduling_policy": self.order, "ttft_target": target}
        values: dict[str, Any] = limits | queue
        return SchedulingPolicy(**values) if self.share is None else ByShare(share=self.share, **values)


ENGINE = Choice("deadline, as it is")
CHOICES = (
    Choice("fcfs", "fcfs"),
    ENGINE,
    *(Choice(f"late after {share:g} of the allowance", share=share) for share in (0.5, 0.75, 0.9, 1.0)),
    Choice("1 in 5 for the late", late_share=5),
    Choice("1 in 20", late_share=20),
    Choice("none", late_share=NEVER),
)


@dataclass(frozen=True, slots=True)
class Run:
    """Results of one load."""

    in_time: float
    """Fraction of the requests."""
    longest_wait: float
    seconds: float


@contextmanager
def late_share(share: int) -> Iterator[None]:
    """Use this fraction of admissions for late requests within the block."""
    waiting_queue.LATE_SHARE = share
    try:
        yield
    finally:
        waiting_queue.LATE_SHARE = LATE_SHARE


def requests_of(seed: int, rate: float, count: int = NUM_REQUESTS) -> list[Request]:
    """Return Poisson arrivals; the lengths do not depend on the rate."""
    arrivals, lengths = random.Random(seed), random.Random(seed + 1000)
    times = itertools.accumulate(arrivals.expovariate(rate) for _ in range(count))
    made = []
    for number, arrival in enumerate(times):
        prompt = min(LONGEST_PROMPT, max(8, int(lengths.lognormvariate(math.log(MEDIAN_PROMPT), 0.6))))
        output = min(LONGEST_OUTPUT, max(4, int(lengths.expovariate(1 / MEAN_OUTPUT))))
        sampling = Sampling(max_tokens=output, ignore_eos=True)
        made.append(Request.of(str(number), [1] * prompt, sampling, arrival_time=arrival))
    return made


def serve(requests: Sequence[Request], choice: Choice, target: float) -> Run:
    """Serve all requests to their end."""
    with late_share(choice.late_share):
        return _serve(requests, choice.policy(target), target)


def _serve(requests: Sequence[Request], policy: SchedulingPolicy, target: float) -> Run:
    scheduler = Scheduler(BlockManager(BLOCKS, BLOCKS, 16, SwapSpace(0, 0)), policy, max_model_len=2048)
    coming, waits, now = list(reversed(requests)), dict[Request, float](), 0.0
    while coming or not scheduler.is_idle:
        if scheduler.is_idle:
            now = max(now, coming[-1].arrival_time)
        while coming and coming[-1].arrival_time <= now:
            scheduler.add(coming.pop())
        batch = scheduler.schedule(now)
        now += STEP_SECONDS + TOKEN_SECONDS * batch.num_tokens + SEQUENCE_SECONDS * len(batch.sequences)
        scheduler.update(batch, [1] * len(batch.sampling), now)
        for request in batch.sampling:
            waits.setdefault(request, now - request.arrival_time)
    return Run(sum(wait <= target for wait in waits.values()) / len(waits), max(waits.values()), now)


def scheduler_capacity(seed: int) -> float:
    """Return the capacity in requests per second."""
    return NUM_REQUESTS / serve(requests_of(seed, ALL_AT_ONCE), CHOICES[0], 1.0).seconds


def table() -> Iterator[str]:
    """Return one line per choice: for each target and load the fraction in time, and the longest wait in brackets."""
    at_most = statistics.mean(scheduler_capacity(seed) for seed in range(SEEDS))
    columns = list(itertools.product(TARGETS, LOADS))
    yield "| | " + " | ".join(f"{target:g} s, load {load:g}" for target, load in columns) + " |"
    yield "| --- " * (len(columns) + 1) + "|"
    for choice in CHOICES:
        cells = []
        for target, load in columns:
            runs = [serve(requests_of(seed, load * at_most), choice, target) for seed in range(SEEDS)]
            in_time, longest = statistics.mean(run.in_time for run in runs), max(run.longest_wait for run in runs)
            cells.append(f"{in_time:.0%} ({longest:.0f} s)")
        yield f"| {choice.name} | " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(
        prog="deadline_choices", description="Other choices for the queue order deadline, in virtual time."
    ).parse_args(arguments)
    for line in table():
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
