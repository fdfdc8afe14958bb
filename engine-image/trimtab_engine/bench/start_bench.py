"""`trimtab-engine bench start`: repeated starts of a server in its own process, stage by stage.

The stages are those of `trimtab_start_seconds`, which the started engine measures. The total is measured here, from the
creation of the process to the first successful /readyz.
"""

import argparse
import asyncio
import json
import os
import re
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import numpy as np

from trimtab_engine.bench.inputs import check_target
from trimtab_engine.bench.local_server import SERVED_NAME, LocalServer, end_on_sigterm, local_server
from trimtab_engine.bench.outputs import write_file
from trimtab_engine.engine_client.start_clock import FIRST_TOKEN
from trimtab_engine.errors import ConfigError, EngineDead
from trimtab_engine.offline.progress_bar import progress_bar
from trimtab_engine.weights.open import model_path

SAMPLE = re.compile(r'^trimtab_start_seconds\{.*stage="(\w+)".*\} (\S+)$', re.MULTILINE)
RESULT_NAMES = {"ready": "total until ready", "cpu": "CPU time until ready"}


@dataclass(frozen=True, slots=True)
class Start:
    """One measured start. All values are in seconds."""

    ready_seconds: float
    """From the creation of the process to the first successful /readyz."""
    cpu_seconds: float
    """CPU time of all processes until then, which other work on the machine hardly affects."""
    stages: Mapping[str, float]
    """Duration of each stage, in order; the last one is the time to the first token of the first request."""


def run_start(arguments: argparse.Namespace) -> int:
    """Start the server --runs times, and print the median and p95 of each stage. Return the exit code.

    Raises:
        ConfigError, ModelError: The flags or the model are invalid.
        EngineDead: A start failed.
    """
    try:
        flags = shlex.split(arguments.serve_flags or "")
    except ValueError as error:
        raise ConfigError(f"--serve-flags: {error} ({arguments.serve_flags}); close the quotation") from None
    if arguments.output_json:
        check_target("--output-json", Path(arguments.output_json))
    end_on_sigterm()
    starts = []
    with progress_bar("Starts", arguments.runs) as advance:
        for _ in range(arguments.runs):
            if arguments.cold_page_cache:
                drop_page_cache(model_path(arguments.model))
            starts.append(asyncio.run(measure_start(arguments.model, flags)))
            advance(1, f"{starts[-1].ready_seconds:.2f} s")
    summary = summarize(starts)
    print(table(summary))
    if arguments.output_json:
        result = {"model": arguments.model, "serve_flags": flags, "cold_page_cache": arguments.cold_page_cache}
        result |= {"seconds": summary, "starts": [asdict(start) for start in starts]}
        write_file(Path(arguments.output_json), (json.dumps(result, indent=4) + "\n").encode())
    return 0


async def measure_start(model: str, flags: Sequence[str]) -> Start:
    """Start a server, send one request for one token, and stop the server.

    Raises:
        ConfigError: The server rejects the flags.
        EngineDead: The server does not start for another reason.
    """
    with tempfile.TemporaryDirectory(prefix="trimtab-start-") as folder:
        began = time.monotonic()
        async with local_server(model, flags, Path(folder) / "log") as server:
            ready_seconds, cpu_seconds = time.monotonic() - began, server.cpu_seconds()
            await _first_token(server)
            stages = read_stages(await server.metrics())
    return Start(ready_seconds, cpu_seconds, stages)


async def _first_token(server: LocalServer) -> None:
    body = {"model": SERVED_NAME, "prompt": "Hello", "max_tokens": 1}
    async with aiohttp.ClientSession() as session, session.post(f"{server.url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise EngineDead(f"the first request failed: HTTP {answer.status}: {await answer.text()}")


def read_stages(metrics: str) -> dict[str, float]:
    """Return the duration of each stage in seconds from the text of /metrics, in order of the stages."""
    return {stage: float(seconds) for stage, seconds in SAMPLE.findall(metrics)}


def summarize(starts: Sequence[Start]) -> dict[str, dict[str, float]]:
    """Return median and p95 in seconds of the totals, named ready and cpu, and of each stage as "stage NAME"."""
    values = {"ready": [start.ready_seconds for start in starts], "cpu": [start.cpu_seconds for start in starts]}
    for start in starts:
        for stage, seconds in start.stages.items():
            values.setdefault(f"stage {stage}", []).append(seconds)
    return {
        name: {"median": float(np.median(seconds)), "p95": float(np.percentile(seconds, 95))}
        for name, seconds in values.items()
    }


def table(summary: Mapping[str, Mapping[str, float]]) -> str:
    """Return the summary as aligned text: the stages until ready, the totals, the first token."""
    last = f"stage {FIRST_TOKEN}"
    names = [name for name in summary if name.startswith("stage ") and name != last]
    names += ["ready", "cpu", *([last] if last in summary else [])]
    rows = [("stage", "median s", "p95 s")]
    for name in names:
        median, p95 = (f"{summary[name][column]:.2f}" for column in ("median", "p95"))
        rows.append((RESULT_NAMES.get(name, name.removeprefix("stage ")), median, p95))
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"{name:<{width}}  {median:>8}  {p95:>8}" for name, median, p95 in rows)


def drop_page_cache(path: Path) -> None:
    """Remove a model's files from the page cache, so that the next start reads them from the disk."""
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # changed pages cannot be removed
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
