"""Measurements of a server from outside: start-up, first token, live PATCHes and sleep under load, peak memory.

Starts `trimtab-engine serve` as a separate process, keeps streams running, halves the KV cache and doubles it again by
PATCHes of the utilization, then puts it to sleep and wakes it with requests in between.

    python -m engine_benchmarks.live_bench MODEL [-o json]
"""

import argparse
import asyncio
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from trimtab_engine.ipc.network import ReservedPorts

START_SECONDS = 300.0  # until the server must be ready
NUM_STREAMS = 8
PROMPT = "Tell a long story about a ship and its crew. "
STREAM_TOKENS = 200
NUM_PATCHES = 20
SETTLE_SECONDS = 0.5  # between two PATCHes
HIGH = 0.95
NUM_SLEEPS = 5  # per level
SLEEPER_STREAMS, SLEEPER_TOKENS = 4, 64
DEVICE = "1600Mi"


@dataclass(slots=True)
class Live:
    """Seconds unless the name says otherwise. Quiet: no PATCH was in progress."""

    listening_seconds: float = 0.0
    ready_seconds: float = 0.0
    first_token_seconds: float = 0.0
    patch_median_seconds: float = 0.0
    patch_max_seconds: float = 0.0
    step_median_seconds: float = 0.0
    longest_gap_seconds: float = 0.0
    num_tokens: int = 0
    num_failed: int = 0
    kv_tokens: list[int] = field(default_factory=list)
    """KV tokens at the low and at the high utilization: half, and all."""
    sleep_median_seconds: dict[str, float] = field(default_factory=dict)
    """By sleep level, with requests that are kept."""
    wake_median_seconds: dict[str, float] = field(default_factory=dict)
    given_back_mib: dict[str, float] = field(default_factory=dict)
    """By sleep level: the decrease of the driver's count during sleep."""
    api_peak_mib: float = 0.0
    core_peak_mib: float = 0.0


async def measure_live(model: str) -> Live:
    """Start a server, measure, and stop it."""
    with ReservedPorts("127.0.0.1") as ports:
        port, admin = ports.take(), ports.take()
        command = [
            *(sys.executable, "-m", "trimtab_engine.cli", "serve", model, "--served-model-name", "m"),
            *("--device", "cpu", "--host", "127.0.0.1", "--port", str(port), "--admin-port", str(admin)),
            *("--max-model-len", "1024", "--max-num-batched-tokens", "512"),
            *("--device-memory-bytes", DEVICE, "--gpu-memory-utilization", str(HIGH)),
        ]
        live = Live()
        started = time.monotonic()
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # noqa: ASYNC220  # it must outlive no await
        try:
            async with (
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as api,
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin}", timeout=120) as control,
            ):
                await _until_ready(api, process, live, started)
                await _under_load(api, control, live)
                for level in (1, 2):
                    await _measure_sleep(api, control, live, level)
                live.api_peak_mib, live.core_peak_mib = _peaks(process.pid)
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
        return live


async def _until_ready(api: httpx.AsyncClient, process: "subprocess.Popen[bytes]", live: Live, started: float) -> None:
    while time.monotonic() - started < START_SECONDS:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode} before it was ready")
        with suppress(httpx.HTTPError):
            answer = await api.get("/startupz")
            live.listening_seconds = live.listening_seconds or time.monotonic() - started
            if answer.status_code == 200:
                live.ready_seconds = time.monotonic() - started
                return
        await asyncio.sleep(0.05)
    raise RuntimeError(f"the server was not ready after {START_SECONDS:.0f} s")


