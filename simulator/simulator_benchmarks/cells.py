"""The cells of the table of results: one policy on one scenario, kept in a file as soon as it was replayed.

A cell knows what it was made from: the traces, the scenarios, and the sources that can change it. One whose inputs have
changed since is done again, and until then it is told apart from those that still hold.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import lru_cache
from pathlib import Path
from typing import Any

import trimtab_operator.tuner
import trimtab_operator.tuner.engine_model
import trimtab_simulator
from trimtab_simulator.contest import Contest
from trimtab_simulator.errors import BadRequest
from trimtab_simulator.policies.names import WITH_TARGET, Entry, parse_entries
from trimtab_simulator.results import compete, hindsight_target, without_plots

import simulator_benchmarks.scenarios
from simulator_benchmarks.scenarios import SCENARIOS, Scenario

OWN = ("trimtab", "replicas-only")
"""Policies that ask the tuner: whatever of it changes, changes them."""
UNUSED_MODULES = ("report", "memo")
"""Modules of the simulator that no replay depends on."""

Cell = dict[str, Any]
"""One policy on one field: scenario, seed, cold_start, its score, and its inputs' digest."""
Key = tuple[str, int, float, str]
"""Names a cell: scenario, seed, cold start and policy."""


def parse_policies(text: str) -> list[str]:
    """The policies of `NAME[@TARGET][,NAME…]`, each once. A rival's target may be a scenario: the best one there."""
    names = []
    for part in (part.strip() for part in text.split(",")):
        name, at, where = part.partition("@")
        if at and where in _scenarios():
            if name not in WITH_TARGET:
                raise BadRequest(f"--policies {part}: {name} has no target to be fixed on {where}; leave out @{where}")
            names.append(part)
        elif name in WITH_TARGET and where.isalpha():
            known = ", ".join(_scenarios())
            raise BadRequest(f"--policies {part}: behind the @ stands a number above 0, or one of {known}")
        else:
            names += [entry.label for entry in parse_entries(part)]
    return list(dict.fromkeys(names))


def fixed_on(policy: str) -> str | None:
    """The scenario that a rival's target was fixed on."""
    where = policy.partition("@")[2]
    return where if where in _scenarios() else None


def run_cell(folder: Path, scenario: str, seed: int, cold_start: float, policy: str) -> Cell:
    """Replay one."""
    began = time.process_time()

    def field(name: str) -> Contest:
        return without_plots(_scenarios()[name].contest(folder, seed=seed, cold_start=cold_start))

    where = fixed_on(policy)
    if where is None:
        (entry,) = parse_entries(policy)
    else:
        name = policy.partition("@")[0]
        entry = Entry(name, hindsight_target(field(where), name))
    result = compete(field(scenario), entry)
    cell: Cell = {"scenario": scenario, "seed": seed, "cold_start": cold_start}
    cell |= result.to_json() | {"policy": policy, "cpu_seconds": round(time.process_time() - began, 1)}
    return cell | {"inputs": inputs_of(folder, policy)}


def key_of(cell: Cell) -> Key:
    """Which cell it is."""
    return cell["scenario"], cell["seed"], cell["cold_start"], cell["policy"]


@lru_cache(maxsize=64)
def inputs_of(folder: Path, policy: str) -> str:
    """Names what a cell of the policy is made from: the traces, the simulator and, for ours, the tuner."""
    digest = hashlib.sha256()
    excluded = UNUSED_MODULES if policy in OWN else (*UNUSED_MODULES, "trimtab")
    for path in sorted(each for each in folder.iterdir() if each.is_file()):
        digest.update(path.name.encode() + path.read_bytes())
    packages = [trimtab_simulator, trimtab_operator.tuner if policy in OWN else trimtab_operator.tuner.engine_model]
    for package in packages:
        root = Path(package.__file__ or "").parent
        for path in sorted(root.rglob("*.py")):
            if path.stem not in excluded:
                digest.update(path.read_bytes())
    digest.update(Path(simulator_benchmarks.scenarios.__file__).read_bytes())
    return digest.hexdigest()[:16]


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


def is_current(cell: Cell, folder: Path) -> bool:
    """Whether the same would come of it today."""
    return bool(cell.get("inputs") == inputs_of(folder, cell["policy"]))


def fill(
    path: Path, folder: Path, wanted: Iterable[Key], *, jobs: int, fresh: bool, seconds: float = math.inf
) -> dict[Key, Cell]:
    """Run what is missing or was made from other inputs, and write each cell when it is done. Nothing is begun after so
    many seconds."""
    cells = read_cells(path)
    missing = [key for key in wanted if fresh or key not in cells or not is_current(cells[key], folder)]
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


def _scenarios() -> dict[str, Scenario]:
    return {scenario.name: scenario for scenario in SCENARIOS}


def _tell(cell: Cell, count: int, total: int) -> None:
    told = f"{cell['scenario']} seed {cell['seed']} cold {cell['cold_start']:g} {cell['policy']}"
    figures = f"{cell['gpu_hours']:.2f} h @ {100 * cell['attainment']:.2f} % ({cell['cpu_seconds']:.0f} s)"
    print(f"{count}/{total} {told}: {figures}", file=sys.stderr, flush=True)
