"""Comparison of the simulator with a real CPU engine: `python -m operator_benchmarks.simulator_bench MODEL`.

For each of three configurations, one of which preempts, a real engine serves a load between two others with other
lengths and arrivals. Step times are fitted to the engine's sums during those two, and the simulator replays the
arrivals of the load between them, which is not used for the fit. Other processes affect only the engine's times, so the
machine must be idle. The load that preempts is a burst of twice what the engine holds: nearer to saturation, a step
time that is 2 % off changes the 95th percentile of TTFT by up to 40 %, by the simulator itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine_benchmarks.mechanism_bench import load_of, measured, sustainable_rate
from engine_benchmarks.output import write_text
from prometheus_client.parser import text_string_to_metric_families
from trimtab_engine.bench.local_server import LocalServer, end_on_sigterm, local_server
from trimtab_engine.bench.serving.load import Load
from trimtab_engine.bench.serving.samples import RandomLengths, Words, random_samples
from trimtab_operator.tuner.parameters import Parameter
from trimtab_simulator.experiment import Experiment
from trimtab_simulator.objectives import Objectives
from trimtab_simulator.plant.fleet import FleetSettings
from trimtab_simulator.plant.machine import START_UTILIZATION, Machine, machine_of
from trimtab_simulator.replay import ReplaySettings
from trimtab_simulator.trace.arrivals import Arrival, Trace

BLOCK = 16
MAX_MODEL_LEN = 1024
SCRAPE_SECONDS = 1.0
BAR = 0.15
SUMS = {
    "trimtab_step_seconds_count": "steps",
    "trimtab_step_seconds_sum": "seconds",
    "trimtab_step_tokens_total": "tokens",
    "trimtab_step_sequences_total": "sequences",
    "trimtab_step_context_tokens_total": "context",
}
FIGURES = ("throughput", "ttft_p95", "itl_p95", "preemptions")


@dataclass(frozen=True, slots=True)
class Setting:
    """One engine configuration and its load. `share` is the arrival rate relative to the sustainable one."""

    name: str
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    lengths: RandomLengths
    share: float = 1.0


SETTINGS = (
    Setting("chat, budget 512", 16, 512, 1000, RandomLengths(200, 60, range_ratio=0.5)),
    Setting("chat, budget 64", 16, 64, 1000, RandomLengths(200, 60, range_ratio=0.5)),
    Setting("a burst into a small KV cache", 16, 256, 64, RandomLengths(120, 60, range_ratio=0.5), share=4.0),
)


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds, tokens per second and counts of one load, measured and simulated."""

    setting: str
    requests: int
    rate: float
    coefficients: dict[str, float]
    measured: dict[str, float]
    simulated: dict[str, float]

    def relative_error(self, figure: str) -> float:
        """Return the relative error of the simulated figure."""
        there = self.measured[figure]
        return (self.simulated[figure] - there) / there if there else float(self.simulated[figure] > 0)


