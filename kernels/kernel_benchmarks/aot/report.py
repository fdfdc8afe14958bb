"""Report of ahead-of-time compilation in docs/results: aot.json (or a file per other Triton version: other_versions.py)
for programs, kernels.md for readers.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from trimtab_kernels.launch.jit import triton

from kernel_benchmarks.aot.cases import all_cases
from kernel_benchmarks.aot.compiler import Compiled
from kernel_benchmarks.aot.hot_loops import hot_loop_table
from kernel_benchmarks.aot.other_versions import Entry, cell, comparison, file_name, other_runs

COMMAND = "make aot"
INTRODUCTION = """**Nothing on this page is measured on a device:** registers, spills and shared memory are read from
the compiled machine code. Measurements (`make bench-gpu`) are in [gpu.md](gpu.md), compared with predictions in
[gpu-notes.md](gpu-notes.md)."""
LEGEND = """Per target (sm_80 A100, sm_89 L40, sm_90 H200, sm_100 B200): registers per thread · shared memory in KiB,
and bytes spilled per thread, if any. `w` marks warp-group matrix instructions (sm_90).
A dash: not compiled for that target, or it lacks float8. A run of some targets (`--targets`) keeps the others' figures,
which may then belong to older sources."""


def recorded_keys(results: Path | None) -> set[str]:
    """Return the keys of the committed figures, of all Triton versions; empty if there are none."""
    files = sorted(results.glob("aot*.json")) if results else []
    return {entry["key"] for file in files for entry in json.loads(file.read_text())["kernels"]}


def write_report(results: Path, compiled: list[Compiled]) -> None:
    """Write this Triton's file, and the page from all files. A run of some targets keeps the others' figures. Equal
    results give equal files.
    """
    file = results / file_name(triton.__version__)
    entries = [asdict(entry) for entry in compiled]
    lines = ",\n".join(json.dumps(entry) for entry in [*entries, *_of_other_targets(file, entries)])
    head = json.dumps({"command": COMMAND, "triton": triton.__version__})[:-1]
    file.write_text(f'{head}, "kernels": [\n{lines}\n]}}\n')
    pinned = results / "aot.json"
    if pinned.exists():
        run = json.loads(pinned.read_text())
        (results / "kernels.md").write_text(page(run["triton"], run["kernels"], other_runs(results)))


def _of_other_targets(file: Path, entries: Sequence[Entry]) -> list[Entry]:
    """Return the file's entries of targets that this run omitted."""
    targets = {entry["target"] for entry in entries}
    before = json.loads(file.read_text())["kernels"] if file.exists() else []
    return [entry for entry in before if entry["target"] not in targets]


def page(version: str, pinned: list[Entry], others: dict[str, list[Entry]]) -> str:
    """Return the pinned Triton's figures, its hot loops, and a section for each other version."""
    shown = frozenset(case.name for case in all_cases() if case.in_sample)
    sections = [hot_loop_table([Compiled.of_entry(entry) for entry in pinned])]
    sections += [comparison(pinned, other, entries, shown) for other, entries in others.items()]
    return markdown(version, pinned) + "".join("\n" + "\n".join(section) for section in sections)


def markdown(version: str, compiled: Sequence[Entry]) -> str:
    """Return the page: one row per case and kernel, with all its targets."""
    lines = [
        "# The GPU kernels, compiled ahead of time",
        "",
        f"Made by `{COMMAND}` (triton {version}); do not edit. {INTRODUCTION}",
        "",
        "## Resources",
        "",
        LEGEND,
        "",
        "| case | kernel | warps, stages | sm_80 | sm_89 | sm_90 | sm_100 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows: dict[tuple[str, str], dict[int, Entry]] = {}
    for entry in compiled:
        rows.setdefault((entry["case"], entry["kernel"]), {})[entry["target"]] = entry
    for (case, kernel), targets in rows.items():
        shown = targets.get(90) or next(iter(targets.values()))
        cells = " | ".join(_cell(targets.get(target)) for target in (80, 89, 90, 100))
        lines.append(f"| {case} | {kernel} | {shown['num_warps']}, {shown['num_stages']} | {cells} |")
    return "\n".join(lines) + "\n"


def _cell(entry: Entry | None) -> str:
    return "–" if entry is None else cell(entry)
