"""Scheduler cost per step: schedule() plus update() on this machine's CPU, without a model.

Steady decode keeps the number of running requests constant. The mixed load adds as many requests as finish, with
prompts and outputs of many lengths on a KV cache that is slightly too small, so that steps contain prefill chunks,
admissions, completions and preemptions. Garbage collection stays on, as in the server.

    python -m engine_benchmarks.scheduler_bench [-o json] [--steps N]
"""

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from trimtab_engine.scheduling.block_manager import BlockManager
from trimtab_engine.scheduling.policy import SchedulingPolicy
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.scheduling.scheduler import Scheduler

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
RUNNING = (64, 256, 1024)
TARGET_MILLISECONDS = {256: 0.3, 1024: 1.0}  # median of schedule() plus update() in steady decode
WARM_UP_STEPS = 50
MAX_STEPS = MAX_MODEL_LEN - 64 - BLOCK_SIZE - 2 * WARM_UP_STEPS  # requests must not end while steady decode is measured
EOS = 2
WORD = 5  # every sampled token: no end-of-sequence, so that lengths decide
MIXED_RUNNING = 256
MIXED_BUDGET = 2048
MIXED_KV_SHARE = 0.9  # share of the mixed load's average demand


@dataclass(frozen=True, slots=True)
class Measurement:
    """One load. Times are milliseconds per step; `preemptions` and `tokens` are over all measured steps."""

    load: str
    running: int
    steps: int
    p50_ms: float
    p99_ms: float
    schedule_p50_ms: float
    update_p50_ms: float
    tokens: int
    preemptions: int
    target_p50_ms: float | None


class Load:
    """A scheduler under measurement: times each half of a step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.schedule_seconds: list[float] = []
        self.update_seconds: list[float] = []
        self.tokens = 0
        self.preemptions = 0

    def step(self) -> int:
        """Run one step; returns the number of requests that ended in it."""
        scheduler = self.scheduler
        started = time.perf_counter()
        batch = scheduler.schedule(started)
        scheduled = time.perf_counter()
        token_ids = [WORD] * sum(sequence.samples for sequence in batch.sequences)
        sampled_at = time.perf_counter()
        sampled = scheduler.update(batch, token_ids, sampled_at)
        ended = time.perf_counter()
        self.schedule_seconds.append(scheduled - started)
        self.update_seconds.append(ended - sampled_at)
        self.tokens += batch.num_tokens
        self.preemptions += len(batch.preempted)
        return sum(finished is not None for _, _, finished in sampled)

    def forget(self) -> None:
        """Start the measurement."""
        self.schedule_seconds.clear()
        self.update_seconds.clear()
        self.tokens = self.preemptions = 0

    def measured(self, name: str, running: int) -> Measurement:
        both = [one + other for one, other in zip(self.schedule_seconds, self.update_seconds, strict=True)]
        return Measurement(
            load=name,
            running=running,
            steps=len(both),
            p50_ms=percentile_ms(both, 50),
            p99_ms=percentile_ms(both, 99),
            schedule_p50_ms=percentile_ms(self.schedule_seconds, 50),
            update_p50_ms=percentile_ms(self.update_seconds, 50),
            tokens=self.tokens,
            preemptions=self.preemptions,
            target_p50_ms=TARGET_MILLISECONDS.get(running) if name == "steady decode" else None,
        )


def percentile_ms(seconds: Sequence[float], percent: int) -> float:
    """Nearest rank, in milliseconds."""
    ordered = sorted(seconds)
    return round(ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] * 1e3, 4)


def make_request(number: int, prompt: int, output: int) -> Request:
    sampling = Sampling(max_tokens=output, temperature=0.0)
    return Request.of(f"r{number}", [1] * prompt, sampling, arrival_time=0.0)


def make_scheduler(num_blocks: int, running: int, budget: int) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, num_blocks, BLOCK_SIZE),
        SchedulingPolicy(max_num_seqs=running, max_num_batched_tokens=max(budget, running)),
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=[EOS],
    )


def measure_steady_decode(running: int, steps: int) -> Measurement:
    """Measure `running` requests that all decode. Prompt lengths differ, so that block boundaries spread over the
    steps.
    """
    output = steps + 2 * WARM_UP_STEPS
    blocks = running * (-(-(64 + BLOCK_SIZE + output) // BLOCK_SIZE)) + MAX_MODEL_LEN
    load = Load(make_scheduler(blocks, running, budget=running * 128))
    for number in range(running):
        load.scheduler.add(make_request(number, 64 + number % BLOCK_SIZE, output))
    for _ in range(WARM_UP_STEPS):
        load.step()
    load.forget()
    for _ in range(steps):
        load.step()
    assert load.scheduler.num_running == running
    return load.measured("steady decode", running)


def measure_mixed(steps: int) -> Measurement:
    """Measure a load with as many new requests as completed ones; prompts of 16 to 1,024 tokens, outputs of 16 to
    512.
    """
    rng = random.Random(1)
    wanted_tokens = MIXED_RUNNING * (520 + 264 // 2)  # mean prompt and half of the mean output
    load = Load(make_scheduler(int(wanted_tokens * MIXED_KV_SHARE) // BLOCK_SIZE, MIXED_RUNNING, MIXED_BUDGET))
    added = 0

    def add(count: int) -> None:
        nonlocal added
        for _ in range(count):
            load.scheduler.add(make_request(added, rng.randint(16, 1024), rng.randint(16, 512)))
            added += 1

    add(2 * MIXED_RUNNING)
    for _ in range(20 * WARM_UP_STEPS):  # until arrivals and completions are in balance
        add(load.step())
    load.forget()
    for _ in range(steps):
        add(load.step())
    return load.measured("mixed", load.scheduler.num_running)


def measure(steps: int) -> list[Measurement]:
    return [*(measure_steady_decode(running, steps) for running in RUNNING), measure_mixed(steps)]


def table(measurements: Sequence[Measurement]) -> str:
    head = (
        f"{'load':<14} {'running':>7} {'p50 ms':>8} {'p99 ms':>8} {'schedule':>9} {'update':>8} {'target':>7} "
        f"{'preempted':>9}"
    )
    rows = [
        f"{m.load:<14} {m.running:>7} {m.p50_ms:>8.3f} {m.p99_ms:>8.3f} {m.schedule_p50_ms:>9.3f} "
        f"{m.update_p50_ms:>8.3f} {m.target_p50_ms or '-':>7} {m.preemptions:>9}"
        for m in measurements
    ]
    return "\n".join([head, *rows])


def report(measurements: Sequence[Measurement]) -> dict[str, object]:
    return {
        "benchmark": "scheduler",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "measurements": [asdict(measurement) for measurement in measurements],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scheduler_bench", description="Scheduler time per step, without a model.")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    parser.add_argument("--steps", type=int, default=1000, help="measured steps per load")
    options = parser.parse_args(arguments)
    if not 1 <= options.steps <= MAX_STEPS:
        parser.error(f"--steps is {options.steps}; it must be 1 to {MAX_STEPS}")
    measurements = measure(options.steps)
    print(json.dumps(report(measurements), indent=1) if options.output == "json" else table(measurements))
    return 0


if __name__ == "__main__":
    sys.exit(main())
