"""`make bench-gpu`, second part: the engine itself, as a share of what the device allows (ideal.py).

Decode at 1, 32 and 256 requests of 1k context, prefill, how busy the GPU is, and nano-vllm's workload; random weights,
no tokenizer, no server. A row in which a kernel was compiled while it was measured is an error.

Beside torch, triton and numpy the engine imports msgspec, pyzmq and llguidance: where they are not installed, they are
taken from the wheels of `--wheels` (`make bench-gpu-wheels`), which are unpacked beside and put on the path.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from trimtab_kernels.jit import HAS_TRITON, triton

from benchmarks.ideal import (
    LLAMA_8B,
    QWEN3_06B,
    QWEN3_8B,
    ModelShape,
    nano_vllm_workload,
    prefill_seconds,
    step_seconds,
    workload_seconds,
)
from benchmarks.limits import bf16_rate, copy_bandwidth
from benchmarks.report import Entry, Report, identity
from benchmarks.wheels import use_wheels

if TYPE_CHECKING:
    from trimtab_engine.engine import Engine
    from trimtab_engine.messages import StepOutputs

Workload = list[tuple[list[int], int]]
CONTEXT = 1024
STEPS = 64  # of decode that are measured: the context grows by 6 %
WARM_UP_STEPS = 8
BATCHES = {1: 0.90, 32: 0.85, 256: 0.75}
"""Requests, and the share of the limit that is asked."""
PREFILL_BAR, BUSY_BAR, WORKLOAD_BAR = 0.70, 0.97, 0.60
PREFILL_PROMPTS = 32
PROFILED_STEPS = 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Of this device, measured in this run: bytes/s of a copy, FLOP/s of a bf16 product."""

    bandwidth: float
    flops: float


@contextmanager
def an_engine(shape: ModelShape, *, device: str = "cuda", **changes: Any) -> "Iterator[Engine]":
    """With random weights; it gives everything back."""
    from trimtab_engine.config import EngineConfig
    from trimtab_engine.startup import start_engine

    values: dict[str, Any] = {
        "load_format": "dummy",
        "device": device,
        "max_model_len": 2048,
        "max_num_seqs": 256,
        "max_num_seqs_cap": 256,
        "max_num_batched_tokens": 8192,
        "max_num_batched_tokens_cap": 8192,
        "enable_prefix_caching": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape.config(4096)))
        config = EngineConfig(model=folder, **{**values, **changes})
        engine, _ = start_engine(config, lambda stage, percent: None, time.monotonic)
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


class Compiled(Exception):
    """A kernel was compiled while it was measured: the figure says nothing about serving."""


def add(engine: "Engine", workload: Workload, *, temperature: float = 0.0) -> None:
    """Queue requests that generate exactly as many tokens as they say."""
    from trimtab_engine.messages import AddRequest, SamplingParams

    for number, (prompt, count) in enumerate(workload):
        sampling = SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True)
        engine.add(AddRequest(str(number), prompt, sampling, arrival_time=time.monotonic()))


def run_to_end(engine: "Engine") -> int:
    """Step until nothing is left; returns the tokens that were generated."""
    generated = 0
    while engine.has_work:
        generated += _tokens(checked(engine.step()))
    return generated


def checked(step: "StepOutputs") -> "StepOutputs":
    if step.stats.kernel_compilations:
        raise Compiled(f"{step.stats.kernel_compilations} kernels were compiled after start-up")
    return step


def _tokens(step: "StepOutputs") -> int:
    return sum(len(output.token_ids) for output in step.outputs)


def decode(engine: "Engine", batch: int, *, context: int = CONTEXT, steps: int = STEPS) -> tuple[float, float]:
    """(tokens/s, mean context) of so many requests, once all of them decode."""
    prompts = _prompts(batch, context)
    add(engine, [(prompt, steps + WARM_UP_STEPS + 8 + batch) for prompt in prompts])
    _until_all_decode(engine, batch)
    seconds, generated = timed(lambda: [checked(engine.step()) for _ in range(steps)])
    _end(engine)
    return generated / seconds, context + WARM_UP_STEPS + steps / 2


def timed(run: "Callable[[], list[StepOutputs]]") -> tuple[float, int]:
    """Seconds, and tokens that came out. Each step returns when its tokens are on the host."""
    started = time.perf_counter()
    outputs = run()
    return time.perf_counter() - started, sum(_tokens(step) for step in outputs)


def _until_all_decode(engine: "Engine", batch: int) -> None:
    decodes = 0
    while decodes < WARM_UP_STEPS:
        stats = engine.step().stats
        decodes = decodes + 1 if stats.kind == "decode" and stats.num_batch_requests == batch else 0


def _end(engine: "Engine") -> None:
    """Drop what still runs, and let what is in flight land."""
    engine.abort([str(number) for number in range(1024)])
    while engine.has_work:
        engine.step()


def busy_share(engine: "Engine", batch: int) -> float:
    """Of the time between the first and the last kernel of some decode steps, the part in which one ran."""
    from torch.profiler import ProfilerActivity, profile

    add(engine, [(prompt, PROFILED_STEPS + WARM_UP_STEPS + 8 + batch) for prompt in _prompts(batch, CONTEXT)])
    _until_all_decode(engine, batch)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(PROFILED_STEPS):
            engine.step()
        torch.cuda.synchronize()
    _end(engine)
    events: list[Any] = recorded.events() or []
    return covered([(e.time_range.start, e.time_range.end) for e in events if e.device_type.name == "CUDA"])


