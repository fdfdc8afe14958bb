"""First tokens within the TTFT target under overload: `fcfs` compared with `deadline` scheduling.

Two servers on this machine, with one thread each, so that other work affects both equally. Each round first measures
their current capacity with requests submitted at once. An open loop of Poisson arrivals above that capacity follows:
the same requests at the same times to both, one with each policy; the next round swaps the policies. Waits are measured
by the client up to the first token. All requests are served to their end, so late ones show what patient users see.

    python -m engine_benchmarks.deadline_bench MODEL --load 1.5 --seconds 60 --rounds 5
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

from trimtab_engine.bench.local_server import SERVED_NAME, LocalServer, end_on_sigterm, local_server
from trimtab_engine.bench.serving.arrivals import arrival_times
from trimtab_engine.bench.serving.client import RequestResult, Target
from trimtab_engine.bench.serving.load import Load, Outcome, run_load
from trimtab_engine.bench.serving.samples import Sample, Words
from trimtab_engine.text.tokenizer import Tokenizer

ORDERS = ("fcfs", "deadline")
MAX_NUM_SEQS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 32, 16
FULL_BATCHES = 3  # number of times all sequence slots are refilled to measure the capacity
CAPACITY_SEED = 1000
DEVICE = "1500Mi"
LATE_METRIC = "trimtab_requests_late_total"


@dataclass(frozen=True, slots=True)
class Figures:
    """One run, or medians over several. Fractions of all requests; waits for first tokens, in seconds."""

    requests: float
    in_time: float
    in_time_of_last_half: float
    """Requests in the second half of the run, when the queue is longest."""
    wait_median: float
    wait_p95: float
    wait_longest: float
    late_wait_median: float
    """Median wait of late requests; 0 if there are none."""
    said_late: float
    """Number of requests that the engine counted as late in its queue."""
    failed: float
    overload: float
    """Seconds until all requests were completed divided by seconds of arrivals: the overload factor."""


def figures(outcome: Outcome, *, seconds: float, target: float, said_late: float) -> Figures:
    """Compute figures of `seconds` of arrivals. A failed request counts as late.

    Raises:
        RuntimeError: all requests failed.
    """
    results = outcome.results
    waits = sorted(result.ttft for result in results if result.success)
    if not waits:
        raise RuntimeError(f"no request was answered: {results[0].error}")
    late = [wait for wait in waits if wait > target]
    return Figures(
        requests=len(results),
        in_time=_share_in_time(results, target),
        in_time_of_last_half=_share_in_time(results[len(results) // 2 :], target),
        wait_median=statistics.median(waits),
        wait_p95=waits[int(0.95 * (len(waits) - 1))],
        wait_longest=waits[-1],
        late_wait_median=statistics.median(late) if late else 0.0,
        said_late=said_late,
        failed=len(results) - len(waits),
        overload=outcome.duration / seconds,
    )


def _share_in_time(results: Sequence[RequestResult], target: float) -> float:
    return sum(result.success and result.ttft <= target for result in results) / len(results)


def medians(runs: Sequence[Figures]) -> Figures:
    """Return the median of each figure separately."""
    return Figures(*(statistics.median(getattr(run, field.name) for run in runs) for field in fields(Figures)))


def said_late(page: str) -> float:
    """Return the counter in a page of metrics, summed over all engine cores."""
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(LATE_METRIC + "{"))


async def _sent(server: LocalServer, samples: Sequence[Sample], times: Sequence[float]) -> Outcome:
    target = Target(f"{server.url}/v1/completions", {"Content-Type": "application/json"})
    body = {"model": SERVED_NAME, "temperature": 0.0, "ignore_eos": True}
    return await run_load(Load(samples, times, target, body), lambda result: None)


def _samples(words: Words, count: int) -> list[Sample]:
    return [Sample(words.draw(PROMPT_TOKENS), PROMPT_TOKENS, OUTPUT_TOKENS) for _ in range(count)]


async def capacity(server: LocalServer, tokenizer: Tokenizer) -> float:
    """Return the requests per second with all sequence slots in use."""
    count = FULL_BATCHES * MAX_NUM_SEQS
    outcome = await _sent(server, _samples(Words(tokenizer, CAPACITY_SEED), count), [0.0] * count)
    return count / outcome.duration


async def one_run(
    server: LocalServer, order: str, *, tokenizer: Tokenizer, rate: float, seconds: float, target: float, seed: int
) -> Figures:
    """Run the load of this seed with this policy until all of it is completed."""
    await server.patch(scheduling_policy=order)
    before = said_late(await server.metrics())
    count = max(2, round(rate * seconds))
    times = arrival_times(count, rate=rate, burstiness=1.0, seed=seed)
    outcome = await _sent(server, _samples(Words(tokenizer, seed), count), times)
    late = said_late(await server.metrics()) - before
    return figures(outcome, seconds=seconds, target=target, said_late=late)


async def measure(
    model: str, flags: Sequence[str] = (), *, load: float, seconds: float, target: float, rounds: int
) -> dict[str, Any]:
    """Return medians and runs by policy. A round's rate is `load` times a server's capacity while the other one is
    loaded too.
    """
    runs: dict[str, list[Figures]] = {order: [] for order in ORDERS}
    at_most: list[float] = []
    tokenizer = Tokenizer(model)
    knobs = ["--max-num-seqs", str(MAX_NUM_SEQS), "--max-model-len", "256", "--no-enable-prefix-caching"]
    knobs += ["--device", "cpu", "--cpu-threads", "1", "--device-memory-bytes", DEVICE, "--ttft-target", str(target)]
    async with local_server(model, [*knobs, *flags]) as one, local_server(model, [*knobs, *flags]) as other:
        for seed in range(rounds):
            at_most.append(await _measure_capacity((one, other), tokenizer))
            orders = ORDERS if seed % 2 == 0 else ORDERS[::-1]
            load_of_round = partial(
                one_run, tokenizer=tokenizer, rate=load * at_most[-1], seconds=seconds, target=target, seed=seed
            )
            both = await asyncio.gather(load_of_round(one, orders[0]), load_of_round(other, orders[1]))
            for order, run in zip(orders, both, strict=True):
                runs[order].append(run)
                print(
                    f"[deadline] round {seed}, {load * at_most[-1]:.2f}/s, {order}: {run}", file=sys.stderr, flush=True
                )
    return {
        "requests_per_second_at_most": at_most,
        "load": load,
        "seconds": seconds,
        "ttft_target": target,
        "medians": {order: asdict(medians(of_order)) for order, of_order in runs.items()},
        "runs": {order: [asdict(run) for run in of_order] for order, of_order in runs.items()},
    }


async def _measure_capacity(servers: Sequence[LocalServer], tokenizer: Tokenizer) -> float:
    """Return the slower server's capacity, measured the second time: the first one warms up."""
    for _ in range(2):
        rates = await asyncio.gather(*(capacity(server, tokenizer) for server in servers))
    return min(rates)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="deadline_bench", description="First tokens in time under an overload.")
    parser.add_argument("model", help="folder with safetensors and a tokenizer")
    parser.add_argument(
        "--load", type=float, default=1.5, help="arrival rate as a multiple of the capacity (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals (default: %(default)s)")
    parser.add_argument("--target", type=float, default=2.0, help="seconds to a first token (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="both orders each (default: %(default)s)")
    options = parser.parse_args(arguments)
    end_on_sigterm()
    result = asyncio.run(
        measure(
            options.model,
            load=options.load,
            seconds=options.seconds,
            target=options.target,
            rounds=options.rounds,
        )
    )
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
