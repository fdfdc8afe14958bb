"""Routers on loads with shared prefixes: `python -m simulator_benchmarks.routing --traces FOLDER`.

Fixed replicas, one rule at a time, on the loads of `simulator_benchmarks.prefix_scenarios`. Each cell is written to a
file as soon as it is done, so that an interrupted run continues; cells whose sources have changed are computed again.
The rules of other routers know the exact caches and queues without delay; `shared-cache-oracle` is Trimtab's rule on
replicas whose prefix caches are one, a bound that no router can reach.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import trimtab_operator.tuner.engine_model
import trimtab_router.scoring
import trimtab_simulator.plant
from trimtab_simulator.plant.routing import RouterKind, RouterSettings
from trimtab_simulator.report import STYLE
from trimtab_simulator.scores import percentile

import simulator_benchmarks.prefix_scenarios
from simulator_benchmarks.prefix_scenarios import PREFIX_SCENARIOS, fixed_fleet

WARM_UP_SHARE = 0.1
"""Share of the time whose requests are left out of the attainment after warm-up: caches begin empty."""
RULES = tuple(kind for kind in RouterKind if kind is not RouterKind.SHARED_CACHE_ORACLE)

Cell = dict[str, Any]


class Key(NamedTuple):
    """One cell: a rule on a scenario with fixed replicas."""

    scenario: str
    replicas: int
    rule: str
    routers: int = 1
    state_interval: float = 0.0
    seed: int = 0


class Part(NamedTuple):
    """Rows of one table."""

    name: str
    scenario: str
    replicas: tuple[int, ...]
    rules: tuple[RouterKind, ...]
    routers: tuple[tuple[int, float], ...] = ((1, 0.0),)
    """(number of routers, seconds between reports of the engines' state)."""

    def keys(self, seeds: Sequence[int]) -> list[Key]:
        """Return the keys of its cells."""
        return [
            Key(self.scenario, count, rule.value, routers, interval, seed)
            for count in self.replicas
            for rule in self.rules
            for routers, interval in self.routers
            for seed in seeds
        ]


PARTS = (
    Part("mooncake", "mooncake", (8,), (*RULES, RouterKind.SHARED_CACHE_ORACLE)),
    Part("old-state", "mooncake", (8,), (RouterKind.TRIMTAB,), ((1, 0.0), (2, 0.05), (2, 1.0))),
    Part("moonp", "moonp", (5, 6, 7, 8), RULES),
    Part("agents", "agents", (3, 4, 6), RULES),
    Part("shared-prefix", "shared-prefix", (8,), RULES),
)


def run_cell(folder: Path, key: Key) -> Cell:
    """Compute one cell."""
    (scenario,) = (each for each in PREFIX_SCENARIOS if each.name == key.scenario)
    router = RouterSettings(RouterKind(key.rule), key.routers, key.state_interval)
    experiment = fixed_fleet(scenario, folder, seed=key.seed, replicas=key.replicas, router=router)
    began = time.process_time()
    outcome = experiment.run_fixed(key.rule)
    judged = experiment.judge(key.rule, outcome)
    warm = [s for s in outcome.served if s.arrival >= WARM_UP_SHARE * outcome.seconds]
    ttfts = sorted(s.ttft for s in outcome.served if s.ttft is not None)
    return key._asdict() | {
        "requests": judged.requests,
        "attained": judged.attainment,
        "attained_warm": fmean(experiment.objectives.met_by(s) for s in warm),
        "ttft_mean": judged.ttft_mean,
        "ttft_p50": judged.ttft_p50,
        "ttft_p90": percentile(ttfts, 90),
        "ttft_p95": judged.ttft_p95,
        "itl_mean": fmean(gap for s in outcome.served if (gap := s.mean_gap) is not None),
        "hit_share": judged.prefix_hit_share,
        "tokens_per_second": judged.throughput_tokens_per_s,
        "preemptions": judged.preemptions,
        "cpu_seconds": round(time.process_time() - began, 1),
        "inputs": _inputs(folder),
    }


@cache
def _inputs(folder: Path) -> str:
    """Return the digest of the traces and of the sources that can change a cell."""
    digest = hashlib.sha256()
    for path in sorted(each for each in folder.iterdir() if each.is_file()):
        digest.update(path.name.encode() + path.read_bytes())
    for package in (trimtab_router.scoring, trimtab_simulator.plant, trimtab_operator.tuner.engine_model):
        for path in sorted(Path(package.__file__ or "").parent.rglob("*.py")):
            digest.update(path.read_bytes())
    digest.update(Path(simulator_benchmarks.prefix_scenarios.__file__).read_bytes())
    return digest.hexdigest()[:16]


def key_of(cell: Mapping[str, Any]) -> Key:
    """Return the key of a cell."""
    return Key(*(cell[name] for name in Key._fields))


def read_cells(path: Path) -> dict[Key, Cell]:
    """Return the cells of earlier runs; of several with one key the last, and none of truncated lines."""
    cells = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            cell = json.loads(line)
        except ValueError:
            continue
        cells[key_of(cell)] = cell
    return cells


def run_missing(path: Path, folder: Path, wanted: Sequence[Key], *, seconds: float) -> dict[Key, Cell]:
    """Compute missing and outdated cells and append each one to the file. None is started after `seconds`."""
    cells = read_cells(path)
    until = time.monotonic() + seconds
    missing = [key for key in wanted if key not in cells or cells[key]["inputs"] != _inputs(folder)]
    path.parent.mkdir(parents=True, exist_ok=True)
    for number, key in enumerate(missing, 1):
        if time.monotonic() >= until:
            break
        cell = cells[key] = run_cell(folder, key)
        with path.open("a") as file:
            file.write(json.dumps(cell) + "\n")
        figures = f"TTFT {cell['ttft_mean']:.3f} s, {100 * cell['attained']:.2f} % ({cell['cpu_seconds']:.0f} s)"
        print(f"{number}/{len(missing)} {' '.join(str(each) for each in key)}: {figures}", file=sys.stderr, flush=True)
    return cells


HEADING = (
    "| replicas | rule | attained | after warm-up | TTFT mean | p90 | p95 | ITL mean | hit tokens | tokens/s | seeds |"
)


def markdown(cells: Mapping[Key, Cell], parts: Sequence[Part], seeds: Sequence[int], inputs: str) -> str:
    """Return the tables, as means over seeds. Rows of outdated cells are marked."""
    lines = []
    for part in parts:
        lines += [f"### {part.name}", "", HEADING, "|" + "---|" * HEADING.count(" | ") + "---|"]
        rows: dict[Key, list[Cell]] = {}
        for key in part.keys(seeds):
            if key in cells:
                rows.setdefault(key._replace(seed=0), []).append(cells[key])
        lines += [_row(key, its, inputs) for key, its in rows.items()]
        lines.append("")
    return "\n".join(lines)


def _row(key: Key, its: Sequence[Cell], inputs: str) -> str:
    def mean(name: str) -> float:
        return fmean(cell[name] for cell in its)

    label = key.rule
    if key.routers > 1 or key.state_interval:
        label += f", {key.routers} routers, state every {1000 * key.state_interval:g} ms"
    older = " (older)" if any(cell["inputs"] != inputs for cell in its) else ""
    return (
        f"| {key.replicas} | {label} | {100 * mean('attained'):.2f} % | {100 * mean('attained_warm'):.2f} % "
        f"| {mean('ttft_mean'):.3f} s | {mean('ttft_p90'):.2f} s | {mean('ttft_p95'):.2f} s "
        f"| {1000 * mean('itl_mean'):.1f} ms | {100 * mean('hit_share'):.1f} % "
        f"| {mean('tokens_per_second'):,.0f} | {len(its)}{older} |"
    )


def page(text: str) -> str:
    """Return the tables as one HTML file without scripts."""
    parts = ["<h1>Routers on loads with shared prefixes</h1>"]
    for block in text.split("### ")[1:]:
        title, *lines = block.strip().splitlines()
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in [rows[0], *rows[2:]]
        )
        parts.append(f"<h2>{html.escape(title)}</h2><table>{body}</table>")
    head = f'<meta charset="utf-8"><title>Routers</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en">{head}{"".join(parts)}</html>\n'


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute the tables and print them as Markdown."""
    parser = argparse.ArgumentParser(prog="python -m simulator_benchmarks.routing", description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, help="folder of the development slice")
    parser.add_argument("--tables", default=",".join(part.name for part in PARTS), help="tables, by name")
    parser.add_argument("--rules", help="rules of routers; default: as in each table")
    parser.add_argument("--replicas", help="replica counts; default: as in each table")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--cells", type=Path, default=Path("routing.jsonl"), help="file of the cells, one JSON a line")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no cell after this time; 0: only print")
    parser.add_argument("--html", type=Path, help="write one page with the tables")
    given = parser.parse_args(arguments)
    parts = _selected(parser, given.tables, given.rules, given.replicas)
    seeds = [int(seed) for seed in given.seeds.split(",")]
    wanted = list(dict.fromkeys(key for part in parts for key in part.keys(seeds)))
    cells = run_missing(given.cells, given.traces, wanted, seconds=given.seconds)
    text = markdown(cells, parts, seeds, _inputs(given.traces))
    print(text)
    if given.html is not None:
        given.html.parent.mkdir(parents=True, exist_ok=True)
        given.html.write_text(page(text))


def _selected(parser: argparse.ArgumentParser, tables: str, rules: str | None, replicas: str | None) -> list[Part]:
    names = tables.split(",")
    unknown = sorted(set(names) - {part.name for part in PARTS})
    if unknown:
        parser.error(f"--tables has {', '.join(unknown)}; known are {', '.join(part.name for part in PARTS)}")
    chosen = [part for part in PARTS if part.name in names]
    if rules is not None:
        try:
            kinds = tuple(RouterKind(rule) for rule in rules.split(","))
        except ValueError as error:
            parser.error(f"--rules: {error}; known are {', '.join(RouterKind)}")
        chosen = [part._replace(rules=kinds) for part in chosen]
    if replicas is not None:
        chosen = [part._replace(replicas=tuple(int(count) for count in replicas.split(","))) for part in chosen]
    return chosen


if __name__ == "__main__":
    main()
