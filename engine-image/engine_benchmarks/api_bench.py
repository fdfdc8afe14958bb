"""CPU cost of an API server in front of a core that computes nothing: `python -m engine_benchmarks.api_bench MODEL`.

The servers are pinned to CPU 0; this process (the client) and the stub core to CPU 1. Other work on the machine affects
rates, but hardly CPU time per request, so both are reported, as medians over the rounds.
"""

import argparse
import asyncio
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine_benchmarks.output import write_text
from engine_benchmarks.stub_core import CPU_VARIABLE

SERVER_CPU, CLIENT_CPU = 0, 1
PROMPT = "The trim tab is the small surface that steers the large rudder of a"  # 16 tokens of SmolLM2
CONNECTIONS = 32
REQUESTS = 2000
STREAMS = 200
STREAM_TOKENS = 64
MANY_CONNECTIONS, MANY_TOKENS = 256, 200
ROUNDS = 5
START_SECONDS = 120.0
DETOKENIZED = 20_000
SERVE = (
    "import sys; from trimtab_engine.engine_client import started_core; "
    "started_core.CORE_COMMAND = (sys.executable, '-m', 'engine_benchmarks.stub_core'); "
    "from trimtab_engine.cli import main; sys.exit(main())"
)
CONDITIONS = (
    "The core is a stub whose steps of 2 ms return a token for every request. One server: on CPU 0, client and stub "
    "core on CPU 1. Two servers: on both CPUs, shared with client and stub core, so their rate does not represent two "
    "free CPUs. CPU time is that of the server processes, all threads, per event; other work on the machine hardly "
    "changes it."
)


@dataclass(frozen=True, slots=True)
class Rate:
    """Medians over the rounds. `cpu_microseconds` is the servers' CPU time per event, all their threads together."""

    per_second: float
    cpu_microseconds: float
    rounds: tuple[float, ...]