def covered(intervals: list[tuple[float, float]]) -> float:
    """Share of the time from the first start to the last end that lies in some interval."""
    if not intervals:
        raise RuntimeError("the profiler saw no kernel")
    taken, reached = 0.0, min(start for start, _ in intervals)
    first = reached
    for start, end in sorted(intervals):
        taken += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return taken / (reached - first) if reached > first else 0.0


def prefill(engine: "Engine", *, prompts: int = PREFILL_PROMPTS, length: int = CONTEXT) -> float:
    """Prompt tokens/s, each prompt with one token of output."""
    add(engine, [(prompt, 1) for prompt in _prompts(prompts, length)])
    started = time.perf_counter()
    run_to_end(engine)
    return prompts * length / (time.perf_counter() - started)


def workload_rate(engine: "Engine", workload: Workload) -> float:
    """Generated tokens/s from the first request queued to the last token out."""
    add(engine, workload, temperature=0.6)
    started = time.perf_counter()
    generated = run_to_end(engine)
    return generated / (time.perf_counter() - started)


def _prompts(count: int, length: int) -> list[list[int]]:
    return torch.randint(3, 10000, (count, length), generator=torch.Generator().manual_seed(count)).tolist()


Row = tuple[str, float, "Callable[[Engine], tuple[float, float]]"]
"""Name, bar, and what measures (rate, the limit of that rate)."""


def rows_of(shape: ModelShape, limits: Limits) -> list[Row]:
    """What is measured on one engine of this model."""
    bandwidth, flops = limits.bandwidth, limits.flops

    def decoding(batch: int) -> "Callable[[Engine], tuple[float, float]]":
        def measure(engine: "Engine") -> tuple[float, float]:
            rate, context = decode(engine, batch)
            seconds = step_seconds(shape, batch, int(batch * context), bandwidth=bandwidth, flops=flops)
            return rate, batch / seconds

        return measure

    def prefilling(engine: "Engine") -> tuple[float, float]:
        return prefill(engine), CONTEXT / prefill_seconds(shape, CONTEXT, flops=flops)

    def nano(engine: "Engine") -> tuple[float, float]:
        workload = nano_vllm_workload()
        best = workload_seconds(shape, workload, bandwidth=bandwidth, flops=flops)
        return workload_rate(engine, workload), sum(count for _, count in workload) / best

    if shape is not LLAMA_8B:
        return [(f"engine {shape.name} nano-vllm workload", WORKLOAD_BAR, nano)]
    decodes: list[Row] = [
        (f"engine {shape.name} decode {batch} x 1k", bar, decoding(batch)) for batch, bar in BATCHES.items()
    ]
    return [
        *decodes,
        (f"engine {shape.name} prefill", PREFILL_BAR, prefilling),
        (f"engine {shape.name} GPU busy, 32 x 1k", BUSY_BAR, lambda engine: (busy_share(engine, 32), 1.0)),
    ]


def measure_rows(engine: "Engine", rows: list[Row], report: Report, deadline: float) -> list[str]:
    """Each row that still has time into the report; returns the names of the others."""
    left: list[str] = []
    for name, bar, measure in rows:
        if time.monotonic() > deadline:
            left.append(name)
            continue
        entry: Entry = {"limit": "model", "bar": bar}
        try:
            rate, limit = measure(engine)
            entry |= {"rate": rate, "limit_rate": limit, "share": rate / limit}
        except Exception as error:  # of any kind: the other rows still run, and the exit code tells
            entry["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            _end(engine)
        report.add(name, entry)
        print(f"{name}: {entry.get('error') or f'{rate:.4g}, share {rate / limit:.3f} of {bar:.2f}'}", flush=True)
    return left


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.end_to_end", description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="folder of gpu.json")
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    parser.add_argument("--resume", action="store_true", help="skip rows that gpu.json has from this device")
    parser.add_argument("--wheels", type=Path, default=Path("build/wheels"), help="folder with wheels that are missing")
    parser.add_argument("--budget-seconds", type=float, default=480.0, help="no row is begun after this")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 when every row ran, 1 when one failed, 2 without a GPU or Triton, 3 out of time."""
    options = parse(arguments)
    if not torch.cuda.is_available() or not HAS_TRITON:
        print("bench-gpu: needs a CUDA device, torch with CUDA and triton; nothing was measured", file=sys.stderr)
        return 2
    use_wheels(options.wheels)
    device, deadline = torch.device("cuda"), time.monotonic() + options.budget_seconds
    # The rows of the kernels are in the same file, and stay.
    report = Report(options.output / "gpu.json", identity(device, triton.__version__), "make bench-gpu", resume=True)
    limits = Limits(copy_bandwidth(device), bf16_rate(device))
    report.limits |= {"copy": limits.bandwidth, "bf16": limits.flops}
    left: list[str] = []
    names: list[str] = []
    for shape in (LLAMA_8B, QWEN3_06B, QWEN3_8B):
        rows = [r for r in rows_of(shape, limits) if options.only in r[0] and not (options.resume and report.has(r[0]))]
        names += [name for name, *_ in rows]
        if not rows or time.monotonic() > deadline:
            left += [name for name, *_ in rows]
            continue
        with an_engine(shape) as engine:
            left += measure_rows(engine, rows, report, deadline)
    if left:
        print(f"out of time; RESUME=1 goes on with: {', '.join(left)}")
    if any("error" in report.rows.get(name, {}) for name in names):
        return 1
    return 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
