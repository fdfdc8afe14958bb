"""Effect of each scheduling and memory mechanism on client latencies: one real server per question, reconfigured live
between rounds, with the same load each time. Rounds alternate, so that other work on the machine favours no setting;
the servers' processor time is reported in addition to latencies, because other work hardly changes it.

    python -m engine_benchmarks.mechanism_bench MODEL chunked-prefill | prefix-caching | preemption | resize
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from trimtab_engine.bench.local_server import SERVED_NAME, LocalServer, end_on_sigterm, local_server
from trimtab_engine.bench.serving.arrivals import arrival_times
from trimtab_engine.bench.serving.client import RequestResult, Target
from trimtab_engine.bench.serving.load import Load, Outcome, run_load
from trimtab_engine.bench.serving.samples import (
    RandomLengths,
    Sample,
    Words,
    prefix_repetition_samples,
    random_samples,
)
from trimtab_engine.bench.serving.server import counter_changes, counters
from trimtab_engine.bench.serving.statistics import Goodput, chunk_times, summarize

from engine_benchmarks.output import write_text

ROUNDS = 3
PERCENTILES = (50.0, 95.0, 99.0)
Row = dict[str, Any]
FIGURES = ("p50_ttft_ms", "p95_ttft_ms", "p50_itl_ms", "p95_itl_ms", "p99_itl_ms", "output_throughput", "duration")


def load_of(server: LocalServer, samples: Sequence[Sample], *, rate: float, seed: int = 0) -> Load:
    """Return a load of these samples at this rate (infinite: all at once), greedy, with full output lengths."""
    return Load(
        samples=samples,
        times=arrival_times(len(samples), rate=rate, burstiness=1.0, seed=seed),
        target=Target(f"{server.url}/v1/completions", {"Content-Type": "application/json"}),
        body={"model": SERVED_NAME, "temperature": 0, "ignore_eos": True},
    )


async def measured(server: LocalServer, load: Load) -> Row:
    """Run one load.

    Raises:
        RuntimeError: a request failed, so the figures would belong to another load.
    """
    before, cpu = await counters(server.url, {}), server.cpu_seconds()
    outcome = await run_load(load, lambda result: None)
    cpu = server.cpu_seconds() - cpu
    if len(outcome.complete) != len(load.samples):
        raise RuntimeError(f"requests failed: {[one.error for one in outcome.results if one.error][:3]}")
    figures = summarize(outcome, metrics=["ttft", "itl", "e2el"], percentiles=PERCENTILES, goodput=Goodput({}))
    row = {name: figures[name] for name in FIGURES} | {"server_cpu_seconds": cpu}
    return row | counter_changes(before, await counters(server.url, {}))


async def compare(
    server: LocalServer, name: str, settings: Sequence[Any], load: Callable[[int], Load], rounds: int
) -> list[Row]:
    """Compare settings of the live field `name`, in turns. Returns per setting the medians over the rounds, and every
    round's figures under `rounds`.
    """
    seen: dict[Any, list[Row]] = {setting: [] for setting in settings}
    for number in range(rounds):
        for setting in settings:
            await server.patch(**{name: setting})
            seen[setting].append(await measured(server, load(number)))
            print(f"[mechanism] {name}={setting}: {seen[setting][-1]}", file=sys.stderr, flush=True)
    return [{name: setting, **medians(runs), "rounds": runs} for setting, runs in seen.items()]


def medians(runs: Sequence[Row]) -> Row:
    return {name: statistics.median(run.get(name, 0) for run in runs) for name in runs[0]}


# --- chunked prefill: the guide's three pieces of advice ----------------------------------------------------------


async def chunked_prefill(model: str, rounds: int) -> Row:
    """Send long prompts while others decode. Small budgets should improve ITL, large ones TTFT; requests submitted at
    once show the budget's effect on throughput.
    """
    budgets = (64, 256, 1024)
    flags = ("--device", "cpu", "--max-model-len", "2048", "--num-gpu-blocks-override", "1000", "--max-num-seqs", "32")
    words = Words(None, seed=1)
    mixed = random_samples(8, RandomLengths(400, 20, range_ratio=0.2), words)
    at_once = random_samples(12, RandomLengths(128, 12), words)
    more = ("--max-num-batched-tokens", "1024", "--no-enable-prefix-caching")
    async with local_server(model, (*flags, *more)) as server:
        rate = await sustainable_rate(server, mixed)
        online = await compare(
            server, "max_num_batched_tokens", budgets, lambda n: load_of(server, mixed, rate=rate, seed=n), rounds
        )
        offline = await compare(
            server, "max_num_batched_tokens", budgets, lambda n: load_of(server, at_once, rate=float("inf")), rounds
        )
    return {"rate": rate, "online": online, "offline": offline}


async def sustainable_rate(server: LocalServer, samples: Sequence[Sample]) -> float:
    """Return the requests per second at 0.6 of the server's maximum: busy, without a growing queue."""
    everything = await measured(server, load_of(server, samples, rate=float("inf")))
    return 0.6 * len(samples) / float(everything["duration"])


# --- prefix caching -----------------------------------------------------------------------------------------------


async def prefix_caching(model: str, rounds: int) -> Row:
    """Send many short questions after two long prefixes, with the cache on and off."""
    flags = ("--device", "cpu", "--max-model-len", "2048", "--num-gpu-blocks-override", "1500", "--max-num-seqs", "16")

    async with local_server(model, (*flags, "--max-num-batched-tokens", "512")) as server:

        def load(number: int) -> Load:
            """Return a load whose prefixes are new in each round."""
            samples = prefix_repetition_samples(
                12, prefix_len=256, suffix_len=16, num_prefixes=2, output_len=8, words=Words(None, seed=number)
            )
            return load_of(server, samples, rate=float("inf"))

        rows = await compare(server, "enable_prefix_caching", (False, True), load, rounds)
    off, on = rows
    return {"rows": rows, "cpu_time_saved": off["server_cpu_seconds"] / on["server_cpu_seconds"]}


