"""Cost of the load generator of `bench serve`: processor time per request and per output chunk, with a server that only
writes prepared events. Processor time, because other work hardly changes it.

    python -m engine_benchmarks.client_bench
    python -m engine_benchmarks.client_bench
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from trimtab_engine.bench.serving.client import Target
from trimtab_engine.bench.serving.load import Load, Outcome, run_load
from trimtab_engine.bench.serving.samples import Sample

REQUESTS, CHUNKS, CONCURRENCY, ROUNDS = 200, 200, 32, 5
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(text: str) -> bytes:
    """Return one event as written by the engine, inside one HTTP chunk."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
    body = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
    data = b"data: " + json.dumps(body).encode() + b"\n\n"
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, num_chunks: int) -> None:
    one_event = event(" word")
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(length.partition(b":")[2]))
            writer.write(HEAD)
            for _ in range(num_chunks):
                writer.write(one_event)
                await asyncio.sleep(0)  # let the other streams run, so that events arrive one by one
            writer.write(b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def _serve(listening: socket.socket, num_chunks: int) -> None:
    async def run() -> None:
        server = await asyncio.start_server(lambda r, w: _answer(r, w, num_chunks), sock=listening)
        await server.serve_forever()

    asyncio.run(run())


def measure(num_chunks: int) -> Outcome:
    """Run REQUESTS requests with `num_chunks` chunks each."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(listening, num_chunks), daemon=True)
    server.start()
    try:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1/completions"
        load = Load(
            samples=[Sample("a prompt", None, num_chunks)] * REQUESTS,
            times=[0.0] * REQUESTS,
            target=Target(url, {}),
            body={"model": "m"},
            max_concurrency=CONCURRENCY,
        )
        return asyncio.run(run_load(load, lambda result: None))
    finally:
        server.terminate()
        server.join()
        listening.close()


def report(rounds: int) -> dict[str, Any]:
    """Return medians over the rounds: microseconds of processor time per request with one chunk, and per further
    chunk.
    """
    single = statistics.median(measure(1).client_cpu_seconds for _ in range(rounds)) / REQUESTS
    many = statistics.median(measure(CHUNKS).client_cpu_seconds for _ in range(rounds)) / REQUESTS
    per_chunk = (many - single) / (CHUNKS - 1)
    return {
        "cpu_microseconds_per_request": 1e6 * single,
        "cpu_microseconds_per_chunk": 1e6 * per_chunk,
        "chunks_per_second_at_80_percent": 0.8 / per_chunk,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="client_bench", description="Measure the cost of the load generator.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    print(json.dumps(report(parser.parse_args(arguments).rounds), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
