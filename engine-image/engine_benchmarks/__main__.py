"""`make bench`: every measurement of the engine on this machine, one after the other: a JSON file, a page, a plot.

Each part is a module that can also be run by itself. Other work on the machine only makes figures worse: the parts take
the best of several rounds, and compare only within one run.
"""

import argparse
import asyncio
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine_benchmarks import decode_bench, live_bench, scheduler_bench
from engine_benchmarks.decode_bench import CONTENDERS, ahead
from engine_benchmarks.output import write_text

SCHEDULER_STEPS = 1000
PACKAGES = ("torch", "transformers", "tokenizers", "fastapi", "msgspec")
PARTS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "scheduler": (
        "scheduler time per step, 20 s",
        lambda model: scheduler_bench.report(scheduler_bench.measure(SCHEDULER_STEPS)),
    ),
    "decode": ("decode and prefill compared with transformers, 7 min", decode_bench.measure_decode),
    "live": (
        "a real server, re-trimmed under load, 1 min",
        lambda model: asdict(asyncio.run(live_bench.measure_live(model))),
    ),
}


def machine() -> dict[str, Any]:
    """Return the machine and versions of the figures."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cpus": len(names),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
    }


def page(results: dict[str, Any], command: str) -> str:
    """Return the results as a Markdown page."""
    where = results["machine"]
    lines = [
        "# Measured on the CPU",
        "",
        f"Machine: {where['cpus']} × {where['cpu']}, Python {where['python']}, "
        + ", ".join(f"{name} {number}" for name, number in where["versions"].items())
        + f". Command: `{command}`. Made by engine_benchmarks; do not edit.",
    ]
    if "decode" in results:
        lines += _decode_lines(results["decode"])
    if "scheduler" in results:
        lines += _scheduler_lines(results["scheduler"])
    if "live" in results:
        lines += ["", "## A real server under load", "", "| what | figure |", "| --- | --- |"]
        lines += [f"| {name} | {_short(value)} |" for name, value in results["live"].items()]
    return "\n".join(lines) + "\n"


def _decode_lines(decode: dict[str, Any]) -> list[str]:
    rates = decode["machine"]
    lines = [
        "",
        "## Decode, tokens/s (SmolLM2-135M, float32, prompt 64, output 64)",
        "",
        (
            f"`whole`: generated tokens over the whole run, prompts included. `decode`: those after the first, over "
            f"the time after the first. `t.`: transformers. Limit: weights read per step ÷ "
            f"{rates['read_gb_per_second']:.1f} GB/s measured, or (batch above 1) FLOPs ÷ the best measured matrix "
            f"rate at that many rows, whichever is lower. {rates['num_threads']} threads, best of the rounds. "
            f"Trimtab: its model runner and sampler, without scheduler and API."
        ),
        "",
        (
            "| batch | whole: Trimtab | t. `generate` | t. `generate_batch` | ahead of `generate` | decode: Trimtab "
            "| t. `generate` | t. `generate_batch` | ahead of `generate` | limit | share of it |"
        ),
        "| --- " * 11 + "|",
    ]
    for row in decode["decode"]:
        cells = [str(row["batch"])]
        for part in (row["whole"], row["decode"]):
            trimtab, *others = (_short(part[name]) for name in CONTENDERS)
            cells += [f"**{trimtab}**", *others, f"{ahead(part) or 0:.2f}×"]
        lines.append("| " + " | ".join([*cells, _short(row["limit"]), f"{row['share_of_limit']:.0%}"]) + " |")
    prefill = decode["prefill"]
    tokens = prefill["tokens_per_second"]
    lines += [
        "",
        (
            f"A prompt of {prefill['num_tokens']} tokens and its first token: **{_short(tokens['trimtab'])} "
            f"tokens/s**, transformers {_short(tokens['generate'])}: {prefill['gflops']:.0f} GFLOP/s, "
            f"{prefill['share_of_limit']:.0%} of the rate of the engine's own GEMMs at that many rows "
            f"({prefill['matrix_gflops']:.0f})."
        ),
    ]
    return lines + [f"\n{name}: {note}" for name, note in decode["notes"].items()]


def _scheduler_lines(scheduler: dict[str, Any]) -> list[str]:
    lines = [
        "",
        "## Scheduler, ms per step: schedule() + update()",
        "",
        "| load | running | p50 | p99 | target p50 |",
        "| --- | --- | --- | --- | --- |",
    ]
    return lines + [
        f"| {m['load']} | {m['running']} | {m['p50_ms']:.3f} | {m['p99_ms']:.3f} | {m['target_p50_ms'] or '–'} |"
        for m in scheduler["measurements"]
    ]


def _short(value: Any) -> str:
    if value is None:
        return "failed"
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 100
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str(value)
    )


def plot(results: dict[str, Any], path: Path) -> None:
    """Plot decode rates as bars, with the limit as a line over each group."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = results["decode"]["decode"]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for offset, name in enumerate(CONTENDERS):
        rates = [row["decode"][name] or 0 for row in rows]
        axes.bar([i + 0.25 * offset for i in range(len(rows))], rates, 0.24, label=name)
    for i, row in enumerate(rows):
        axes.hlines(
            row["limit"], i - 0.15, i + 0.65, colors="black", linestyles="dotted", label="limit" if i == 0 else ""
        )
    axes.set_xticks([i + 0.25 for i in range(len(rows))], [f"batch {row['batch']}" for row in rows])
    axes.set_ylabel("tokens/s")
    axes.set_title("Decode on the CPU, SmolLM2-135M float32")
    axes.legend(loc="upper left")
    figure.tight_layout()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "trimtab"}):
        figure.savefig(path, metadata={"Date": None})


def _measured_before(path: Path, here: dict[str, Any]) -> dict[str, Any]:
    """Return the parts that an earlier run on the same machine and versions has measured."""
    if not path.exists():
        return {}
    before: dict[str, Any] = json.loads(path.read_text())
    return {name: before[name] for name in PARTS if name in before and before["machine"] == here}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench", description="Measure the engine on this machine.")
    parser.add_argument("model", help="folder with safetensors and a tokenizer")
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="folder for JSON, page and plot")
    parser.add_argument(
        "--only", choices=PARTS, action="append", help="measure this part, keep the others; may be repeated"
    )
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {"machine": machine()}
    if options.only:
        results |= _measured_before(options.output / "cpu.json", results["machine"])
    for name in options.only or PARTS:
        about, measure = PARTS[name]
        print(f"[bench] {name}: {about}", file=sys.stderr, flush=True)
        started = time.monotonic()
        results[name] = measure(options.model)
        print(f"[bench] {name}: done in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    text = page(results, "make bench" + "".join(f" ONLY={name}" for name in options.only or ()))
    write_text(options.output / "cpu.json", json.dumps(results, indent=1) + "\n")
    write_text(options.output / "cpu.md", text)
    if "decode" in results:
        plot(results, options.output / "cpu-decode.svg")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
