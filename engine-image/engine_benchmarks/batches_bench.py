"""Batches under kills, and next to interactive requests (docs/results/batches.md).

Kills: a batch runs while the engine is killed; each line must be answered once. Mixed: interactive requests arrive at
a fixed rate, alternately with and without a running batch.

    python -m engine_benchmarks.batches_bench MODEL --output docs/results
"""

import argparse
import asyncio
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import aiohttp
from trimtab_engine.bench.local_server import SERVED_NAME, end_on_sigterm, local_server

from engine_benchmarks.output import write_text

NUM_LINES, NUM_KILLS, KILL_AFTER_SECONDS = 1000, 3, 6.0
NUM_PAIRS, PHASE_SECONDS, RATE = 6, 16.0, 0.5  # phases with and without a batch; interactive requests per second
PROMPT_WORDS, OUTPUT_TOKENS = 100, 8  # of an interactive request
LINE_WORDS, LINE_OUTPUT_TOKENS = 10, 8  # of a line
TARGET_RATIO = 1.1
FLAGS = (
    *("--device", "cpu", "--max-model-len", "1024", "--num-gpu-blocks-override", "600", "--max-num-seqs", "16"),
    *("--max-num-batched-tokens", "512", "--scheduling-policy", "priority"),
)
WORDS = ("ship", "wind", "keel", "trim", "tack", "reef", "helm", "mast", "sail", "buoy", "port", "lee")

Json = dict[str, Any]


@dataclass(slots=True)
class Engine:
    """A server with a batch directory."""

    url: str
    pid: int
    session: aiohttp.ClientSession

    async def create(self, num_lines: int) -> str:
        """Return the ID of a new batch."""
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(map(json.dumps, map(_line, range(num_lines)))).encode(), filename="in.jsonl")
        async with self.session.post(f"{self.url}/v1/files", data=form) as response:
            file_id = (await response.json())["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        async with self.session.post(f"{self.url}/v1/batches", json=body) as response:
            batch_id: str = (await response.json())["id"]
        return batch_id

    async def batch(self, batch_id: str) -> Json:
        async with self.session.get(f"{self.url}/v1/batches/{batch_id}") as response:
            batch: Json = await response.json()
        return batch

    async def wait(self, batch_id: str) -> Json:
        while True:
            batch = await self.batch(batch_id)
            if batch["status"] in ("completed", "cancelled", "failed"):
                return batch
            await asyncio.sleep(0.1)

    async def cancel(self, batch_id: str) -> Json:
        async with self.session.post(f"{self.url}/v1/batches/{batch_id}/cancel"):
            return await self.wait(batch_id)

    async def answers(self, file_id: str) -> list[str]:
        """Return the custom IDs of an output file."""
        async with self.session.get(f"{self.url}/v1/files/{file_id}/content") as response:
            return [json.loads(line)["custom_id"] for line in (await response.text()).splitlines()]

    async def ttft(self, prompt: str) -> float:
        """Return the seconds until the first token of an interactive request, and wait for its last."""
        body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "stream": True, "ignore_eos": True}
        began, first = time.perf_counter(), 0.0
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for _ in response.content:
                first = first or time.perf_counter() - began
        return first


def _text(number: int, num_words: int) -> str:
    return " ".join(random.Random(number).choices(WORDS, k=num_words))


def _line(number: int) -> Json:
    body = {"model": SERVED_NAME, "prompt": _text(number, LINE_WORDS), "max_tokens": LINE_OUTPUT_TOKENS}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}


@asynccontextmanager
async def _engine(model: str, folder: Path) -> AsyncIterator[Engine]:
    async with (
        local_server(model, [*FLAGS, "--batch-dir", str(folder)], folder.with_suffix(".log")) as server,
        aiohttp.ClientSession() as session,
    ):
        yield Engine(server.url, server.pid, session)