def sums_of(page: str) -> dict[str, dict[str, float]]:
    """Return the five sums per kind of step of a metrics page, over all cores."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in SUMS:
                of = found.setdefault(sample.labels["kind"], dict.fromkeys(SUMS.values(), 0.0))
                of[SUMS[sample.name]] += sample.value
    return found


def intervals(snapshots: Sequence[dict[str, dict[str, float]]]) -> list[dict[str, float]]:
    """Return the work of each kind of step between two samples, if any."""
    rows = []
    for before, after in pairwise(snapshots):
        for kind, sums in after.items():
            row = {name: value - before.get(kind, {}).get(name, 0.0) for name, value in sums.items()}
            if row["steps"] > 0:
                rows.append(row)
    return rows


async def serve_and_scrape(server: LocalServer, load: Load) -> list[dict[str, float]]:
    """Serve the load, and read the sums meanwhile."""
    snapshots = [sums_of(await server.metrics())]
    run = asyncio.create_task(measured(server, load))
    while not run.done():
        await asyncio.wait([run], timeout=SCRAPE_SECONDS)
        snapshots.append(sums_of(await server.metrics()))
    run.result()
    return intervals(snapshots)


def fit_machine(setting: Setting, rows: list[dict[str, float]]) -> Machine:
    """Return the machine as `trimtab simulate --calibration` reads it."""
    body = {
        "steps": rows,
        "kv_tokens": setting.num_blocks * BLOCK,
        "block_size": BLOCK,
        "max_num_seqs": setting.max_num_seqs,
        "max_num_batched_tokens": setting.max_num_batched_tokens,
        "max_model_len": MAX_MODEL_LEN,
    }
    with TemporaryDirectory() as folder:
        path = Path(folder) / "calibration.json"
        path.write_text(json.dumps(body))
        return machine_of("a model", "cpu", path)


def simulated(setting: Setting, machine: Machine, load: Load) -> dict[str, float]:
    """Return the figures of the same arrivals in simulation."""
    arrivals = [
        Arrival(at, sample.prompt_len or 0, sample.output_len or 0)
        for at, sample in zip(load.times, load.samples, strict=True)
    ]
    parameters = {
        Parameter.MAX_NUM_SEQS: setting.max_num_seqs,
        Parameter.MAX_NUM_BATCHED_TOKENS: setting.max_num_batched_tokens,
        Parameter.WATERMARK: 0.0,
        Parameter.GPU_MEMORY_UTILIZATION: START_UTILIZATION,
    }
    trace = Trace(setting.name, arrivals, arrivals[-1].at + 1.0)
    experiment = Experiment(
        trace, FleetSettings(machine, parameters, 1, 1, 1, 0.0), ReplaySettings(), Objectives(ttft=3600.0)
    )
    judged = experiment.judge("static", experiment.run_fixed())
    assert judged.ttft_p95 is not None
    assert judged.itl_token_p95 is not None
    return {
        "throughput": judged.throughput_tokens_per_s,
        "ttft_p95": judged.ttft_p95,
        "itl_p95": judged.itl_token_p95,
        "preemptions": float(judged.preemptions),
    }


async def compare(model: str, setting: Setting, num_requests: int) -> Pair:
    """Measure one configuration: calibrate on the loads before and after the compared one."""
    flags = ["--device", "cpu", "--max-model-len", str(MAX_MODEL_LEN), "--no-enable-prefix-caching"]
    flags += ["--num-gpu-blocks-override", str(setting.num_blocks), "--max-num-seqs", str(setting.max_num_seqs)]
    flags += ["--max-num-batched-tokens", str(setting.max_num_batched_tokens), "--watermark", "0"]
    flags += ["--preemption-mode", "recompute"]
    loads = [random_samples(num_requests, setting.lengths, Words(None, seed=seed)) for seed in (1, 2, 3)]
    async with local_server(model, flags) as server:
        rate = setting.share * await sustainable_rate(server, loads[0][:16])
        before, load, after = (load_of(server, samples, rate=rate, seed=1 + i) for i, samples in enumerate(loads))
        rows = await serve_and_scrape(server, before)
        row = await measured(server, load)
        rows += await serve_and_scrape(server, after)
    machine = fit_machine(setting, rows)
    real = {
        "throughput": row["output_throughput"],
        "ttft_p95": row["p95_ttft_ms"] / 1000,
        "itl_p95": row["p95_itl_ms"] / 1000,
        "preemptions": float(row["preemptions"]),
    }
    return Pair(setting.name, num_requests, rate, asdict(machine.cost), real, simulated(setting, machine, load))


def page(pairs: Sequence[Pair]) -> str:
    """Return a table of measured and simulated figures and their relative errors."""
    lines = [
        "| configuration | requests | | measured | simulated | relative error |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    texts = {"throughput": "tokens/s", "ttft_p95": "TTFT p95, s", "itl_p95": "ITL p95, s", "preemptions": "preemptions"}
    for pair in pairs:
        for figure in FIGURES:
            there, here = pair.measured[figure], pair.simulated[figure]
            if there or here:
                off = pair.relative_error(figure)
                missed = " **missed**" if abs(off) > BAR else ""
                count = f"{pair.requests} at {pair.rate:.2f}/s"
                name = f"| {pair.setting} | {count} | {texts[figure]}"
                lines.append(f"{name} | {there:,.3g} | {here:,.3g} | {off:+.0%}{missed} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="simulator_bench", description="Compare the simulator with a real CPU engine."
    )
    parser.add_argument("model", help="folder with safetensors and a tokenizer")
    parser.add_argument("--requests", type=int, default=80, help="of each load")
    parser.add_argument("--output", type=Path, help="write the figures to this file, as JSON")
    options = parser.parse_args(arguments)
    end_on_sigterm()
    pairs: list[Pair] = []
    with contextlib.suppress(KeyboardInterrupt):
        for setting in SETTINGS:
            pairs.append(asyncio.run(compare(options.model, setting, options.requests)))
            print(f"[simulator] {setting.name}: {pairs[-1]}", file=sys.stderr, flush=True)
    text = page(pairs)
    if options.output is not None:
        body: dict[str, Any] = {"load_average": os.getloadavg()[1], "pairs": [asdict(pair) for pair in pairs]}
        write_text(options.output, json.dumps(body, indent=1) + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
