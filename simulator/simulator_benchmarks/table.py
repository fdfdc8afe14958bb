"""Result table of scenarios, policies, cold starts and seeds: `python -m simulator_benchmarks.table --traces FOLDER`.

Each cell is written to a file as soon as it is done, so that an interrupted run continues, and a part can be run with
`--seconds` or by naming scenarios, policies, seeds and cold starts. Every row lists its finished seeds and the number
of cells with outdated sources, which are computed again. `kubeai@day` is a baseline whose target was the best on
another scenario.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean

from trimtab_simulator.errors import BadRequest

from simulator_benchmarks.cells import Cell, Key, fixed_on, is_current, key_of, parse_policies, run_missing
from simulator_benchmarks.scenarios import SCENARIOS
from simulator_benchmarks.table_page import table_page

POLICIES = "static-n,oracle,hpa-running,keda-queue,kubeai,aibrix-kpa,aibrix-apa,replicas-only,trimtab"
HEADING = (
    "| policy | GPU-hours (spread) | attained (least) | captured | goodput/s | TTFT p95 | reversals | target | seeds |"
)
"""The column of direction changes has the maximum within 10 minutes: of replicas, of a parameter."""
RULER = "|---|---|---|---|---|---|---|---|---|"
FOREIGN_TITLE = "Trimtab and the best baseline with a target from another trace"
FOREIGN_HEADING = (
    "| scenario | Trimtab | cheapest baseline that attains the objectives | GPU-hours of Trimtab | seeds |"
)
TUNER_POLICY = "trimtab"


def fields_of(wanted: Iterable[Key]) -> dict[tuple[str, float], dict[str, list[int]]]:
    """Return the policies and the seeds of each, by scenario and cold start, in the order of the scenarios."""
    order = {scenario.name: index for index, scenario in enumerate(SCENARIOS)}
    fields: dict[tuple[str, float], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for scenario, seed, cold_start, policy in sorted(wanted, key=lambda key: (order[key[0]], key[2])):
        fields[scenario, cold_start][policy].append(seed)
    return fields


def markdown(cells: Mapping[Key, Cell], wanted: Sequence[Key], older: Collection[Key] = ()) -> str:
    """Return GPU-hours and attainment of each policy by scenario and cold start: means over seeds, with the spread of
    hours. Rows list finished seeds and cells with `older` inputs.
    """
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
            *(_row(policy, its, found, _coverage(its, len(policies[policy]), older)) for policy, its in found.items()),
            "",
        ]
    return "\n".join([*parts, *_foreign_target_table(cells, wanted)])


def _coverage(its: Sequence[Cell], num_wanted: int, older: Collection[Key]) -> str:
    num_older = sum(key_of(cell) in older for cell in its)
    return f"{len(its)} of {num_wanted}" + (f", {num_older} older" if num_older else "")


def _foreign_target_table(cells: Mapping[Key, Cell], wanted: Sequence[Key]) -> list[str]:
    """Return a row per scenario: Trimtab and the cheapest baseline with a foreign target that attains the
    objectives.
    """
    rows = []
    for (scenario, cold_start), policies in fields_of(wanted).items():
        tuner_cells = {
            seed: cell
            for seed in policies.get(TUNER_POLICY, ())
            if (cell := cells.get((scenario, seed, cold_start, TUNER_POLICY)))
        }
        baselines = {
            policy: its
            for policy in policies
            if fixed_on(policy) is not None
            and (its := [cell for seed in tuner_cells if (cell := cells.get((scenario, seed, cold_start, policy)))])
        }
        if baselines:
            rows.append(_foreign_target_row(scenario, cold_start, tuner_cells, baselines))
    return [f"### {FOREIGN_TITLE}", "", FOREIGN_HEADING, "|---|---|---|---|---|", *rows, ""] if rows else []


def _foreign_target_row(
    scenario: str, cold_start: float, tuner_cells: Mapping[int, Cell], baselines: Mapping[str, Sequence[Cell]]
) -> str:
    (objective,) = (each.objectives.attain for each in SCENARIOS if each.name == scenario)
    attaining = {policy: its for policy, its in baselines.items() if _mean(its, "attainment") >= objective}
    field = f"| {scenario}, {cold_start:g} s"
    if not attaining:
        closest = max(baselines, key=lambda policy: _mean(baselines[policy], "attainment"))
        its = baselines[closest]
        own = [tuner_cells[cell["seed"]] for cell in its]
        return f"{field} | {_short(own)} | none; closest {closest} {_short(its)} | – | {len(its)} |"
    best = min(attaining, key=lambda policy: _mean(attaining[policy], "gpu_hours"))
    its = attaining[best]
    own = [tuner_cells[cell["seed"]] for cell in its]
    change = _mean(own, "gpu_hours") / _mean(its, "gpu_hours") - 1
    return f"{field} | {_short(own)} | {best} {_short(its)} | {100 * change:+.0f} % | {len(its)} |"


def _mean(its: Sequence[Cell], name: str) -> float:
    return float(mean(cell[name] for cell in its))


def _short(its: Sequence[Cell]) -> str:
    return f"{_mean(its, 'gpu_hours'):.2f} h @ {100 * _mean(its, 'attainment'):.2f} %"


def _row(policy: str, its: Sequence[Cell], by_policy: Mapping[str, Sequence[Cell]], coverage: str) -> str:
    if not its:
        return f"| {policy} | not run | | | | | | | {coverage} |"
    hours = [cell["gpu_hours"] for cell in its]
    attained = [cell["attainment"] for cell in its]
    turns = [cell["reversals_per_knob_per_10min"] for cell in its]
    of_replicas = max(each.get("replicas", 0) for each in turns)
    of_parameters = max(
        (count for each in turns for parameter, count in each.items() if parameter != "replicas"), default=0
    )
    targets = sorted({cell["target"] for cell in its if "target" in cell})
    saved = captured(its, by_policy.get("static-n", ()), by_policy.get("oracle", ()))
    return (
        f"| {policy} | {mean(hours):.2f} ({min(hours):.2f}–{max(hours):.2f}) | {100 * mean(attained):.2f} % "
        f"({100 * min(attained):.2f}) | {'–' if saved is None else f'{100 * saved:.0f} %'} | "
        f"{mean(cell['goodput_tokens_per_s'] for cell in its):,.0f} | {mean(cell['ttft_p95'] for cell in its):.2f} s | "
        f"{of_replicas}, {of_parameters} | {', '.join(f'{target:g}' for target in targets) or '–'} | "
        f"{coverage} |"
    )


def captured(its: Sequence[Cell], fixed: Sequence[Cell], oracle: Sequence[Cell]) -> float | None:
    """Return (static-n − policy) / (static-n − oracle) over common seeds; None if nothing can be saved."""
    seeds = {cell["seed"] for cell in its} & {cell["seed"] for cell in fixed} & {cell["seed"] for cell in oracle}
    if not seeds:
        return None
    own, most, least = (
        mean(cell["gpu_hours"] for cell in cells if cell["seed"] in seeds) for cells in (its, fixed, oracle)
    )
    return (most - own) / (most - least) if most - least > 1e-9 else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute the table and print it as Markdown."""
    parser = argparse.ArgumentParser(prog="python -m simulator_benchmarks.table", description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, help="folder of the development slice")
    parser.add_argument("--scenarios", default=",".join(each.name for each in SCENARIOS))
    parser.add_argument("--policies", default=POLICIES, help="NAME, NAME@TARGET, or NAME@SCENARIO")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--cold-starts", default="60,120,300", help="seconds")
    parser.add_argument("--cells", type=Path, default=Path("tuner-table.jsonl"), help="file of the cells")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--fresh", action="store_true", help="compute all cells again")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no cell after this time; 0: only print")
    parser.add_argument("--html", type=Path, help="write one page with plots")
    given = parser.parse_args(arguments)
    names = [name for name in given.scenarios.split(",") if name]
    unknown = sorted(set(names) - {each.name for each in SCENARIOS})
    if unknown:
        parser.error(f"--scenarios has {', '.join(unknown)}; known are {', '.join(each.name for each in SCENARIOS)}")
    try:
        policies = parse_policies(given.policies)
    except BadRequest as rejected:
        parser.error(str(rejected))
    wanted = [
        (name, int(seed), float(cold), policy)
        for seed in given.seeds.split(",")
        for cold in given.cold_starts.split(",")
        for name in names
        for policy in policies
        if fixed_on(policy) != name
    ]
    cells = run_missing(given.cells, given.traces, wanted, jobs=given.jobs, fresh=given.fresh, seconds=given.seconds)
    older = {key for key in wanted if key in cells and not is_current(cells[key], given.traces)}
    text = markdown(cells, wanted, older)
    print(text)
    if given.html is not None:
        given.html.parent.mkdir(parents=True, exist_ok=True)
        given.html.write_text(table_page(text, cells, fields_of(wanted)))


if __name__ == "__main__":
    main()
