"""`make clients`: unmodified guidellm and aiperf, and `bench serve`, against one server with the same load.

It shows that the tools work, and that equal measures have equal figures. A tool that is not installed is skipped with a
message. Each has a separate virtual environment, because their pinned packages conflict with the engine's.

    python -m engine_benchmarks.clients_bench MODEL --guidellm PATH --aiperf PATH
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab_engine.bench.local_server import SERVED_NAME, end_on_sigterm, local_server

REQUESTS, CONCURRENCY, INPUT_TOKENS, OUTPUT_TOKENS = 24, 4, 64, 16
FEWEST = REQUESTS - CONCURRENCY  # guidellm drops requests in flight when its limit is reached
TOOL_SECONDS = 400.0
KINDS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
SERVER_FLAGS = (
    *("--device", "cpu", "--max-model-len", "1024", "--num-gpu-blocks-override", "600", "--max-num-seqs", "16"),
    *("--max-num-batched-tokens", "512"),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """One tool's figures of one run; milliseconds."""

    completed: int
    failed: int
    request_throughput: float
    ttft_ms: float
    itl_ms: float


@dataclass(frozen=True, slots=True)
class Tool:
    """The command line and result parser of a tool. `program` is None if it is not installed."""

    name: str
    program: str | None
    command: Callable[[str, str, str, str, Path], list[str]]
    """(program, url, model folder, kind, output folder) → the command."""
    read: Callable[[Path], Figures]


def guidellm_command(program: str, url: str, model: str, kind: str, folder: Path) -> list[str]:
    return [
        *("env", "-u", "PYTHONPATH", "HF_HUB_OFFLINE=1", program, "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={url},request_format={KINDS[kind]}"),
        *("--profile", f"kind=concurrent,streams={CONCURRENCY}"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={model}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}"),
        *("--output", f"kind=json,path={folder / 'guidellm.json'}"),
    ]


def read_guidellm(folder: Path) -> Figures:
    metrics = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    return Figures(
        completed=totals["successful"],
        failed=totals["errored"] + totals["incomplete"],
        request_throughput=metrics["requests_per_second"]["successful"]["mean"],
        ttft_ms=metrics["time_to_first_token_ms"]["successful"]["mean"],
        itl_ms=metrics["inter_token_latency_ms"]["successful"]["mean"],
    )


def aiperf_command(program: str, url: str, model: str, kind: str, folder: Path) -> list[str]:
    """Return aiperf's command. HF_HUB_OFFLINE is unset: with it, aiperf accepts no folder as a tokenizer."""
    return [
        *("env", "-u", "PYTHONPATH", "-u", "HF_HUB_OFFLINE", program, "profile", "--ui", "none"),
        *("--model", SERVED_NAME, "--url", url, "--endpoint-type", kind, "--streaming", "--tokenizer", model),
        *("--concurrency", str(CONCURRENCY), "--request-count", str(REQUESTS)),
        *("--synthetic-input-tokens-mean", str(INPUT_TOKENS), "--synthetic-input-tokens-stddev", "0"),
        *("--output-tokens-mean", str(OUTPUT_TOKENS), "--output-tokens-stddev", "0"),
        *("--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--artifact-dir", str(folder)),
    ]


def read_aiperf(folder: Path) -> Figures:
    figures = json.loads((folder / "profile_export_aiperf.json").read_text())
    failed = figures.get("error_request_count") or {"avg": 0}
    return Figures(
        completed=int(figures["request_count"]["avg"]),
        failed=int(failed["avg"]),
        request_throughput=figures["request_throughput"]["avg"],
        ttft_ms=figures["time_to_first_token"]["avg"],
        itl_ms=figures["inter_token_latency"]["avg"],
    )


def own_command(program: str, url: str, model: str, kind: str, folder: Path) -> list[str]:
    return [
        *(program, "-m", "trimtab_engine.cli", "bench", "serve", "--base-url", url, "--tokenizer", model),
        *("--backend", "openai-chat" if kind == "chat" else "openai", "--num-prompts", str(REQUESTS)),
        *("--max-concurrency", str(CONCURRENCY), "--input-len", str(INPUT_TOKENS)),
        *("--output-len", str(OUTPUT_TOKENS), "--save-result", "--result-dir", str(folder)),
        *("--result-filename", "own.json", "--disable-tqdm"),
    ]


def read_own(folder: Path) -> Figures:
    result = json.loads((folder / "own.json").read_text())
    return Figures(
        result["completed"],
        result["failed"],
        result["request_throughput"],
        result["mean_ttft_ms"],
        result["mean_tpot_ms"],  # the other tools' definition of inter-token latency: per request, then the mean
    )


def tools(guidellm: str, aiperf: str) -> list[Tool]:
    return [
        Tool("trimtab-engine bench serve", sys.executable, own_command, read_own),
        Tool("guidellm", shutil.which(guidellm), guidellm_command, read_guidellm),
        Tool("aiperf", shutil.which(aiperf), aiperf_command, read_aiperf),
    ]


async def measure(model: str, every: Sequence[Tool]) -> dict[tuple[str, str], Figures]:
    """Run all installed tools, one after the other, against one server."""
    found: dict[tuple[str, str], Figures] = {}
    async with local_server(model, SERVER_FLAGS) as server:
        for kind in KINDS:
            for tool in every:
                if tool.program is not None:
                    print(f"[clients] {tool.name}, {kind}", file=sys.stderr, flush=True)
                    found[tool.name, kind] = await asyncio.to_thread(_run, tool, server.url, model, kind)
    return found


def _run(tool: Tool, url: str, model: str, kind: str) -> Figures:
    """Run a tool.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    assert tool.program is not None
    with tempfile.TemporaryDirectory() as name:
        command = tool.command(tool.program, url, model, kind, Path(name))
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, cwd=name, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{tool.name} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        return tool.read(Path(name))


def version_of(tool: Tool) -> str:
    """Return the tool's reported version."""
    if tool.program is None or tool.read is read_own:
        return ""
    command = ["env", "-u", "PYTHONPATH", tool.program, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS, check=False)
    return done.stdout.split()[-1] if done.stdout.split() else ""


def table(found: dict[tuple[str, str], Figures], every: Sequence[Tool]) -> str:
    lines = [
        "| client | API | completed | failed | requests/s | mean TTFT, ms | mean time per token, ms |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    versions = {tool.name: version_of(tool) for tool in every}
    lines += [
        f"| {name} {versions[name]} | {kind} | {one.completed} | {one.failed} | {one.request_throughput:.2f} | "
        f"{one.ttft_ms:.0f} | {one.itl_ms:.0f} |"
        for (name, kind), one in found.items()
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 1 if a request of any tool failed."""
    parser = argparse.ArgumentParser(prog="clients_bench", description="Other people's load generators on our server.")
    parser.add_argument("model", help="folder with safetensors and a tokenizer")
    parser.add_argument("--guidellm", default="guidellm", metavar="PATH", help="the program (default: on the PATH)")
    parser.add_argument("--aiperf", default="aiperf", metavar="PATH", help="the program (default: on the PATH)")
    options = parser.parse_args(arguments)
    end_on_sigterm()
    every = tools(options.guidellm, options.aiperf)
    for tool in every:
        if tool.program is None:
            print(f"[clients] {tool.name} is not installed: skipped; see docs/results/clients.md", file=sys.stderr)
    found = asyncio.run(measure(options.model, every))
    print(table(found, every))
    wrong = [name for name, one in found.items() if one.failed or one.completed < FEWEST]
    if wrong:
        print(f"[clients] not all requests were answered: {wrong}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