async def _under_load(api: httpx.AsyncClient, control: httpx.AsyncClient, live: Live) -> None:
    first = await _stream(api, live, tokens=8)
    live.first_token_seconds = first[0]
    streams = [asyncio.create_task(_stream(api, live, tokens=STREAM_TOKENS)) for _ in range(NUM_STREAMS)]
    await asyncio.sleep(SETTLE_SECONDS)
    patches, sizes = [], {}
    low = _utilization_of_half(await _ledger(control))
    for number in range(NUM_PATCHES):
        value = HIGH if number % 2 else low
        before = time.monotonic()
        answer = await control.patch("/admin/v1/config", json={"gpu_memory_utilization": value})
        patches.append(time.monotonic() - before)
        answer.raise_for_status()
        kv = (await _ledger(control))["kv"]
        sizes[value] = kv["blocks_total"] * kv["block_size"]
        await asyncio.sleep(SETTLE_SECONDS)
    gaps = [gap for times in await asyncio.gather(*streams) for gap in times[1:]]
    live.patch_median_seconds, live.patch_max_seconds = statistics.median(patches), max(patches)
    live.step_median_seconds, live.longest_gap_seconds = statistics.median(gaps), max(gaps)
    live.kv_tokens = [sizes[low], sizes[HIGH]]


async def _measure_sleep(api: httpx.AsyncClient, control: httpx.AsyncClient, live: Live, level: int) -> None:
    """Sleep and wake during streams, NUM_SLEEPS times."""
    slept, woken, given_back = [], [], []
    for _ in range(NUM_SLEEPS):
        streams = [asyncio.create_task(_stream(api, live, tokens=SLEEPER_TOKENS)) for _ in range(SLEEPER_STREAMS)]
        await asyncio.sleep(SETTLE_SECONDS)
        awake = (await _ledger(control))["driver_used_bytes"]
        slept.append(await _seconds(control, "sleep", {"level": level, "mode": "keep"}))
        given_back.append((awake - (await _ledger(control))["driver_used_bytes"]) / (1 << 20))
        woken.append(await _seconds(control, "wake_up", {}))
        await asyncio.gather(*streams)
    name = str(level)
    live.sleep_median_seconds[name] = statistics.median(slept)
    live.wake_median_seconds[name] = statistics.median(woken)
    live.given_back_mib[name] = statistics.median(given_back)


async def _seconds(control: httpx.AsyncClient, call: str, body: dict[str, Any]) -> float:
    """Return the seconds of an admin call."""
    before = time.monotonic()
    (await control.post(f"/admin/v1/{call}", json=body)).raise_for_status()
    return time.monotonic() - before


async def _ledger(control: httpx.AsyncClient) -> dict[str, Any]:
    ledger: dict[str, Any] = (await control.get("/admin/v1/memory")).json()
    return ledger


def _utilization_of_half(ledger: dict[str, Any]) -> float:
    """Return the utilization at which the KV cache has half of its blocks."""
    kinds = ledger["kinds"]
    fixed = sum(size for kind, size in kinds.items() if kind not in ("kv_mapped", "kv_used", "free"))
    share: float = (fixed + kinds["kv_mapped"] / 2) / ledger["device_bytes"]
    return math.ceil(share * 10_000) / 10_000


async def _stream(api: httpx.AsyncClient, live: Live, *, tokens: int) -> list[float]:
    """Return the seconds to the first token, then between tokens."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    gaps, last = [], time.monotonic()
    async with api.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            live.num_failed += 1
            return [0.0, 0.0]
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                now = time.monotonic()
                gaps.append(now - last)
                last = now
    live.num_tokens += len(gaps)
    live.num_failed += len(gaps) == 0
    return gaps or [0.0, 0.0]


def _peaks(api_pid: int) -> tuple[float, float]:
    """Return the peak resident memory of the API server and of its child, the engine core, in MiB."""
    children = Path(f"/proc/{api_pid}/task/{api_pid}/children").read_text().split()
    peaks = [_high_water(pid) for pid in [str(api_pid), *children]]
    return peaks[0], max(peaks[1:], default=0.0)


def _high_water(pid: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def table(live: Live) -> str:
    return "\n".join(f"{name:<24} {value}" for name, value in asdict(live).items())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="live_bench", description="A real server under load, re-trimmed while it serves."
    )
    parser.add_argument("model", help="folder with safetensors and a tokenizer")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    options = parser.parse_args(arguments)
    live = asyncio.run(measure_live(options.model))
    print(json.dumps(asdict(live), indent=1) if options.output == "json" else table(live))
    return 0


if __name__ == "__main__":
    sys.exit(main())
