"""Time to first token of real CPU engines: through the router, and as a plain Service would spread the requests.

    python -m router_benchmarks.real_engines --model /path/to/SmolLM2 --engines 3

A plain Service chooses a replica for each connection at random, so the comparison sends each request to a random
engine. Both get the same requests at the same times, in alternating blocks; caches are reset before each block. Other
load on the machine affects both alike.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import http.client
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

REPOSITORY = Path(__file__).parents[2]
START_SECONDS = 240.0
RESET_PATH = "/admin/v1/reset_prefix_cache"
ACCESS = "benchmark"
"""Token of all admin ports."""
WORDS = ("garden", "spade", "river", "stone", "market", "window", "letter", "summer", "engine", "copper", "meadow")


@dataclass(frozen=True, slots=True)
class Load:
    """One load: `groups` prefixes of `prefix_words`, each used `repeats` times with an own question."""

    name: str
    groups: int
    repeats: int
    prefix_words: int
    question_words: int


LOADS = (
    Load("shared prefixes", groups=9, repeats=8, prefix_words=500, question_words=20),
    Load("no shared prefixes", groups=72, repeats=1, prefix_words=120, question_words=20),
)


def prompts(load: Load, seed: int) -> list[str]:
    """Return the prompts of one block in their order."""
    rng = random.Random(seed)

    def text(words: int) -> str:
        return " ".join(rng.choices(WORDS, k=words))

    prefixes = [f"Conversation {rng.random()}. {text(load.prefix_words)}" for _ in range(load.groups)]
    found = [f"{prefix} {text(load.question_words)}" for prefix in prefixes for _ in range(load.repeats)]
    rng.shuffle(found)
    return found


async def run_block(urls: list[str], texts: list[str], seconds_between: float, seed: int) -> list[float]:
    """Send the prompts at random times; return their times to first token in seconds."""
    rng = random.Random(seed)

    async def send(session: aiohttp.ClientSession, delay: float, url: str, text: str) -> float:
        await asyncio.sleep(delay)
        body = {"prompt": text, "max_tokens": 4, "stream": True, "temperature": 0, "ignore_eos": True}
        started = time.perf_counter()
        async with session.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            await response.content.readuntil(b"\n\n")
            found = time.perf_counter() - started
            await response.read()
        return found

    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        at, tasks = 0.0, []
        for text in texts:
            tasks.append(asyncio.create_task(send(session, at, rng.choice(urls), text)))
            at += rng.expovariate(1 / seconds_between)
        return list(await asyncio.gather(*tasks))


@contextmanager
def program(command: list[str], pattern: str) -> Iterator[tuple[int, int]]:
    """Run a server until the end of the block; yield its two ports once its log names them."""
    folders = ("router", "engine-image", "kernels", "modelspec")
    path = os.pathsep.join(str(REPOSITORY / folder) for folder in folders)
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": path}
        )
        try:
            found: list[str] = []

            def has_ports() -> bool:
                found[:] = re.findall(pattern, Path(log.name).read_text())
                return len(found) >= 2

            wait_for(process, has_ports)
            yield int(found[0]), int(found[1])
        finally:
            process.kill()
            process.wait()


def wait_for(process: subprocess.Popen[bytes] | None, condition: Callable[[], bool]) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        if (process is not None and process.poll() is not None) or time.monotonic() > deadline:
            raise RuntimeError("a server did not start")
        time.sleep(0.1)


def call(method: str, port: int, path: str, body: object = None) -> int:
    """Call a server of this machine and return the status; 0 if it does not answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Authorization": f"Bearer {ACCESS}", "Content-Type": "application/json"}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        response.read()
    except OSError:
        return 0
    finally:
        connection.close()
    return response.status


def quantile(values: list[float], share: float) -> float:
    """Return a quantile."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def main() -> None:
    """Measure and print one JSON object for each load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--engines", type=int, default=3, help="number of engines (default: 3)")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each kind (default: 3)")
    parser.add_argument("--seconds-between", type=float, default=0.5, help="mean time between requests (default: 0.5)")
    given = parser.parse_args()
    digest = hashlib.sha256(ACCESS.encode()).hexdigest()
    engine = ["trimtab_engine.cli", "serve", given.model, "--device", "cpu", "--cpu-threads", "1"]
    engine += ["--max-model-len", "2048", "--max-num-seqs", "8", "--device-memory-bytes", "2Gi"]
    engine += ["--served-model-name", "model", "--host", "127.0.0.1", "--port", "0", "--admin-port", "0"]
    engine += ["--admin-token-sha256", digest]
    router = ["trimtab_router", "--host", "127.0.0.1", "--port", "0", "--admin-port", "0", "--served-model", "model"]
    router += ["--admin-token-sha256", digest]
    with ExitStack() as stack:
        ports = []
        for _ in range(given.engines):
            ports.append(stack.enter_context(program(engine, r"listens on [\d.]+ port (\d+)\n")))
            wait_for(None, lambda: call("GET", ports[-1][0], "/readyz") == 200)
        for port, admin_port in ports:
            router += ["--endpoint", f"http://127.0.0.1:{port}?admin={admin_port}"]
        own_port, own_admin_port = stack.enter_context(program(router, r"port (\d+)"))
        wait_for(None, lambda: call("GET", own_admin_port, "/readyz") == 200)
        assert call("PUT", own_admin_port, "/admin/v1/state-token", {"token": ACCESS}) == 204
        time.sleep(3)
        targets = {
            "service": [f"http://127.0.0.1:{port}" for port, _ in ports],
            "router": [f"http://127.0.0.1:{own_port}"],
        }
        for load in LOADS:
            found: dict[str, list[float]] = {name: [] for name in targets}
            for number in range(given.rounds):
                for name, urls in targets.items():
                    for _, admin_port in ports:
                        wait_for(None, lambda: call("POST", admin_port, RESET_PATH, {}) == 200)  # noqa: B023
                    texts = prompts(load, seed=number)
                    found[name] += asyncio.run(run_block(urls, texts, given.seconds_between, seed=number))
            print(json.dumps(summarize(load, found)), flush=True)


def summarize(load: Load, found: dict[str, list[float]]) -> dict[str, object]:
    """Return the figures of one load."""
    p95 = {name: quantile(values, 0.95) for name, values in found.items()}
    p50 = {name: statistics.median(values) for name, values in found.items()}
    return {
        "load": load.name,
        "requests": len(found["router"]),
        "service_p50": round(p50["service"], 3),
        "router_p50": round(p50["router"], 3),
        "service_p95": round(p95["service"], 3),
        "router_p95": round(p95["router"], 3),
        "p95_ratio": round(p95["router"] / p95["service"], 3),
    }


if __name__ == "__main__":
    main()
