"""The same kernels compiled by another Triton than the one the project pins: a GPU machine may have an older one.

Each version's figures have a file of their own; the page compares them for the target that the kernels are written for.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

PINNED = "3.9"
"""Of constraints.txt: its figures are aot.json's and the page's first table."""
TARGET = 90
MANY_REGISTERS = 1.15
"""As many times the registers are a difference that the table shows."""

Entry = Mapping[str, Any]
"""A compiled kernel as the file has it."""


def file_name(version: str) -> str:
    """Where the figures of this Triton are kept."""
    release = ".".join(version.split(".")[:2])
    return "aot.json" if release == PINNED else f"aot-triton-{release}.json"


def other_runs(results: Path) -> dict[str, list[Entry]]:
    """Entries by version, of every Triton but the pinned one."""
    runs = [json.loads(path.read_text()) for path in sorted(results.glob("aot-triton-*.json"))]
    return {run["triton"]: run["kernels"] for run in runs}


def comparison(pinned: Iterable[Entry], version: str, other: Iterable[Entry], shown: frozenset[str]) -> list[str]:
    """A section of the page. Kernels of the cases `shown` are listed in any case, others where they differ."""
    ours, theirs = _by_place(pinned), _by_place(other)
    both = [place for place in ours if place in theirs and place[2] == TARGET]
    spilled = Counter(entry["target"] for entry in theirs.values() if entry["spill_bytes"])
    told = ", ".join(f"{count} on sm_{target}" for target, count in sorted(spilled.items())) or "none"
    targets = {place[2] for place in theirs}
    told_targets = ", ".join(f"sm_{target}" for target in sorted(targets))
    introduction = (
        f"{len(theirs)} kernels for {told_targets} compile and fit; of these spill: {told}. On sm_{TARGET}, registers "
        f"· shared memory in KiB of the important kernels and of all that differ (by {MANY_REGISTERS - 1:.0%} of the "
        f"registers or more, in shared memory, in spills or in the kind of matrix instructions), by triton {PINNED} "
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
        if launched_alike(ours[place], theirs[place]) and (case in shown or differs(ours[place], theirs[place])):
            lines.append(f"| {case} | {kernel} | {cell(ours[place])} | {cell(theirs[place])} |")
    missing = [f"{p[0]} ({p[1]}) for sm_{p[2]}" for p in ours if p[2] in targets and p not in theirs]
    if missing:
        lines += ["", f"Not compiled by {version}: {'; '.join(missing)}."]
    return [*lines, ""]


def launched_alike(ours: Entry, theirs: Entry) -> bool:
    """Whether the figures are of the same configuration: one of the files may be older than a change."""
    return all(ours[name] == theirs[name] for name in ("num_warps", "num_stages"))


def differs(ours: Entry, theirs: Entry) -> bool:
    """Whether a reader should see both."""
    few, many = sorted((ours["registers"], theirs["registers"]))
    return many >= MANY_REGISTERS * few or any(
        ours[name] != theirs[name] for name in ("shared_bytes", "spill_bytes", "wgmma")
    )


def cell(entry: Entry) -> str:
    """registers · KiB, spills, w."""
    spill = f", spills {entry['spill_bytes']}" if entry["spill_bytes"] else ""
    return f"{entry['registers']} · {entry['shared_bytes'] / 1024:.3g}{spill}{' w' if entry['wgmma'] else ''}"


def _by_place(entries: Iterable[Entry]) -> dict[tuple[str, str, int, int], Entry]:
    """By case, kernel, target and, where a case launches a kernel more than once, which time."""
    return dict(_placed(entries))


def _placed(entries: Iterable[Entry]) -> Iterator[tuple[tuple[str, str, int, int], Entry]]:
    seen: Counter[tuple[str, str, int]] = Counter()
    for entry in entries:
        place = (entry["case"], entry["kernel"], entry["target"])
        yield (*place, seen[place]), entry
        seen[place] += 1
