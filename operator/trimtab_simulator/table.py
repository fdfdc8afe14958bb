"""The table of all scenarios, policies, cold starts and seeds: `python -m trimtab_simulator.table --traces FOLDER`.

Each cell is written to a file as soon as it is done, so that a run that was cut off goes on where it was, and a part of
the table can be run with `--seconds` or by naming scenarios, policies, seeds and cold starts. The table says of every
row which seeds are in. Cells of the file that the sources no longer yield are done again with --fresh.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from statistics import mean
from typing import Any

from trimtab_simulator.policies.names import Entry, parse_entries
from trimtab_simulator.results import compete, without_plots
from trimtab_simulator.scenarios import SCENARIOS
from trimtab_simulator.table_page import table_page

POLICIES = "static-n,oracle,hpa-running,keda-queue,kubeai,aibrix-kpa,aibrix-apa,replicas-only,trimtab"
HEADING = "| policy | GPU-hours (spread) | attained (least) | captured | goodput/s | TTFT p95 | turns | target | in |"
"""Turns of direction in 10 minutes at most: of replicas, of a knob."""
RULER = "|---|---|---|---|---|---|---|---|---|"

Cell = dict[str, Any]
"""One policy on one field: scenario, seed, cold_start, and its score."""
Key = tuple[str, int, float, str]
"""Names a cell: scenario, seed, cold start and policy."""


def run_cell(folder: Path, scenario: str, seed: int, cold_start: float, policy: str) -> Cell:
    """Replay one."""
    (found,) = (each for each in SCENARIOS if each.name == scenario)
    (entry,) = parse_entries(policy)
    began = time.process_time()
    contest = without_plots(found.contest(folder, seed=seed, cold_start=cold_start))
    result = compete(contest, entry)
    cell: Cell = {"scenario": scenario, "seed": seed, "cold_start": cold_start}
    return cell | result.to_json() | {"cpu_seconds": round(time.process_time() - began, 1)}


def key_of(cell: Cell) -> Key:
    """Which cell it is."""
    return cell["scenario"], cell["seed"], cell["cold_start"], cell["policy"]


def read_cells(path: Path) -> dict[Key, Cell]:
    """What an earlier run has written; a line that was cut off is left out."""
    cells = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            cell = json.loads(line)
        except ValueError:
            continue
        cells[key_of(cell)] = cell
    return cells


def fill(
    path: Path, folder: Path, wanted: Iterable[Key], *, jobs: int, fresh: bool, seconds: float = math.inf
) -> dict[Key, Cell]:
    """Run what is missing, and write each cell when it is done. Nothing is begun after so many seconds."""
    cells = read_cells(path)
    missing = [key for key in wanted if fresh or key not in cells]
    until = time.monotonic() + seconds
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for cell in cells.values():
            file.write(json.dumps(cell) + "\n")
        file.flush()
        with ProcessPoolExecutor(jobs) as pool:
            running: set[Future[Cell]] = set()
            left, count = iter(missing), 0
            while True:
                while len(running) < jobs and time.monotonic() < until and (key := next(left, None)) is not None:
                    running.add(pool.submit(run_cell, folder, *key))
                if not running:
                    return cells
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for one in done:
                    cell, count = one.result(), count + 1
                    cells[key_of(cell)] = cell
                    file.write(json.dumps(cell) + "\n")
                    file.flush()
                    _tell(cell, count, len(missing))


def _tell(cell: Cell, count: int, total: int) -> None:
    told = f"{cell['scenario']} seed {cell['seed']} cold {cell['cold_start']:g} {cell['policy']}"
    figures = f"{cell['gpu_hours']:.2f} h @ {100 * cell['attainment']:.2f} % ({cell['cpu_seconds']:.0f} s)"
    print(f"{count}/{total} {told}: {figures}", file=sys.stderr, flush=True)


def fields_of(wanted: Iterable[Key]) -> dict[tuple[str, float], dict[str, list[int]]]:
    """By scenario and cold start, in the order of the scenarios: the policies, and the seeds of each."""
    order = {scenario.name: index for index, scenario in enumerate(SCENARIOS)}
    fields: dict[tuple[str, float], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for scenario, seed, cold_start, policy in sorted(wanted, key=lambda key: (order[key[0]], key[2])):
        fields[scenario, cold_start][policy].append(seed)
    return fields


def markdown(cells: Mapping[Key, Cell], wanted: Sequence[Key]) -> str:
    """Hours and attainment of each policy by scenario and cold start: means over seeds, with the spread of hours. Rows
    say which of their seeds are in."""
    parts = []
    for (scenario, cold_start), policies in fields_of(wanted).items():
        found = {
            policy: [cells[key] for seed in seeds if (key := (scenario, seed, cold_start, policy)) in cells]
            for policy, seeds in policies.items()
        }
        parts += [
            f"### {scenario}, cold start {cold_start:g} s",
            "",
            HEADING,
            RULER,
            *(_row(policy, its, found, len(policies[policy])) for policy, its in found.items()),
            "",
        ]
    return "\n".join(parts)


def _row(policy: str, its: Sequence[Cell], by_policy: Mapping[str, Sequence[Cell]], num_wanted: int) -> str:
    if not its:
        return f"| {policy} | not run | | | | | | | 0 of {num_wanted} |"
    hours = [cell["gpu_hours"] for cell in its]
    attained = [cell["attainment"] for cell in its]
    turns = [cell["reversals_per_knob_per_10min"] for cell in its]
    of_replicas = max(each.get("replicas", 0) for each in turns)
    of_knobs = max((count for each in turns for knob, count in each.items() if knob != "replicas"), default=0)
    targets = sorted({cell["target"] for cell in its if "target" in cell})
    saved = captured(its, by_policy.get("static-n", ()), by_policy.get("oracle", ()))
    return (
        f"| {policy} | {mean(hours):.2f} ({min(hours):.2f}–{max(hours):.2f}) | {100 * mean(attained):.2f} % "
        f"({100 * min(attained):.2f}) | {'–' if saved is None else f'{100 * saved:.0f} %'} | "
        f"{mean(cell['goodput_tokens_per_s'] for cell in its):,.0f} | {mean(cell['ttft_p95'] for cell in its):.2f} s | "
        f"{of_replicas}, {of_knobs} | {', '.join(f'{target:g}' for target in targets) or '–'} | "
        f"{len(its)} of {num_wanted} |"
    )


def captured(its: Sequence[Cell], fixed: Sequence[Cell], oracle: Sequence[Cell]) -> float | None:
    """(static-n − its) / (static-n − oracle) over the seeds that all three have; None where nothing can be saved."""
    seeds = {cell["seed"] for cell in its} & {cell["seed"] for cell in fixed} & {cell["seed"] for cell in oracle}
    if not seeds:
        return None
    own, most, least = (
        mean(cell["gpu_hours"] for cell in cells if cell["seed"] in seeds) for cells in (its, fixed, oracle)
    )
    return (most - own) / (most - least) if most - least > 1e-9 else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the table and print it as Markdown."""
    parser = argparse.ArgumentParser(prog="python -m trimtab_simulator.table", description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, help="folder of the development slice")
    parser.add_argument("--scenarios", default=",".join(each.name for each in SCENARIOS))
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--cold-starts", default="60,120,300", help="seconds")
    parser.add_argument("--cells", type=Path, default=Path("tuner-table.jsonl"), help="where cells are kept")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--fresh", action="store_true", help="do again what is there")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no cell after so long; 0: only show")
    parser.add_argument("--html", type=Path, help="write one page with plots")
    given = parser.parse_args(arguments)
    names = [name for name in given.scenarios.split(",") if name]
    unknown = sorted(set(names) - {each.name for each in SCENARIOS})
    if unknown:
        parser.error(f"--scenarios has {', '.join(unknown)}; known are {', '.join(each.name for each in SCENARIOS)}")
    entries: list[Entry] = parse_entries(given.policies)
    wanted = [
        (name, int(seed), float(cold), entry.label)
        for seed in given.seeds.split(",")
        for cold in given.cold_starts.split(",")
        for name in names
        for entry in entries
    ]
    cells = fill(given.cells, given.traces, wanted, jobs=given.jobs, fresh=given.fresh, seconds=given.seconds)
    text = markdown(cells, wanted)
    print(text)
    if given.html is not None:
        given.html.write_text(table_page(text, cells, fields_of(wanted)))


if __name__ == "__main__":
    main()
