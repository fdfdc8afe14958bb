"""Result table of scenarios, policies, cold starts and seeds: `python -m simulator_benchmarks.table --traces FOLDER`.

All policies run at a cold start of 120 s; fixed replicas, the oracle and the tuner also at 5 to 300 s. Each cell is
stored when it is done, so that an interrupted run continues. `--only` selects cells by patterns of
`scenario/cold start/policy/seed`, such as `day/120/*/0`; the others are listed as not run. Rows have means over their
finished seeds, and count cells with outdated sources, which are computed again.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from trimtab_simulator import search_cache
from trimtab_simulator.policies.names import WITH_OBJECTIVES, WITH_TARGET

from simulator_benchmarks.cells import OTHER, Cell, Key, is_current, key_of, run_missing
from simulator_benchmarks.scenarios import SCENARIOS
from simulator_benchmarks.table_page import table_page

FIXED, ORACLE, TUNER = "static-n", "oracle", "trimtab"
PUBLISHED = ("gpustack@8",)
"""Baselines with the target of their own documentation."""
POLICIES = (
    FIXED,
    ORACLE,
    TUNER,
    "trimtab-restarted",
    "replicas-only",
    *WITH_TARGET,
    *(f"{name}{OTHER}" for name in WITH_TARGET),
    *PUBLISHED,
    *WITH_OBJECTIVES,
)
COLD_STARTS = (5.0, 15.0, 30.0, 60.0, 120.0, 300.0)
MAIN_COLD_START = 120.0
"""Seconds; other cold starts are run with three policies only."""
SEEDS = (0, 1, 2)

COLUMNS = (
    "policy",
    "GPU-hours (spread)",
    "attained (least)",
    "captured",
    "of oracle",
    "TTFT p95",
    "reversals",
    "target",
)
"""`captured`: (static-n - hours) / (static-n - oracle). `reversals`: the most within 10 minutes, of replicas and of a
parameter.
"""

Row = dict[str, Any]
"""One policy on one scenario and cold start, over its finished seeds."""


def wanted_cells(only: Sequence[str]) -> list[Key]:
    """Return the cells that match any of the patterns; all without patterns."""
    keys = [
        (scenario.name, seed, cold_start, policy)
        for scenario in SCENARIOS
        for cold_start in ((scenario.cold_start,) if scenario.cold_start is not None else COLD_STARTS)
        for policy in POLICIES
        if cold_start in (MAIN_COLD_START, scenario.cold_start) or policy in (FIXED, ORACLE, TUNER)
        for seed in SEEDS
    ]
    return [key for key in keys if not only or any(fnmatchcase(label_of(key), pattern) for pattern in only)]


def label_of(key: Key) -> str:
    """Return a cell's label for patterns and progress."""
    scenario, seed, cold_start, policy = key
    return f"{scenario}/{cold_start:g}/{policy}/{seed}"


