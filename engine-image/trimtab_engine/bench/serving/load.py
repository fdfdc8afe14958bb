"""Sending of a load: every request at its time, with limited concurrency, until all are answered or Ctrl-C."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from trimtab_engine.bench.serving.client import RequestResult, Target, send
from trimtab_engine.bench.serving.samples import Sample


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, destination and times. `times` are seconds after the start, one per sample, in order."""

    samples: Sequence[Sample]
    times: Sequence[float]
    target: Target
    body: dict[str, Any]
    """Fields shared by all requests."""
    is_chat: bool = False
    max_concurrency: int | None = None

    def body_of(self, sample: Sample) -> dict[str, Any]:
        content = (
            {"messages": [{"role": "user", "content": sample.prompt}]} if self.is_chat else {"prompt": sample.prompt}
        )
        limit = {"max_tokens": sample.output_len} if sample.output_len else {}
        return {**content, **limit, "stream": True, "stream_options": {"include_usage": True}, **self.body}


@dataclass(slots=True)
class Outcome:
    """Result of a run. `results` has one entry per sent request, in order of sending."""

    results: list[RequestResult] = field(default_factory=list)
    duration: float = 0.0
    interrupted: bool = False
    client_cpu_seconds: float = 0.0
    """CPU time of this process during the run: if it approaches the duration, the client limits the result."""

    @property
    def complete(self) -> list[RequestResult]:
        return [result for result in self.results if result.success]


async def run_load(load: Load, on_done: Callable[[RequestResult], None], *, warmups: int = 0) -> Outcome:
    """Send the load. Ctrl-C stops sending and drops running requests; the result has those answered so far."""
    limit = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else contextlib.nullcontext()
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    async with aiohttp.ClientSession(connector=connector) as session:
        with _interruptible() as interrupted:
            await _warm_up(load, session, warmups)
            outcome = Outcome()
            started, cpu = time.perf_counter(), time.process_time()

            async def one(sample: Sample, planned: float) -> None:
                result = RequestResult(prompt_len=sample.prompt_len or 0)
                outcome.results.append(result)
                arrived = time.perf_counter()
                result.send_lag = arrived - started - planned
                async with limit:
                    now = time.perf_counter()
                    result.start_time, result.client_queue_time = now - started, now - arrived
                    await send(session, load.target, load.body_of(sample), result)
                on_done(result)

            tasks = await _start_all(load, one, started, interrupted)
            await _finish(tasks, interrupted)
            outcome.duration = time.perf_counter() - started
            outcome.client_cpu_seconds = time.process_time() - cpu
            outcome.interrupted = interrupted.is_set()
    return outcome


async def _warm_up(load: Load, session: aiohttp.ClientSession, warmups: int) -> None:
    """Send the first sample `warmups` times before the run, without counting it."""
    for _ in range(warmups):
        await send(session, load.target, load.body_of(load.samples[0]), RequestResult())


async def _start_all(
    load: Load, one: Callable[[Sample, float], Any], started: float, interrupted: asyncio.Event
) -> "list[asyncio.Task[None]]":
    tasks = []
    for sample, planned in zip(load.samples, load.times, strict=True):
        wait = started + planned - time.perf_counter()
        if wait > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(interrupted.wait(), wait)
        if interrupted.is_set():
            break
        tasks.append(asyncio.create_task(one(sample, planned)))
    return tasks


async def _finish(tasks: "list[asyncio.Task[None]]", interrupted: asyncio.Event) -> None:
    stop = asyncio.create_task(interrupted.wait())
    pending: set[asyncio.Task[Any]] = set(tasks)
    while pending and not interrupted.is_set():
        _, pending = await asyncio.wait({stop, *pending}, return_when=asyncio.FIRST_COMPLETED)
        pending.discard(stop)
    stop.cancel()
    for task in pending:
        task.cancel()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(error, Exception):
            raise error


@contextlib.contextmanager
def _interruptible() -> Iterator[asyncio.Event]:
    """Set the event on Ctrl-C; a second Ctrl-C ends the process."""
    interrupted, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_signal() -> None:
        interrupted.set()
        loop.remove_signal_handler(signal.SIGINT)

    with contextlib.suppress(ValueError, RuntimeError):  # not the main thread, which handles Ctrl-C
        loop.add_signal_handler(signal.SIGINT, on_signal)
    try:
        yield interrupted
    finally:
        with contextlib.suppress(ValueError, RuntimeError):
            loop.remove_signal_handler(signal.SIGINT)
