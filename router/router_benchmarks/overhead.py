"""CPU time per request, added time to first byte and memory of a router in front of stub engines.

    python -m router_benchmarks.overhead                                  # Trimtab's router
    python -m router_benchmarks.overhead --rival vllm-router=/path/to/venv/bin/vllm-router …

All routers run in front of the same two stub engines (stub_engine.py) and get each load in turn, several times. CPU
time is user plus system time of the router's processes in the best round, since other load on the machine only adds to
it; latency is the median over the rounds of the difference to direct requests in the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import string
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import httptools
import uvloop

TICKS = os.sysconf("SC_CLK_TCK")
START_SECONDS = 60.0
NUM_ENGINES = 2
CONCURRENCY = 16
LATENCY_REQUESTS = {1: 400, 100: 50}
"""Requests one after another, by the chunks of their responses."""
IDLE_CONNECTIONS = 10_000


@dataclass(frozen=True, slots=True)
class Cell:
    """One load."""

    body_bytes: int
    chunks: int
    requests: int


CELLS = (
    Cell(16 << 10, 1, 4000),
    Cell(16 << 10, 100, 400),
    Cell(400 << 10, 1, 600),
    Cell(400 << 10, 100, 200),
)


@dataclass(slots=True)
class Figures:
    """Figures of one router and one load."""

    router: str
    body_bytes: int
    chunks: int
    cpu_us_per_request: float
    added_ttfb_ms_p50: float
    added_ttfb_ms_p99: float
    requests_per_second: float


class Client(asyncio.Protocol):
    """One connection that sends one request after another."""

    def __init__(self, next_request: Callable[[], bytes | None], latencies: list[float]) -> None:
        self._next_request, self._latencies = next_request, latencies
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._sent_at = 0.0
        self._is_first = True
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def _send(self) -> None:
        request = self._next_request()
        if request is None:
            self._transport.close()
            return
        self._parser = httptools.HttpResponseParser(self)
        self._is_first = True
        self._sent_at = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self._is_first:
            self._is_first = False
            self._latencies.append(time.perf_counter() - self._sent_at)
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() != 200:
            self._fail(f"status {self._parser.get_status_code()}")
            return
        asyncio.get_running_loop().call_soon(self._send)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def _fail(self, message: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(message))
        self._transport.abort()


def make_requests(cell: Cell) -> list[bytes]:
    """Return different chat requests: conversations with a common system prompt."""
    rng = random.Random(cell.body_bytes)
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9))) for _ in range(2000)]

    def text(num_bytes: int) -> str:
        return " ".join(rng.choices(words, k=num_bytes // 6))[:num_bytes]

    system = text(cell.body_bytes // 4)
    found = []
    for _ in range(50):
        turns = [text(cell.body_bytes // 12) for _ in range(9)]
        messages = [{"role": "system", "content": system}]
        messages += [{"role": ("user", "assistant")[turn % 2], "content": each} for turn, each in enumerate(turns)]
        fields = {"model": "stub", "messages": messages, "max_tokens": cell.chunks, "stream": True, "temperature": 0}
        body = json.dumps(fields).encode()
        found.append(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
            b"Accept: application/json\r\nUser-Agent: OpenAI/Python\r\nAuthorization: Bearer key\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
    return found


async def drive(port: int, requests: list[bytes], number: int, concurrency: int) -> tuple[list[float], float]:
    """Send `number` requests over `concurrency` connections; return times to first byte and the wall time."""
    latencies: list[float] = []
    left = iter(range(number))

    def next_request() -> bytes | None:
        place = next(left, None)
        return None if place is None else requests[place % len(requests)]

    loop = asyncio.get_running_loop()
    started = time.perf_counter()
    clients = []
    for _ in range(concurrency):
        _, client = await loop.create_connection(lambda: Client(next_request, latencies), "127.0.0.1", port)
        clients.append(client)
    await asyncio.gather(*(client.done for client in clients))
    return latencies, time.perf_counter() - started


def process_tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in process_tree(int(child)))]


def cpu_seconds(pid: int) -> float:
    """Return user plus system time of a process and its descendants."""
    total = 0
    for each in process_tree(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its descendants."""
    pages = (int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in process_tree(pid))
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