def rows_of(cells: Mapping[Key, Cell], wanted: Iterable[Key], older: Collection[Key] = ()) -> list[Row]:
    """Return a row per scenario, cold start and policy, in the order of `wanted`; without cells it has no figures."""
    fields: dict[tuple[str, float], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for scenario, seed, cold_start, policy in wanted:
        fields[scenario, cold_start][policy].append(seed)
    rows = []
    for (scenario, cold_start), policies in fields.items():
        found = {
            policy: [cells[key] for seed in seeds if (key := (scenario, seed, cold_start, policy)) in cells]
            for policy, seeds in policies.items()
        }
        for policy, its in found.items():
            row: Row = {"scenario": scenario, "cold_start": cold_start, "policy": policy}
            rows.append(row | _figures(its, found) | {"wanted": len(policies[policy])} | _count_older(its, older))
    return rows


def _count_older(its: Sequence[Cell], older: Collection[Key]) -> Row:
    count = sum(key_of(cell) in older for cell in its)
    return {"older": count} if count else {}


def _figures(its: Sequence[Cell], by_policy: Mapping[str, Sequence[Cell]]) -> Row:
    if not its:
        return {"seeds": []}
    reversals = [cell["reversals_per_knob_per_10min"] for cell in its]
    fixed, oracle = by_policy.get(FIXED, ()), by_policy.get(ORACLE, ())
    best = {cell["seed"]: cell["gpu_hours"] for cell in oracle}
    common = [cell for cell in its if cell["seed"] in best]
    row: Row = {
        "seeds": [cell["seed"] for cell in its],
        "hours": [round(cell["gpu_hours"], 3) for cell in its],
        "attained": [round(cell["attainment"], 5) for cell in its],
        "captured": captured(its, fixed, oracle),
        "of_oracle": None,
        "ttft_p95": mean(cell["ttft_p95"] for cell in its),
        "recomputed": mean(cell["preempted_token_share"] for cell in its),
        "reversals": [
            max(each.get("replicas", 0) for each in reversals),
            max((n for each in reversals for name, n in each.items() if name != "replicas"), default=0),
        ],
        "targets": sorted({cell["target"] for cell in its if "target" in cell}),
    }
    if common:
        row["of_oracle"] = mean(cell["gpu_hours"] for cell in common) / mean(best[cell["seed"]] for cell in common)
    return row


def captured(its: Sequence[Cell], fixed: Sequence[Cell], oracle: Sequence[Cell]) -> float | None:
    """Return (static-n − policy) / (static-n − oracle) over common seeds; None if nothing can be saved."""
    seeds = {cell["seed"] for cell in its} & {cell["seed"] for cell in fixed} & {cell["seed"] for cell in oracle}
    if not seeds:
        return None
    own, most, least = (
        mean(cell["gpu_hours"] for cell in cells if cell["seed"] in seeds) for cells in (its, fixed, oracle)
    )
    return (most - own) / (most - least) if most - least > 1e-9 else None


class Summary(NamedTuple):
    """A policy over all scenarios, cold starts and seeds that were run."""

    policy: str
    cells: int
    attainable: int
    """Cells whose objectives the oracle attains."""
    attained: int
    """Cells whose objectives the policy attains."""
    of_oracle: float | None
    """Mean of its hours as a multiple of the oracle's."""


def summarize(rows: Sequence[Row]) -> list[Summary]:
    """Return a summary of each policy."""
    objective = {scenario.name: scenario.objectives.attain for scenario in SCENARIOS}
    attains = {
        (row["policy"], row["scenario"], row["cold_start"], seed): share >= objective[row["scenario"]]
        for row in rows
        for seed, share in zip(row["seeds"], row.get("attained", ()), strict=True)
    }
    attainable = {tuple(field) for (policy, *field), value in attains.items() if policy == ORACLE and value}
    found = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        its = [value for (name, *field), value in attains.items() if name == policy and tuple(field) in attainable]
        count = sum(name == policy for name, *_ in attains)
        ratios = [row["of_oracle"] for row in rows if row["policy"] == policy and row.get("of_oracle") is not None]
        found.append(Summary(policy, count, len(its), sum(its), mean(ratios) if ratios else None))
    return found


def markdown(rows: Sequence[Row]) -> str:
    """Return the summary of all policies, and a table per scenario and cold start that was run."""
    lines = [
        "### All scenarios",
        "",
        "| policy | cells | attainable | attained | hours of the oracle's |",
        "|---|---|---|---|---|",
    ]
    for each in summarize(rows):
        ratio = "–" if each.of_oracle is None else f"{each.of_oracle:.2f}"
        lines.append(f"| {each.policy} | {each.cells} | {each.attainable} | {each.attained} | {ratio} |")
    by_field: dict[tuple[str, float], list[Row]] = defaultdict(list)
    for row in rows:
        by_field[row["scenario"], row["cold_start"]].append(row)
    for (scenario, cold_start), its in by_field.items():
        if not any(row["seeds"] for row in its):
            continue
        lines += ["", f"### {scenario}, cold start {cold_start:g} s", ""]
        lines += ["| " + " | ".join((*COLUMNS, "seeds")) + " |", "|---" * (len(COLUMNS) + 1) + "|", *map(_line, its)]
    return "\n".join([*lines, ""])


def _line(row: Row) -> str:
    older = f", {row['older']} older" if "older" in row else ""
    coverage = f"{len(row['seeds'])} of {row['wanted']}{older}"
    if not row["seeds"]:
        return f"| {row['policy']} | not run |" + " |" * (len(COLUMNS) - 2) + f" {coverage} |"
    hours, attained = row["hours"], row["attained"]
    cells = (
        row["policy"],
        f"{mean(hours):.2f} ({min(hours):.2f}–{max(hours):.2f})",
        f"{100 * mean(attained):.2f} % ({100 * min(attained):.2f})",
        "–" if row["captured"] is None else f"{100 * row['captured']:.0f} %",
        "–" if row["of_oracle"] is None else f"{row['of_oracle']:.2f}",
        f"{row['ttft_p95']:.2f} s",
        ", ".join(map(str, row["reversals"])),
        ", ".join(f"{target:g}" for target in row["targets"]) or "–",
        coverage,
    )
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute the table and print it as Markdown."""
    parser = argparse.ArgumentParser(
        prog="python -m simulator_benchmarks.table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--traces", type=Path, required=True, help="folder of the development slice")
    parser.add_argument("--only", default="", help="patterns of cells, separated by commas")
    parser.add_argument("--cells", type=Path, default=search_cache.folder() / "table.jsonl", help="file of the cells")
    parser.add_argument("--jobs", type=int, default=1, help="cells at the same time")
    parser.add_argument("--fresh", action="store_true", help="compute all cells again")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no cell after this time; 0: only print")
    parser.add_argument("--json", type=Path, help="write the rows as JSON")
    parser.add_argument("--html", type=Path, help="write one page with plots")
    given = parser.parse_args(arguments)
    only = [pattern for pattern in given.only.split(",") if pattern]
    wanted = wanted_cells(only)
    if not wanted:
        parser.error(f"--only: no cell matches {given.only}; patterns are scenario/cold start/policy/seed")
    cells = run_missing(given.cells, given.traces, wanted, jobs=given.jobs, fresh=given.fresh, seconds=given.seconds)
    older = {key for key in wanted if key in cells and not is_current(cells[key], given.traces)}
    rows = rows_of(cells, wanted, older)
    print(markdown(rows))
    if given.json is not None:
        given.json.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows if row["seeds"]) + "\n]\n")
    if given.html is not None:
        given.html.write_text(table_page(markdown(rows), rows))


if __name__ == "__main__":
    main()
