"""Reproducibility of engine starts with 1, 2 and 4 API servers, on an idle and on a loaded machine, exclusively in the
container and with another process: the number of KV blocks of each.

A separate control group represents the container, if one can be created (cgroup v1 or v2, as root); otherwise the page
says so. Exit code 1 if two starts with the same flags differ.

    nice python -m engine_benchmarks.same_start MODEL --output docs/results
"""

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from trimtab_engine.bench.local_server import end_on_sigterm, local_server

from engine_benchmarks.output import write_text

API_SERVERS = (1, 2, 4)
STARTS = 20  # for each number of API servers: five under each condition
LIMIT_BYTES = 3000 << 20
TENANT_BYTES = 300 << 20
PAGE = "same-start.md"
CGROUPS = Path("/sys/fs/cgroup")
FLAGS = (
    *("--device", "cpu", "--device-memory-bytes", "2500Mi", "--gpu-memory-utilization", "0.9"),
    *("--max-model-len", "1024", "--swap-space", "64Mi", "--log-level", "warning"),
    *("--speculative-config", '{"method":"ngram","num_speculative_tokens":3}'),
)
BURN = "while True: pass"
HOLD = f"import time; held = bytearray(b'x') * {TENANT_BYTES}; print(flush=True); time.sleep(1e6)"


@dataclass(frozen=True, slots=True)
class Condition:
    """Other load while the engine starts."""

    name: str
    is_loaded: bool = False
    has_tenant: bool = False


CONDITIONS = (
    Condition("idle"),
    Condition("under load", is_loaded=True),
    Condition("another tenant", has_tenant=True),
    Condition("both", is_loaded=True, has_tenant=True),
)


@dataclass(frozen=True, slots=True)
class Start:
    """One start: its request, and the resulting engine."""

    api_servers: int
    condition: Condition
    num_blocks: int
    other_bytes: int
    weights_bytes: int
    activations_bytes: int
    driver_used_bytes: int
    """The kernel's count when the engine was ready: only this may differ."""
    seconds: float


def plan() -> list[tuple[int, Condition]]:
    """Return the starts, with alternating conditions."""
    return [(count, CONDITIONS[turn % len(CONDITIONS)]) for count in API_SERVERS for turn in range(STARTS)]


async def one_start(model: str, api_servers: int, condition: Condition) -> Start:
    """Start an engine.

    Raises:
        EngineDead: it does not start.
    """
    with background_load(condition):
        began = time.monotonic()
        async with local_server(model, (*FLAGS, "--api-server-count", str(api_servers))) as server:
            seconds = time.monotonic() - began
            memory = await server.get("/admin/v1/memory")
    kinds = memory["kinds"]
    return Start(
        api_servers,
        condition,
        memory["kv"]["blocks_total"],
        kinds["other"],
        kinds["weights"],
        kinds["activations_peak"],
        memory["driver_used_bytes"],
        seconds,
    )


@contextmanager
def background_load(condition: Condition) -> Iterator[None]:
    """Run two busy loops for each CPU, and a process that uses TENANT_BYTES, within the block."""
    with ExitStack() as stack:
        if condition.is_loaded:
            for _ in range(2 * len(os.sched_getaffinity(0))):
                stack.enter_context(_running(BURN))
        if condition.has_tenant:
            tenant = stack.enter_context(_running(HOLD))
            assert tenant.stdout is not None
            tenant.stdout.readline()  # its memory is allocated
        yield


@contextmanager
def _running(program: str) -> "Iterator[subprocess.Popen[bytes]]":
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def memory_limited_group(limit_bytes: int) -> Iterator[bool]:
    """Put this process and its children into a control group with a memory limit. Yields False if none can be
    created.
    """
    is_v2 = (CGROUPS / "cgroup.controllers").exists()
    parent = CGROUPS if is_v2 else CGROUPS / "memory"
    group = parent / f"trimtab-same-start-{os.getpid()}"
    try:
        before = _own_group(parent, is_v2=is_v2)
        group.mkdir()
        (group / ("memory.max" if is_v2 else "memory.limit_in_bytes")).write_text(str(limit_bytes))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        with suppress(OSError):
            group.rmdir()
        yield False
        return
    try:
        yield True
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))
        with suppress(OSError):
            group.rmdir()