async def kills(model: str, folder: Path) -> tuple[int, int, list[int], float]:
    """Return the answers in the output file, of how many lines, the answers found after each kill, and the seconds."""
    began, batch_id, found = time.perf_counter(), "", list[int]()
    for _ in range(NUM_KILLS):
        async with _engine(model, folder) as engine:
            batch_id = batch_id or await engine.create(NUM_LINES)
            await asyncio.sleep(KILL_AFTER_SECONDS)
            os.kill(engine.pid, signal.SIGKILL)
        found.append((folder / "batches" / f"{batch_id}.output").read_bytes().count(b"\n"))
    async with _engine(model, folder) as engine:
        batch = await engine.wait(batch_id)
        answers = await engine.answers(batch["output_file_id"])
    return len(answers), len(set(answers)), found, time.perf_counter() - began


@dataclass(slots=True)
class MixedTimes:
    """Seconds to the first token, without and with a batch, and the answered lines of batches."""

    without: list[float] = field(default_factory=list)
    mixed: list[float] = field(default_factory=list)
    num_lines: int = 0

    @staticmethod
    def p95(values: list[float]) -> float:
        return quantiles(values, n=20, method="inclusive")[-1]


async def mix(model: str, folder: Path) -> MixedTimes:
    found, number = MixedTimes(), 10**6
    async with _engine(model, folder) as engine:
        await engine.ttft(_text(number, PROMPT_WORDS))
        for _ in range(NUM_PAIRS):
            for times in (found.without, found.mixed):
                batch_id = await engine.create(NUM_LINES) if times is found.mixed else None
                requests = []
                for _ in range(round(RATE * PHASE_SECONDS)):
                    number += 1
                    requests.append(asyncio.create_task(engine.ttft(_text(number, PROMPT_WORDS))))
                    await asyncio.sleep(1 / RATE)
                times.extend(await asyncio.gather(*requests))
                if batch_id is not None:
                    found.num_lines += (await engine.cancel(batch_id))["request_counts"]["completed"]
    return found


def page(killed: tuple[int, int, list[int], float], found: MixedTimes) -> str:
    num_answers, num_different, after_kills, seconds = killed
    without, with_batch = found.p95(found.without), found.p95(found.mixed)
    medians = [quantiles(values, n=2)[0] for values in (found.without, found.mixed)]
    return f"""# Batches

Batches of `POST /v1/batches` ([guide](../guides/batches.md)) with SmolLM2-135M-Instruct on a shared machine with two
CPU cores. Lines have about {LINE_WORDS} prompt tokens and {LINE_OUTPUT_TOKENS} output tokens, interactive requests
about {PROMPT_WORDS} and {OUTPUT_TOKENS}.

| measured | figure | bar |
| --- | --- | --- |
| answers of {NUM_LINES} lines with {NUM_KILLS} × SIGKILL | {num_answers}, {num_different} different | each line once |
| answers found after each kill | {", ".join(map(str, after_kills))} | |
| seconds for the batch, with restarts | {seconds:.0f} | |
| interactive TTFT p50: alone, with a batch | {medians[0] * 1000:.0f} ms, {medians[1] * 1000:.0f} ms | |
| interactive TTFT p95: alone, with a batch | {without * 1000:.0f} ms, {with_batch * 1000:.0f} ms | |
| ratio of p95 | {with_batch / without:.2f} | ≤ {TARGET_RATIO} |
| lines answered next to {len(found.mixed)} interactive requests | {found.num_lines} | |

Interactive requests arrive at {RATE:g} per second, in {NUM_PAIRS} pairs of {PHASE_SECONDS:g} s, without and with a
batch.

```bash
PYTHONPATH=engine-image:modelspec python -m engine_benchmarks.batches_bench "$(make -s model)" --output docs/results
```
"""


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--output", type=Path, help="folder of the page (default: print it)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        killed = asyncio.run(kills(arguments.model, Path(folder) / "kills"))
        print(killed, flush=True)
        found = asyncio.run(mix(arguments.model, Path(folder) / "mixed"))
    text = page(killed, found)
    print(text)
    if arguments.output is not None:
        write_text(arguments.output / "batches.md", text)


if __name__ == "__main__":
    main()
