"""Engine phase of a run: measures the engine as a share of the device's limits (ideal.py).

Decode with 1, 32 and 256 requests of 1k context, prefill, GPU utilization, nano-vllm's workload, and a live resize of
the KV cache; random weights, no tokenizer, no server. A row during which a kernel was compiled is an error. One process
per engine (`--group`), so that each starts with an empty device.

In addition to torch, triton and numpy, the engine imports msgspec, pyzmq and llguidance: if they are not installed,
they are taken from the wheels of `--wheels` (`make bench-gpu-wheels`).
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kernel_benchmarks.engine_rows import (
    BUSY_BATCH,
    CONTEXT,
    GROUPS,
    STEPS,
    WARM_UP_STEPS,
    EngineRow,
    Group,
    Kind,
    Workload,
    decode_load,
)
from kernel_benchmarks.load import add, checked, drop_all, run_to_end, running_engine, tokens_of
from kernel_benchmarks.phase import DEVICE_LOST, DONE, FAILED, OUT_OF_TIME, Phase, parse_phase
from kernel_benchmarks.report import Entry, format_error
from kernel_benchmarks.resize import live_resize
from kernel_benchmarks.timing import DeviceLost, check_device
from kernel_benchmarks.wheels import use_wheels

if TYPE_CHECKING:
    from trimtab_engine.core.engine import Engine
    from trimtab_engine.messages.requests import StepOutputs

PROFILED_STEPS = 20
START_SECONDS, ROW_SECONDS = 240.0, 120.0
"""After this time, an engine start (including compilation and graph capture) or a row counts as hung."""
RESIZE_START, RESIZE_CAP = "0.5", "0.65"
"""gpu_memory_utilization before and after the resize: 10 GiB on a device of 139 GiB with a model of 16 GB."""
RESTART = "a restart (process start to ready; random weights, so nothing is read)"
WORKLOAD_TEMPERATURE = 0.6  # nano-vllm's


class TooLittleMemory(Exception):
    """The KV cache is too small for the batch: its requests never decode at the same time."""


def decode(engine: "Engine", batch: int, *, context: int = CONTEXT, steps: int = STEPS) -> float:
    """Return the tokens/s of `batch` requests once all of them decode. Each step returns when its tokens are on the
    host.

    Raises:
        TooLittleMemory: the requests never decode at the same time.
    """
    add(engine, decode_load(batch, context, steps))
    _until_all_decode(engine, batch)
    started = time.perf_counter()
    outputs = [_step_of_all(engine, batch) for _ in range(steps)]
    seconds = time.perf_counter() - started
    drop_all(engine)
    return sum(tokens_of(step) for step in outputs) / seconds


def _until_all_decode(engine: "Engine", batch: int) -> None:
    decodes = 0
    while decodes < WARM_UP_STEPS:
        stats = _step_of_all(engine, batch).stats
        decodes = decodes + 1 if stats.kind == "decode" and stats.num_batch_requests == batch else 0


def _step_of_all(engine: "Engine", batch: int) -> "StepOutputs":
    """Run a step in which all requests must decode.

    Raises:
        TooLittleMemory: a request was preempted, or all have ended one after the other.
    """
    step = checked(engine.step()) if engine.has_work else None
    if step is None or step.stats.preempted:
        happened = "they ended one after the other" if step is None else "some were preempted"
        blocks = f" of {step.stats.kv_blocks_total} blocks" if step else ""
        raise TooLittleMemory(
            f"{batch} requests cannot decode at once: the KV cache{blocks} is too small for them ({happened}); "
            "give the engine more memory with a higher --gpu-memory-utilization"
        )
    return step


def busy_share(engine: "Engine", batch: int) -> float:
    """Return the fraction of time in which the GPU was busy, between the first and the last kernel of some decode
    steps.
    """
    from torch.profiler import ProfilerActivity, profile

    add(engine, decode_load(batch, CONTEXT, PROFILED_STEPS))
    _until_all_decode(engine, batch)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(PROFILED_STEPS):
            _step_of_all(engine, batch)
        torch.cuda.synchronize()
    drop_all(engine)
    events: list[Any] = recorded.events() or []
    return covered_fraction([(e.time_range.start, e.time_range.end) for e in events if e.device_type.name == "CUDA"])


GAP_MICROSECONDS = 10.0


def covered_fraction(intervals: list[tuple[float, float]]) -> float:
    """Return the fraction of the time from the first start to the last end (microseconds) that is covered by intervals,
    counting gaps below GAP as covered: the device takes that long between two kernels in any case.
    """
    if not intervals:
        raise RuntimeError("the profiler saw no kernel")
    taken, reached = 0.0, min(start for start, _ in intervals)
    first = reached
    for start, end in sorted(intervals):
        begin = reached if start - reached <= GAP_MICROSECONDS else start
        taken += max(0.0, end - begin)
        reached = max(reached, end)
    return taken / (reached - first) if reached > first else 0.0


def prefill(engine: "Engine", load: Workload) -> float:
    """Return the prompt tokens/s of prompts with one output token each."""
    add(engine, load)
    started = time.perf_counter()
    run_to_end(engine)
    return sum(len(prompt) for prompt, _ in load) / (time.perf_counter() - started)


def workload_rate(engine: "Engine", workload: Workload) -> float:
    """Return the generated tokens/s from the first queued request to the last output token."""
    add(engine, workload, temperature=WORKLOAD_TEMPERATURE)
    started = time.perf_counter()
    generated = run_to_end(engine)
    return generated / (time.perf_counter() - started)


MEASURES: dict[Kind, Callable[["Engine", EngineRow], float]] = {
    Kind.DECODE: lambda engine, row: decode(engine, row.batch),
    Kind.PREFILL: lambda engine, row: prefill(engine, row.load),
    Kind.WORKLOAD: lambda engine, row: workload_rate(engine, row.load),
}


def measure(engine: "Engine", row: EngineRow, limits: dict[str, float]) -> Entry:
    """Measure one row. Raises the engine's exceptions."""
    if row.kind is Kind.RESIZE:
        restart = seconds_since_start()
        resize = live_resize(engine)
        entry: Entry = {"seconds": max(resize.stalls), "grow_seconds": resize.stalls[0]}
        entry |= {"shrink_seconds": resize.stalls[1], "bytes": resize.bytes_moved}
        return entry | {"limit": "seconds", "bar": row.bar, "peers": {RESTART: {"seconds": restart}}}
    if row.kind is Kind.BUSY:
        return {"limit": "time", "bar": row.bar, "share": busy_share(engine, BUSY_BATCH)}
    rate, limit = MEASURES[row.kind](engine, row), row.limit(limits)
    return {"limit": "model", "bar": row.bar, "rate": rate, "limit_rate": limit, "share": rate / limit}


