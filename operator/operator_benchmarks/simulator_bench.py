"""The simulator beside the engine that it simulates: `python -m operator_benchmarks.simulator_bench MODEL`.

For each of three configurations, one of which preempts, a real CPU engine serves a load between two others (other
lengths, other arrivals). While it serves those two, its own sums per kind of step are read, and step times are fitted
to them; the simulator replays the arrivals of the load between with the fitted times, and nothing of that one is used
for the fit. What else runs on the machine is in the engine's times and not in the simulator's: it must be idle. The
load that preempts is a burst, twice what the engine holds: nearer to saturation a step time that is 2 % off changes
the 95th percentile of first tokens by up to 40 %, by the simulator itself.
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
from engine_benchmarks.output import written
from prometheus_client.parser import text_string_to_metric_families
from trimtab_engine.bench.local_server import LocalServer, end_on_sigterm, local_server
from trimtab_engine.bench.serving.load import Load
from trimtab_engine.bench.serving.samples import RandomLengths, Words, random_samples
from trimtab_operator.tuner.parameters import Parameter
from trimtab_simulator.contest import Contest
from trimtab_simulator.objectives import Objectives
from trimtab_simulator.plant.fleet import FleetSettings
from trimtab_simulator.plant.machine import START_UTILIZATION, Machine, machine_of
from trimtab_simulator.replay import Loop
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
    """One configuration of the engine, and its load. `share` is how much of what it could take at once arrives."""

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

    def off_by(self, figure: str) -> float:
        """How far the simulated figure is from the measured one, as a share of it."""
        there = self.measured[figure]
        return (self.simulated[figure] - there) / there if there else float(self.simulated[figure] > 0)


def sums_of(page: str) -> dict[str, dict[str, float]]:
    """Per kind of step the five sums of a page of metrics, over all its cores."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in SUMS:
                of = found.setdefault(sample.labels["kind"], dict.fromkeys(SUMS.values(), 0.0))
                of[SUMS[sample.name]] += sample.value
    return found


def intervals(snapshots: Sequence[dict[str, dict[str, float]]]) -> list[dict[str, float]]:
    """What each kind of step did between one look and the next, where it did something."""
    rows = []
    for before, after in pairwise(snapshots):
        for kind, sums in after.items():
            row = {name: value - before.get(kind, {}).get(name, 0.0) for name, value in sums.items()}
            if row["steps"] > 0:
                rows.append(row)
    return rows


async def watched(server: LocalServer, load: Load) -> list[dict[str, float]]:
    """Serve the load, and read the sums meanwhile."""
    snapshots = [sums_of(await server.metrics())]
    run = asyncio.create_task(measured(server, load))
    while not run.done():
        await asyncio.wait([run], timeout=SCRAPE_SECONDS)
        snapshots.append(sums_of(await server.metrics()))
    run.result()
    return intervals(snapshots)


def fitted(setting: Setting, rows: list[dict[str, float]]) -> Machine:
    """The machine as `trimtab simulate --calibration` reads it."""
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
    """The same arrivals, replayed."""
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
    contest = Contest(trace, FleetSettings(machine, parameters, 1, 1, 1, 0.0), Loop(), Objectives(ttft=3600.0))
    judged = contest.judge("static", contest.play_fixed())
    assert judged.ttft_p95 is not None
    assert judged.itl_token_p95 is not None
    return {
        "throughput": judged.throughput_tokens_per_s,
        "ttft_p95": judged.ttft_p95,
        "itl_p95": judged.itl_token_p95,
        "preemptions": float(judged.preemptions),
    }


async def compared(model: str, setting: Setting, num_requests: int) -> Pair:
    """One configuration: calibrated on the loads before and after the one that is compared."""
    flags = ["--device", "cpu", "--max-model-len", str(MAX_MODEL_LEN), "--no-enable-prefix-caching"]
    flags += ["--num-gpu-blocks-override", str(setting.num_blocks), "--max-num-seqs", str(setting.max_num_seqs)]
    flags += ["--max-num-batched-tokens", str(setting.max_num_batched_tokens), "--watermark", "0"]
    flags += ["--preemption-mode", "recompute"]
    loads = [random_samples(num_requests, setting.lengths, Words(None, seed=seed)) for seed in (1, 2, 3)]
    async with local_server(model, flags) as server:
        rate = setting.share * await sustainable_rate(server, loads[0][:16])
        before, load, after = (load_of(server, samples, rate=rate, seed=1 + i) for i, samples in enumerate(loads))
        rows = await watched(server, before)
        row = await measured(server, load)
        rows += await watched(server, after)
    machine = fitted(setting, rows)
    real = {
        "throughput": row["output_throughput"],
        "ttft_p95": row["p95_ttft_ms"] / 1000,
        "itl_p95": row["p95_itl_ms"] / 1000,
        "preemptions": float(row["preemptions"]),
    }
    return Pair(setting.name, num_requests, rate, asdict(machine.cost), real, simulated(setting, machine, load))


def page(pairs: Sequence[Pair]) -> str:
    """A table of both, and how far they are apart."""
    lines = [
        "| configuration | requests | | measured | simulated | off by |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    texts = {"throughput": "tokens/s", "ttft_p95": "TTFT p95, s", "itl_p95": "ITL p95, s", "preemptions": "preemptions"}
    for pair in pairs:
        for figure in FIGURES:
            there, here = pair.measured[figure], pair.simulated[figure]
            if there or here:
                off = pair.off_by(figure)
                missed = " **missed**" if abs(off) > BAR else ""
                count = f"{pair.requests} at {pair.rate:.2f}/s"
                name = f"| {pair.setting} | {count} | {texts[figure]}"
                lines.append(f"{name} | {there:,.3g} | {here:,.3g} | {off:+.0%}{missed} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="simulator_bench", description="The simulator beside a real CPU engine.")
    parser.add_argument("model", help="folder with safetensors and a tokenizer")
    parser.add_argument("--requests", type=int, default=80, help="of each load")
    parser.add_argument("--output", type=Path, help="write the figures there, as JSON")
    options = parser.parse_args(arguments)
    end_on_sigterm()
    pairs: list[Pair] = []
    with contextlib.suppress(KeyboardInterrupt):
        for setting in SETTINGS:
            pairs.append(asyncio.run(compared(options.model, setting, options.requests)))
            print(f"[simulator] {setting.name}: {pairs[-1]}", file=sys.stderr, flush=True)
    text = page(pairs)
    if options.output is not None:
        body: dict[str, Any] = {"load_average": os.getloadavg()[1], "pairs": [asdict(pair) for pair in pairs]}
        written(options.output, json.dumps(body, indent=1) + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
