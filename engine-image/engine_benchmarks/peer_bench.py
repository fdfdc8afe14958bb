"""Tokens per second of two running servers on the same machine, in turns, on idle and on busy cores.

    python -m engine_benchmarks.peer_bench http://127.0.0.1:8000 http://127.0.0.1:8100 --output FILE.json

Both serve the OpenAI API and the same model. Each round sends one batch of new random prompts to the first server and
the same batch to the second one, without end-of-sequence tokens. "Busy" programs compute without end at the servers'
priority. Figures are medians over the rounds; a ratio is of one round, because the machine's speed varies.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from engine_benchmarks.output import write_text

LOADS = ((1, 128, 64), (8, 128, 64), (32, 128, 64), (4, 1024, 16))
"""Requests at once, prompt tokens, output tokens."""
TOKEN_IDS = (1000, 40_000)
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Compared:
    """Output tokens per second of every round."""

    batch: int
    prompt: int
    output: int
    busy: int
    first: list[float]
    peer: list[float]

    @property
    def ratio(self) -> float:
        """Median over the rounds of the first server's rate over the peer's."""
        return statistics.median(a / b for a, b in zip(self.first, self.peer, strict=True))

    def row(self) -> str:
        """Return the line of a Markdown table."""
        first, peer = statistics.median(self.first), statistics.median(self.peer)
        load = f"{self.batch} × {self.prompt} + {self.output}"
        return f"| {load} | {self.busy} | {first:,.1f} | {peer:,.1f} | {self.ratio:.2f} |"


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """Run `count` programs that compute without end."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


async def tokens_per_second(url: str, prompts: Sequence[Sequence[int]], num_output: int) -> float:
    """Send all prompts at once and return the output tokens per second until the last one is complete.

    Raises:
        httpx.HTTPError: a request failed.
        RuntimeError: a server returned another number of tokens.
    """
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]["id"]

        async def complete(prompt: Sequence[int]) -> None:
            body = {"model": model, "prompt": list(prompt), "max_tokens": num_output, "ignore_eos": True}
            response = await client.post("/v1/completions", json=body | {"temperature": 0})
            found = response.raise_for_status().json()["usage"]["completion_tokens"]
            if found != num_output:
                raise RuntimeError(f"{url}: {found} tokens instead of {num_output}; the rates cannot be compared")

        began = time.perf_counter()
        await asyncio.gather(*map(complete, prompts))
        return len(prompts) * num_output / (time.perf_counter() - began)


def compare(urls: tuple[str, str], load: tuple[int, int, int], busy: int, rounds: int, seed: int = 0) -> Compared:
    """Measure one load. A first round warms both servers and is not counted."""
    batch, prompt, output = load
    draw = random.Random(f"{seed} {load} {busy}")
    rates: tuple[list[float], list[float]] = ([], [])
    with busy_programs(busy):
        for number in range(rounds + 1):
            prompts = [[draw.randrange(*TOKEN_IDS) for _ in range(prompt)] for _ in range(batch)]
            for url, found in zip(urls, rates, strict=True):
                rate = asyncio.run(tokens_per_second(url, prompts, output))
                if number:
                    found.append(rate)
    return Compared(batch, prompt, output, busy, *rates)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write the figures. Return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("first", help="URL of the first server")
    parser.add_argument("peer", help="URL of the server that it is compared with")
    parser.add_argument(
        "--busy", type=int, nargs="+", default=[0, 1, 2], help="numbers of busy programs (default: 0 1 2)"
    )
    parser.add_argument("--loads", type=int, nargs="+", default=range(len(LOADS)), help=f"indices into {LOADS}")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are counted (default: 5)")
    parser.add_argument("--output", type=Path, help="JSON file for the rates of every round")
    options = parser.parse_args(arguments)
    print("| requests × prompt + output | busy programs | tokens/s | peer | ratio |\n| --- | --- | --- | --- | --- |")
    found = []
    for busy in options.busy:
        for index in options.loads:
            found.append(compare((options.first, options.peer), LOADS[index], busy, options.rounds))
            print(found[-1].row(), flush=True)
    if options.output is not None:
        write_text(options.output, json.dumps([asdict(one) for one in found], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
