"""Writes what ahead-of-time compilation found into docs/results: aot.json for machines, kernels.md for readers."""

import json
from dataclasses import asdict
from pathlib import Path

from trimtab_kernels.aot.compiler import Compiled
from trimtab_kernels.aot.predictions import PREDICTIONS
from trimtab_kernels.jit import triton

COMMAND = "make aot"
INTRODUCTION = """No GPU was at hand: **nothing on this page is measured on a device.** Registers, spills and shared
memory are those of the compiled machine code. `make bench-gpu` measures."""
LEGEND = """Per target (sm_80 A100, sm_89 L40, sm_90 H200, sm_100 B200): registers per thread · shared memory in KiB,
and bytes spilled per thread where there are any. `w` marks warp-group matrix instructions (sm_90).
A dash: that target was not compiled in this run (`--targets`), or lacks float8."""


def recorded_keys(results: Path | None) -> set[str]:
    """Keys of the committed figures; none when there are none."""
    path = results / "aot.json" if results else None
    if path is None or not path.exists():
        return set()
    return {entry["key"] for entry in json.loads(path.read_text())["kernels"]}


def write_report(results: Path, compiled: list[Compiled]) -> None:
    """Write both files. Equal results give equal files."""
    entries = ",\n".join(json.dumps(asdict(entry)) for entry in compiled)
    head = json.dumps({"command": COMMAND, "triton": triton.__version__})[:-1]
    (results / "aot.json").write_text(f'{head}, "kernels": [\n{entries}\n]}}\n')
    (results / "kernels.md").write_text(markdown(compiled))


def markdown(compiled: list[Compiled]) -> str:
    """The page: predictions first, then one row per case with all its targets."""
    lines = [
        "# The GPU kernels, compiled ahead of time",
        "",
        f"Made by `{COMMAND}` (triton {triton.__version__}); do not edit. {INTRODUCTION}",
        "",
        "## What is asked, and what is predicted",
        "",
        "| what | bar | measured | prediction, and why |",
        "| --- | --- | --- | --- |",
        *[f"| {p.what} | {p.bar} | not measured | {p.prediction} |" for p in PREDICTIONS],
        "",
        "## Resources",
        "",
        LEGEND,
        "",
        "| case | kernel | warps, stages | sm_80 | sm_89 | sm_90 | sm_100 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows: dict[tuple[str, str], dict[int, Compiled]] = {}
    for entry in compiled:
        rows.setdefault((entry.case, entry.kernel), {})[entry.target] = entry
    for (case, kernel), targets in rows.items():
        shown = targets.get(90) or next(iter(targets.values()))
        cells = " | ".join(_cell(targets.get(target)) for target in (80, 89, 90, 100))
        lines.append(f"| {case} | {kernel} | {shown.num_warps}, {shown.num_stages} | {cells} |")
    return "\n".join(lines) + "\n"


def _cell(entry: Compiled | None) -> str:
    if entry is None:
        return "–"
    spill = f", spills {entry.spill_bytes}" if entry.spill_bytes else ""
    return f"{entry.registers} · {entry.shared_bytes / 1024:.3g}{spill}{' w' if entry.wgmma else ''}"
