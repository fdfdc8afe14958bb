"""Comparison of kernels compiled by other Triton versions than the pinned one: a GPU machine may have an older one.

Each version's figures are in a separate file; the page compares them for the kernels' main target.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

PINNED = "3.9"
"""The version in constraints.txt: its figures are in aot.json and in the page's first table."""
TARGET = 90
MANY_REGISTERS = 1.15
"""Ratio of registers from which on the table shows a difference."""

Entry = Mapping[str, Any]
"""A compiled kernel in a results file."""


def file_name(version: str) -> str:
    """Return the file name of this Triton version's figures."""
    release = ".".join(version.split(".")[:2])
    return "aot.json" if release == PINNED else f"aot-triton-{release}.json"


def other_runs(results: Path) -> dict[str, list[Entry]]:
    """Return the entries by version, of every Triton except the pinned one."""
    runs = [json.loads(path.read_text()) for path in sorted(results.glob("aot-triton-*.json"))]
    return {run["triton"]: run["kernels"] for run in runs}


def comparison(pinned: Iterable[Entry], version: str, other: Iterable[Entry], shown: frozenset[str]) -> list[str]:
    """Return a section of the page. Kernels of the cases `shown` are always listed, others if they differ."""
    ours, theirs = _by_place(pinned), _by_place(other)
    both = [place for place in ours if place in theirs and place[2] == TARGET]
    spilled = Counter(entry["target"] for entry in theirs.values() if entry["spill_bytes"])
    spilled_text = ", ".join(f"{count} on sm_{target}" for target, count in sorted(spilled.items())) or "none"
    targets = {place[2] for place in theirs}
    target_names = ", ".join(f"sm_{target}" for target in sorted(targets))
    introduction = (
        f"{len(theirs)} kernels for {target_names} compile and fit; of these spill: {spilled_text}. On sm_{TARGET}, "
        f"registers · shared memory in KiB of important kernels and of all that differ (by {MANY_REGISTERS - 1:.0%} of "
        f"the registers or more, in shared memory, spills or the kind of matrix instructions), by triton {PINNED} "
        f"and by {version}:"
    )
    lines = [
        f"## With triton {version}",
        "",
        introduction,
        "",
        f"| case | kernel | {PINNED} | {version} |",
        "| --- | --- | --- | --- |",
    ]
    for place in both:
        case, kernel, *_ = place
        if has_same_configuration(ours[place], theirs[place]) and (
            case in shown or differs(ours[place], theirs[place])
        ):
            lines.append(f"| {case} | {kernel} | {cell(ours[place])} | {cell(theirs[place])} |")
    missing = [f"{p[0]} ({p[1]}) for sm_{p[2]}" for p in ours if p[2] in targets and p not in theirs]
    if missing:
        lines += ["", f"Not compiled by {version}: {'; '.join(missing)}."]
    return [*lines, ""]


def has_same_configuration(ours: Entry, theirs: Entry) -> bool:
    """Return True if the figures belong to the same configuration: one of the files may be outdated."""
    return all(ours[name] == theirs[name] for name in ("num_warps", "num_stages"))


def differs(ours: Entry, theirs: Entry) -> bool:
    """Return True if the difference is worth showing."""
    few, many = sorted((ours["registers"], theirs["registers"]))
    return many >= MANY_REGISTERS * few or any(
        ours[name] != theirs[name] for name in ("shared_bytes", "spill_bytes", "wgmma")
    )


def cell(entry: Entry) -> str:
    """Format registers · KiB, spills, w."""
    spill = f", spills {entry['spill_bytes']}" if entry["spill_bytes"] else ""
    return f"{entry['registers']} · {entry['shared_bytes'] / 1024:.3g}{spill}{' w' if entry['wgmma'] else ''}"


def _by_place(entries: Iterable[Entry]) -> dict[tuple[str, str, int, int], Entry]:
    """Index by case, kernel, target and, for cases that launch a kernel more than once, launch number."""
    return dict(_placed(entries))


def _placed(entries: Iterable[Entry]) -> Iterator[tuple[tuple[str, str, int, int], Entry]]:
    seen: Counter[tuple[str, str, int]] = Counter()
    for entry in entries:
        place = (entry["case"], entry["kernel"], entry["target"])
        yield (*place, seen[place]), entry
        seen[place] += 1