@contextmanager
def program(command: Sequence[str], port: int) -> Iterator[int]:
    """Run a server until the end of the block; yield its process ID once it answers on a port."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=2) as response:
                    response.read()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{command[0]} did not start") from None
                time.sleep(0.1)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def router_command(name: str, executable: str, port: int, engines: Sequence[int]) -> list[str]:
    """Return the command of a router that sends requests by its own prefix rule."""
    urls = [f"http://127.0.0.1:{engine}" for engine in engines]
    if name == "trimtab":
        flags = [flag for url in urls for flag in ("--endpoint", url)]
        own = ["--host", "127.0.0.1", "--port", str(port), "--admin-port", str(free_port()), "--served-model", "stub"]
        return [sys.executable, "-m", "trimtab_router", *own, *flags]
    own = ["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware", "--prometheus-port", str(free_port())]
    return [*executable.split(), *own, "--worker-urls", *urls]


@dataclass(frozen=True, slots=True)
class Round:
    """One measurement of one router and one load."""

    cpu_seconds: float
    """For each request."""
    added_p50: float
    added_p99: float
    requests_per_second: float


def measure(port: int, pid: int, engine: int, cell: Cell) -> Round:
    """Measure one load: CPU time with many requests at once, latency with one at a time."""
    requests = make_requests(cell)
    uvloop.run(drive(port, requests, max(cell.requests // 10, 50), CONCURRENCY))  # warm up
    before = cpu_seconds(pid)
    _, seconds = uvloop.run(drive(port, requests, cell.requests, CONCURRENCY))
    cpu = cpu_seconds(pid) - before
    number = LATENCY_REQUESTS[cell.chunks]
    direct, routed = (uvloop.run(drive(each, requests, number, 1))[0] for each in (engine, port))
    return Round(
        cpu / cell.requests,
        statistics.median(routed) - statistics.median(direct),
        quantile(routed, 0.99) - quantile(direct, 0.99),
        cell.requests / seconds,
    )


def summarize(name: str, cell: Cell, rounds: Sequence[Round]) -> Figures:
    """Return the figures of all rounds."""
    return Figures(
        name,
        cell.body_bytes,
        cell.chunks,
        round(min(each.cpu_seconds for each in rounds) * 1e6, 1),
        round(statistics.median(each.added_p50 for each in rounds) * 1e3, 3),
        round(statistics.median(each.added_p99 for each in rounds) * 1e3, 3),
        round(max(each.requests_per_second for each in rounds), 1),
    )


def quantile(values: list[float], share: float) -> float:
    """Return a quantile."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


async def _hold_idle(port: int, number: int, measure_memory: Callable[[], int]) -> int:
    """Open idle connections and return the memory with them."""
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(number)]
    await asyncio.sleep(3)
    found = measure_memory()
    for _, writer in connections:
        writer.close()
    return found


def main() -> None:
    """Measure and print one JSON object for each router and cell, and the memory of idle connections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rival", action="append", default=[], metavar="NAME=COMMAND", help="another router")
    parser.add_argument("--chunk-seconds", default="0.002", help="interval of an engine's chunks")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each router and load (default: 3)")
    parser.add_argument("--skip-idle", action="store_true", help="leave out the 10,000 idle connections")
    given = parser.parse_args()
    commands = {"trimtab": "", **dict(each.split("=", 1) for each in given.rival)}
    ports = [free_port() for _ in range(NUM_ENGINES)]
    engine_command = [sys.executable, "-m", "router_benchmarks.stub_engine", "--chunk-seconds", given.chunk_seconds]
    with ExitStack() as stack:
        for port in ports:
            stack.enter_context(program([*engine_command, "--port", str(port)], port))
        running: dict[str, tuple[int, int]] = {}
        for name, executable in commands.items():
            port = free_port()
            running[name] = port, stack.enter_context(program(router_command(name, executable, port, ports), port))
        for cell in CELLS:
            rounds: dict[str, list[Round]] = {name: [] for name in running}
            for _ in range(given.rounds):
                for name, (port, pid) in running.items():
                    rounds[name].append(measure(port, pid, ports[0], cell))
            for name, each in rounds.items():
                print(json.dumps(asdict(summarize(name, cell, each))), flush=True)
        if not given.skip_idle:
            port = free_port()
            measure_idle(port, router_command("trimtab", "", port, ports))


def measure_idle(port: int, command: Sequence[str]) -> None:
    """Print the memory and CPU time that idle connections take."""
    with program(command, port) as pid:
        before = resident_bytes(pid)
        opened = uvloop.run(_hold_idle(port, IDLE_CONNECTIONS, lambda: resident_bytes(pid)))
        per_connection = (opened - before) / IDLE_CONNECTIONS
        print(json.dumps({"idle_connections": IDLE_CONNECTIONS, "bytes_per_connection": round(per_connection)}))


if __name__ == "__main__":
    main()