@dataclass(slots=True)
class Running:
    """The server processes under test."""

    port: int
    pids: list[int]

    def cpu_seconds(self) -> float:
        ticks = 0
        for pid in self.pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def running_server(model: str, num_servers: int) -> Iterator[Running]:
    """A server on the stub core, pinned, ready when the block begins."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = ["taskset", "-c", str(SERVER_CPU) if num_servers == 1 else f"{SERVER_CPU},{CLIENT_CPU}"]
    command += [sys.executable, "-c", SERVE, "serve", model, "--device", "cpu", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--served-model-name", "m", "--api-server-count", str(num_servers)]
    process = subprocess.Popen(command, env={**os.environ, CPU_VARIABLE: str(CLIENT_CPU)})
    try:
        _wait_until_ready(port, process)
        pids = [process.pid]
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            if b"api.serving.server_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                pids.append(int(child))
        yield Running(port, pids)
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_ready(port: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server has ended with {process.returncode}")
        try:
            with socket.create_connection(("127.0.0.1", port), 5) as connection:
                connection.sendall(b"GET /readyz HTTP/1.1\r\nHost: a\r\n\r\n")
                if connection.recv(100).startswith(b"HTTP/1.1 200"):
                    return
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"the server was not ready within {START_SECONDS:.0f} s")


class Connection:
    """One keep-alive connection that repeats the same request, with as little client overhead as possible."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self._reader, self._writer = reader, writer
        payload = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload

    @classmethod
    async def open(cls, port: int, body: dict[str, Any]) -> "Connection":
        return cls(*await asyncio.open_connection("127.0.0.1", port), body)

    async def send_request(self) -> int:
        """Send the request and return the response's length in bytes.

        Raises:
            RuntimeError: the status is not 200.
        """
        self._writer.write(self._request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        return len(await self._reader.readexactly(length))

    async def stream(self) -> int:
        """Stream one response and return the number of chunks with a choice."""
        self._writer.write(self._request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        body = await self._reader.readuntil(b"0\r\n\r\n")
        return body.count(b"data: {")

    def close(self) -> None:
        self._writer.close()


async def _in_parallel(
    port: int,
    body: dict[str, Any],
    num: int,
    one: Callable[[Connection], Awaitable[int]],
    num_connections: int = CONNECTIONS,
) -> int:
    """Send `num` requests over `num_connections` connections. Returns the sum of their results."""
    left = iter(range(num))
    connections = [await Connection.open(port, body) for _ in range(num_connections)]

    async def work(connection: Connection) -> int:
        return sum([await one(connection) for _ in left])

    total = sum(await asyncio.gather(*(work(connection) for connection in connections)))
    for connection in connections:
        connection.close()
    return total


def _rate(server: Running, run: Callable[[], int]) -> Rate:
    """Measure one kind of event. `run` returns the number of events."""
    rates, costs = [], []
    for number in range(ROUNDS + 1):
        cpu, started = server.cpu_seconds(), time.perf_counter()
        events = run()
        if number:  # the first round warms up
            rates.append(events / (time.perf_counter() - started))
            costs.append((server.cpu_seconds() - cpu) / events * 1e6)
    return Rate(statistics.median(rates), statistics.median(costs), tuple(round(rate) for rate in rates))


def measure_requests(server: Running) -> Rate:
    """Measure requests with 16 input tokens and 1 output token, not streamed."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 1}

    def run() -> int:
        asyncio.run(_in_parallel(server.port, body, REQUESTS, Connection.send_request))
        return REQUESTS

    return _rate(server, run)


def measure_chunks(server: Running) -> Rate:
    """Measure streamed chunks, one token each unless the server joins pending ones."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": STREAM_TOKENS, "stream": True}
    return _rate(server, lambda: asyncio.run(_in_parallel(server.port, body, STREAMS, Connection.stream)))


def measure_many_streams(server: Running) -> Rate:
    """Measure chunks with as many streams as a busy engine has: each step returns a token for each of them."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": MANY_TOKENS, "stream": True}
    num = MANY_CONNECTIONS
    return _rate(server, lambda: asyncio.run(_in_parallel(server.port, body, num, Connection.stream, num)))


def measure_detokenizing(model: str) -> dict[str, float]:
    """Measure the microseconds per token of one sequence's incremental detokenization: the median and the best of the
    rounds.
    """
    from trimtab_engine.text.tokenizer import Detokenizer, Tokenizer

    tokenizer = Tokenizer(model)
    ids = tokenizer.encode((PROMPT + " Grüße aus Zürich, 北京 🙂. ") * 40)
    rounds = []
    for _ in range(2 * ROUNDS):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
        started = time.perf_counter()
        for index in range(DETOKENIZED):
            detokenizer.push(ids[index % len(ids)])
        rounds.append((time.perf_counter() - started) / DETOKENIZED * 1e6)
    return {"median": statistics.median(rounds), "best": min(rounds)}


def measure(model: str) -> dict[str, Any]:
    """Measure all figures. Needs two CPUs and taskset."""
    os.sched_setaffinity(0, {CLIENT_CPU})
    results: dict[str, Any] = {"detokenize_microseconds": measure_detokenizing(model)}
    for num_servers in (1, 2):
        with running_server(model, num_servers) as server:
            results[f"servers_{num_servers}"] = {
                "requests": asdict(measure_requests(server)),
                "chunks": asdict(measure_chunks(server)),
                "many": asdict(measure_many_streams(server)),
            }
    return results


def page(results: dict[str, Any], command: str) -> str:
    """Return the results as a Markdown page."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpus = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("fastapi", "uvicorn", "uvloop", "msgspec", "tokenizers")
    )
    detokenize = results["detokenize_microseconds"]
    lines = [
        "# Measured: the API server",
        "",
        f"Machine: {len(cpus)} × {cpus[0]}, Python {platform.python_version()}, {versions}. Command: `{command}`.",
        "",
        CONDITIONS,
        "",
        f"| what | servers | per second, median of {ROUNDS} | CPU µs each | rounds |",
        "| --- | --- | --- | --- | --- |",
    ]
    texts = {
        "requests": "requests, 16 tokens in, 1 out, not streamed",
        "chunks": f"streamed chunks, {CONNECTIONS} streams of {STREAM_TOKENS}",
        "many": f"streamed chunks, {MANY_CONNECTIONS} streams of {MANY_TOKENS}",
    }
    for num_servers in (1, 2):
        for what, rate in results[f"servers_{num_servers}"].items():
            lines.append(
                f"| {texts[what]} | {num_servers} | {rate['per_second']:,.0f} | {rate['cpu_microseconds']:,.0f} "
                f"| {', '.join(f'{value:,.0f}' for value in rate['rounds'])} |"
            )
    lines += [
        "",
        f"Detokenising, one sequence: {detokenize['median']:.1f} µs per token (best {detokenize['best']:.1f}).",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="api_bench", description="Measure the API server on a stub core.")
    parser.add_argument("model", help="folder with a tokenizer")
    parser.add_argument("--output", type=Path, help="folder for api-server.json and api-server.md")
    options = parser.parse_args(arguments)
    results = measure(options.model)
    text = page(results, "python -m engine_benchmarks.api_bench MODEL --output docs/results")
    if options.output is not None:
        write_text(options.output / "api-server.json", json.dumps(results, indent=1) + "\n")
        write_text(options.output / "api-server.md", text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