def seconds_since_start() -> float:
    """Return the age of this process."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def describe(entry: Entry) -> str:
    """Format an entry for the progress line."""
    if "error" in entry:
        return str(entry["error"])
    if entry["limit"] == "seconds":
        return f"stall {1e3 * entry['seconds']:.0f} ms of {1e3 * entry['bar']:.0f} ms allowed"
    rate = f"{entry['rate']:.4g} tokens/s, " if "rate" in entry else ""
    return f"{rate}share {entry['share']:.3f} of {entry['bar']:.2f} required"


def measure_rows(
    engine: "Engine", rows: list[EngineRow], phase: Phase, measured: Callable[..., Entry] = measure
) -> list[str]:
    """Measure rows while time remains, and return the names of the others."""
    left: list[str] = []
    for row in rows:
        if phase.clock.is_up:
            left.append(row.name)
            continue
        phase.report.begin(row.name, seconds=phase.clock.seconds_for(ROW_SECONDS))
        try:
            entry = measured(engine, row, phase.report.limits) | {"kernel_compilations": 0}  # otherwise it raised
        except Exception as error:  # any error: the other rows still run, and the exit code reports it
            traceback.print_exception(error)
            entry = {"limit": "model", "bar": row.bar, "error": format_error(error)}
            phase.report.add(row.name, entry)
            check_device()
            drop_all(engine)
        phase.report.add(row.name, entry)
        phase.clock.log(f"{row.name}: {describe(entry)}")
    return left


def main(arguments: list[str] | None = None) -> int:
    """Return exit code 0 if every row of the group ran, 1 if one failed, 3 out of time."""
    parser = argparse.ArgumentParser(prog="python -m kernel_benchmarks.end_to_end", description=__doc__.split("\n")[0])
    parser.add_argument("--group", type=int, required=True, choices=range(len(GROUPS)), help="which engine")
    parser.add_argument("--gpu-memory-utilization", default="0.9", help="less where others use the device (0.9)")
    phase = parse_phase(parser, arguments)
    use_wheels(phase.rest.wheels)
    group = GROUPS[phase.rest.group]
    rows = group.select_rows(phase.only, phase.report.has)
    if not rows:
        return DONE
    if phase.clock.is_up:
        phase.clock.log(f"not reached: {', '.join(row.name for row in rows)}")
        return OUT_OF_TIME
    try:
        left = start_and_measure(group, rows, phase)
    except DeviceLost as lost:
        phase.clock.log(f"the device is lost; a new process continues: {lost}")
        return DEVICE_LOST
    except Exception as error:  # the engine does not start or cannot continue: each row reports it
        traceback.print_exception(error)
        for row in group.select_rows(phase.only, phase.report.has):
            phase.report.add(row.name, {"error": format_error(error)})
            phase.clock.log(f"{row.name}: {error}")
        return FAILED
    if left:
        phase.clock.log(f"not reached: {', '.join(left)}")
        return OUT_OF_TIME
    return FAILED if any("error" in phase.report.rows[row.name] for row in rows) else DONE


def start_and_measure(group: Group, rows: list[EngineRow], phase: Phase) -> list[str]:
    """Start the engine and measure; return the names of rows without remaining time."""
    memory = {"gpu_memory_utilization": phase.rest.gpu_memory_utilization}
    if group.resizes:
        memory = {"gpu_memory_utilization": RESIZE_START, "gpu_memory_utilization_cap": RESIZE_CAP}
    phase.report.begin(rows[0].name, seconds=phase.clock.seconds_for(START_SECONDS))
    with running_engine(group.shape, **memory) as engine:
        phase.clock.log(f"engine {group.shape.name} is ready after {seconds_since_start():.0f} s")
        phase.report.drop_running()  # only the start was begun: no row fails if no time is left
        return measure_rows(engine, rows, phase)


if __name__ == "__main__":
    sys.exit(main())