def _own_group(parent: Path, *, is_v2: bool) -> Path:
    """Return the current control group of this process."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if (controllers == "") if is_v2 else ("memory" in controllers.split(",")):
            return parent / path.lstrip("/")
    return parent


def differing_counts(starts: Sequence[Start]) -> list[int]:
    """Return the numbers of API servers for which two starts gave different engines."""
    engines: dict[int, set[tuple[int, int, int, int]]] = {}
    for start in starts:
        sizes = (start.num_blocks, start.other_bytes, start.weights_bytes, start.activations_bytes)
        engines.setdefault(start.api_servers, set()).add(sizes)
    return sorted(count for count, found in engines.items() if len(found) > 1)


def page(starts: Sequence[Start], *, model: str, is_contained: bool, machine: str) -> str:
    """Return the page of docs/results."""
    where = (
        f"in a control group with a memory limit of {LIMIT_BYTES >> 20} MiB"
        if is_contained
        else "without a memory limit: no control group could be made here"
    )
    wrong = differing_counts(starts)
    verdict = (
        "**The same flags gave the same engine every time.**"
        if not wrong
        else f"**Starts differ** with {', '.join(map(str, wrong))} API servers."
    )
    lines = [
        "# The same start, again and again",
        "",
        f"{len(starts)} starts of {Path(model).name} {where}. {machine}.",
        f"Flags: `{' '.join(FLAGS)}`.",
        "Made by `python -m engine_benchmarks.same_start`; do not edit.",
        "",
        '"Under load" is two busy loops for each CPU, "another tenant" a process in the same control group that holds',
        f"{TENANT_BYTES >> 20} MiB.",
        "",
        "| API servers | condition | starts | KV blocks | reserved | weights | steps | in use when ready | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for count in dict.fromkeys(start.api_servers for start in starts):
        for condition in CONDITIONS:
            lines += _row([start for start in starts if (start.api_servers, start.condition) == (count, condition)])
    return "\n".join([*lines, "", verdict, ""])


def _row(starts: Sequence[Start]) -> list[str]:
    """Return one row for these starts: each distinct value once, and the range of values that may differ."""
    if not starts:
        return []

    def each(name: str) -> str:
        return ", ".join(f"{value:,}" for value in sorted({getattr(start, name) for start in starts}))

    used = [start.driver_used_bytes >> 20 for start in starts]
    seconds = [start.seconds for start in starts]
    cells = [
        str(starts[0].api_servers),
        starts[0].condition.name,
        str(len(starts)),
        each("num_blocks"),
        each("other_bytes"),
        each("weights_bytes"),
        each("activations_bytes"),
        f"{min(used)} to {max(used)} MiB",
        f"{min(seconds):.0f} to {max(seconds):.0f}",
    ]
    return [f"| {' | '.join(cells)} |"]


def _machine() -> str:
    names = (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    name = next(names, ": an unknown CPU").partition(":")[2].strip()
    return f"{len(os.sched_getaffinity(0))} CPUs of {name}, torch {torch.__version__}, Python {sys.version.split()[0]}"


async def measure(model: str) -> list[Start]:
    """Run all of plan(), logging each start."""
    starts: list[Start] = []
    for count, condition in plan():
        start = await one_start(model, count, condition)
        starts.append(start)
        text = f"{len(starts)}: {count} API servers, {condition.name}: {start.num_blocks} KV blocks"
        print(f"[same start] {text}, {start.seconds:.0f} s", file=sys.stderr, flush=True)
    return starts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="same_start", description="Start an engine many times; compare.")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--output", type=Path, default=Path("docs/results"), metavar="FOLDER")
    options = parser.parse_args(arguments)
    end_on_sigterm()
    with memory_limited_group(LIMIT_BYTES) as is_contained:
        starts = asyncio.run(measure(options.model))
    text = page(starts, model=options.model, is_contained=is_contained, machine=_machine())
    write_text(options.output / PAGE, text)
    print(text)
    return 1 if differing_counts(starts) else 0


if __name__ == "__main__":
    sys.exit(main())
