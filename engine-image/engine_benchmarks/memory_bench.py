"""Memory growth of a server: resident memory of its processes over a mix of requests.

A real `trimtab-engine serve` gets requests of every kind, a few at a time: complete and streamed responses, streams
whose client disconnects, grammars (each one different, so that their cache must be bounded), log-probabilities, shared
prefixes, chats, stop strings, rejected requests. After every EVERY requests, when none runs, the resident memory of the
API server and of the engine core is read. Growth is the slope of a line through the points after the first third: until
then caches fill, and every KV block is written for the first time.

    nice -n 10 python -m engine_benchmarks.memory_bench MODEL --requests 600
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
from trimtab_engine.bench.local_server import SERVED_NAME, LocalServer, end_on_sigterm, local_server

EVERY = 50  # requests between two readings
AT_ONCE = 4
OUTPUT_TOKENS = 16
WORDS = ("sea", "ship", "storm", "crew", "map", "island", "rope", "lamp", "salt", "harbour")
SHARED = "You are the keeper of a lighthouse, and you write down what you see, hour by hour. " * 4
FLAGS = (
    *("--device", "cpu", "--device-memory-bytes", "4Gi", "--max-model-len", "512", "--num-gpu-blocks-override", "128"),
    *("--max-num-seqs", str(AT_ONCE), "--max-num-batched-tokens", "256", "--log-level", "warning"),
)
Body = dict[str, Any]


@dataclass(slots=True)
class Growth:
    """Resident anonymous memory in KiB, of each process by name, after each number of requests."""

    requests: list[int] = field(default_factory=list)
    resident_kib: dict[str, list[int]] = field(default_factory=dict)
    answers: dict[str, int] = field(default_factory=dict)
    """Number of requests of each kind by outcome."""

    def slope(self, name: str) -> float:
        """Return KiB per request, from the points after the first third."""
        first = len(self.requests) // 3
        return statistics.linear_regression(self.requests[first:], self.resident_kib[name][first:]).slope


def make_request(number: int) -> tuple[str, str, Body]:
    """Return the kind, path and body of a request. The same number gives the same request."""
    dice = random.Random(number)
    prompt = " ".join(dice.choices(WORDS, k=dice.randint(3, 60)))
    body: Body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "seed": number}
    schema = {"type": "object", "properties": {f"{dice.choice(WORDS)}_{number}": {"type": "integer"}}}
    answer_format = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    messages = [{"role": "user", "content": prompt}]
    kinds: dict[str, tuple[str, Body]] = {
        "whole": ("completions", {}),
        "stream": ("completions", {"stream": True, "ignore_eos": True}),
        "abandoned": ("completions", {"stream": True, "ignore_eos": True, "max_tokens": 200}),
        "grammar": ("completions", {"response_format": answer_format}),
        "logprobs": ("completions", {"logprobs": 5, "prompt_logprobs": 3}),
        "prefix": ("completions", {"prompt": SHARED + prompt}),
        "chat": ("chat/completions", {"messages": messages, "top_p": 0.9, "frequency_penalty": 0.5}),
        "stops": ("completions", {"stop": [dice.choice(WORDS), "\n"], "n": 2}),
        "refused": ("completions", {"max_tokens": 10**6}),
    }
    kind = dice.choice(list(kinds))
    path, more = kinds[kind]
    if path == "chat/completions":
        del body["prompt"]
    return kind, f"/v1/{path}", body | more


async def _send(session: aiohttp.ClientSession, server: LocalServer, number: int) -> str:
    """Return the outcome of a request, with its kind."""
    kind, path, body = make_request(number)
    async with session.post(server.url + path, json=body) as answer:
        if kind == "abandoned":
            await answer.content.readline()
            answer.close()
            return f"{kind} {answer.status}"
        await answer.read()
        return f"{kind} {answer.status}"


async def measure(model: str, num_requests: int, flags: Sequence[str] = FLAGS) -> Growth:
    """Start a server, send the requests, and stop it."""
    growth, counted = Growth(), Counter[str]()
    async with local_server(model, flags) as server, aiohttp.ClientSession() as session:
        slots = asyncio.Semaphore(AT_ONCE)

        async def send(number: int) -> None:
            async with slots:
                counted[await _send(session, server, number)] += 1

        for sent in range(0, num_requests, EVERY):
            await asyncio.gather(*(send(number) for number in range(sent, min(sent + EVERY, num_requests))))
            await _until_idle(server)
            growth.requests.append(min(sent + EVERY, num_requests))
            for name, size in server.resident_kib().items():
                growth.resident_kib.setdefault(name, []).append(size)
            print(f"{growth.requests[-1]} requests: {_last(growth)}", file=sys.stderr, flush=True)
    growth.answers = dict(sorted(counted.items()))
    return growth


async def _until_idle(server: LocalServer) -> None:
    """Wait until the server is idle: abandoned requests end a step later."""
    while True:
        if not (await server.get("/admin/v1/memory"))["kv"]["blocks_used"]:
            return
        await asyncio.sleep(0.05)


def _last(growth: Growth) -> str:
    return ", ".join(f"{name} {sizes[-1] / 1024:.1f} MiB" for name, sizes in growth.resident_kib.items())


def table(growth: Growth) -> str:
    """Return a row for each reading, then the slopes."""
    names = list(growth.resident_kib)
    rows = [f"| requests | {' | '.join(f'{name}, MiB' for name in names)} |", "| --- |" + " --- |" * len(names)]
    for index, number in enumerate(growth.requests):
        sizes = (f"{growth.resident_kib[name][index] / 1024:.1f}" for name in names)
        rows.append(f"| {number} | {' | '.join(sizes)} |")
    slopes = " | ".join(f"{growth.slope(name):+.2f}" for name in names)
    rows.append(f"| KiB per request after the first third | {slopes} |")
    ended = ", ".join(f"{what}: {count}" for what, count in growth.answers.items())
    return "\n".join([*rows, "", f"Answers: {ended}"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="memory_bench", description="Measure the memory growth of a server.")
    parser.add_argument("model", help="folder with safetensors and a tokenizer")
    parser.add_argument("--requests", type=int, default=600, metavar="N", help=f"{6 * EVERY} or more (default: 600)")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args(arguments)
    if options.requests < 6 * EVERY:  # a line through fewer than four points after the first third is meaningless
        parser.error(f"--requests is {options.requests}; at least {6 * EVERY} are needed for a slope")
    end_on_sigterm()
    growth = asyncio.run(measure(options.model, options.requests))
    slopes = {name: growth.slope(name) for name in growth.resident_kib}
    print(json.dumps(asdict(growth) | {"slopes": slopes}, indent=1) if options.output == "json" else table(growth))
    return 0


if __name__ == "__main__":
    sys.exit(main())