# --- preemption: recompute, swap, auto ----------------------------------------------------------------------------

PREEMPTION_LOADS = {
    "long prompts": RandomLengths(250, 130, range_ratio=0.2),
}


async def preemption(model: str, rounds: int) -> Row:
    """Send more requests than the KV cache has room for, so that running ones are preempted, in each mode."""
    flags = ("--device", "cpu", "--max-model-len", "1024", "--num-gpu-blocks-override", "128", "--max-num-seqs", "16")
    more = ("--max-num-batched-tokens", "256", "--no-enable-prefix-caching", "--preemption-mode", "auto")
    result: Row = {}
    async with local_server(model, (*flags, *more, "--swap-space", "512Mi")) as server:
        for name, lengths in PREEMPTION_LOADS.items():
            samples = random_samples(8, lengths, Words(None, seed=5))
            result[name] = await compare(
                server,
                "preemption_mode",
                ("recompute", "swap", "auto"),
                lambda n, samples=samples: load_of(server, samples, rate=float("inf")),  # type: ignore[misc]  # bound here
                rounds,
            )
            recompute, swap, auto = (row["server_cpu_seconds"] for row in result[name])
            result[f"{name}: auto over the better"] = auto / min(recompute, swap)
    return result


# --- resizing the KV cache under load -----------------------------------------------------------------------------


async def resize(model: str, rounds: int) -> Row:
    """Shrink the KV cache to half and grow it again while streams decode: the longest gap between two tokens of any
    stream, compared with the longest one without a resize.
    """
    flags = ("--device", "cpu", "--max-model-len", "512", "--max-num-seqs", "16", "--max-num-batched-tokens", "256")
    more = ("--device-memory-bytes", "1600Mi", "--gpu-memory-utilization", "0.95")
    samples = random_samples(6, RandomLengths(64, 100), Words(None, seed=3))
    rows: dict[str, list[Row]] = {"quiet": [], "resized": []}
    async with local_server(model, (*flags, *more)) as server:
        high, low = 0.95, await _half_of(server, 0.95)
        for _ in range(rounds):
            for name in rows:
                rows[name].append(await _resized(server, samples, low, high, resizes=name == "resized"))
                print(f"[mechanism] {name}: {rows[name][-1]}", file=sys.stderr, flush=True)
    return {
        "utilization": [high, low],
        "rows": [{"load": name, **medians(runs), "rounds": runs} for name, runs in rows.items()],
    }


async def _half_of(server: LocalServer, high: float) -> float:
    """Return the utilization at which the KV cache has half its blocks."""
    memory = await server.get("/admin/v1/memory")
    kv_bytes = memory["kv"]["blocks_total"] * memory["kv"]["bytes_per_block"]
    return round(high - float(kv_bytes / 2 / memory["device_bytes"]), 4)


async def _resized(server: LocalServer, samples: Sequence[Sample], low: float, high: float, *, resizes: bool) -> Row:
    before = await counters(server.url, {})
    run = asyncio.create_task(run_load(load_of(server, samples, rate=float("inf")), lambda result: None))
    patches: list[float] = []
    number = 0
    while not run.done():
        await asyncio.wait({run}, timeout=1.5)
        if resizes and not run.done():
            number += 1
            patches.append(await server.patch(gpu_memory_utilization=low if number % 2 else high))
    await server.patch(gpu_memory_utilization=high)
    outcome = await run
    gaps = decode_gaps(outcome)
    return {
        "longest_gap_ms": 1000 * max(gaps),
        "p99_gap_ms": 1000 * sorted(gaps)[int(0.99 * len(gaps))],
        "median_gap_ms": 1000 * statistics.median(gaps),
        "longest_patch_ms": 1000 * max(patches, default=0.0),
        "resizes": len(patches),
        "failed": len(samples) - len(outcome.complete),
        **counter_changes(before, await counters(server.url, {})),
    }


def decode_gaps(outcome: Outcome) -> list[float]:
    """Return the gaps between tokens once every request has its first one: earlier gaps include other requests'
    prompts.
    """

    def first_token(result: RequestResult) -> float:
        return result.start_time + result.ttft

    begin = max(first_token(result) for result in outcome.complete)
    return [
        gap
        for result in outcome.complete
        for moment, gap in zip(chunk_times(result)[1:], result.itl, strict=True)
        if moment - gap >= begin
    ]


MECHANISMS: dict[str, Callable[[str, int], Awaitable[Row]]] = {
    "chunked-prefill": chunked_prefill,
    "prefix-caching": prefix_caching,
    "preemption": preemption,
    "resize": resize,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="mechanism_bench", description="Measure the effect of one mechanism on client latencies."
    )
    parser.add_argument("model", help="folder with safetensors and a tokenizer")
    parser.add_argument("mechanism", choices=MECHANISMS)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    parser.add_argument("--output", type=Path, help="folder for MECHANISM.json")
    options = parser.parse_args(arguments)
    end_on_sigterm()

    async def run() -> Row:
        return await MECHANISMS[options.mechanism](options.model, options.rounds)

    result = asyncio.run(run())
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        write_text(options.output / f"{options.mechanism}.json", text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
