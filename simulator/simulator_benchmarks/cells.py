"""Cells of the result table: one policy on one scenario, stored in a file as soon as it is computed.

A cell has a digest of its inputs: traces, scenarios, and the sources that can change it. A cell with outdated inputs is
computed again, and marked until then.
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
from trimtab_simulator.experiment import Experiment, without_timeline
from trimtab_simulator.policies.names import PolicySpec, parse_policy_specs
from trimtab_simulator.results import hindsight_target, run_policy

import simulator_benchmarks.scenarios
from simulator_benchmarks.scenarios import SCENARIOS, Scenario

TUNER_POLICIES = ("trimtab", "trimtab-restarted", "replicas-only")
"""Policies that use the tuner, so that every change of the tuner changes them."""
UNUSED_MODULES = ("report",)
"""Modules of the simulator that no replay depends on."""
OTHER = "@other"
"""Suffix of a baseline whose target was the best in hindsight on another trace."""
REFERENCES = ("day", "r1")
"""Scenarios that such a target is chosen on: the first, or on the first itself the second."""

Cell = dict[str, Any]
"""One policy on one scenario: scenario, seed, cold_start, score, and digest of the inputs."""
Key = tuple[str, int, float, str]
"""Key of a cell: scenario, seed, cold start and policy."""


def run_cell(folder: Path, scenario: str, seed: int, cold_start: float, policy: str) -> Cell:
    """Compute one cell."""
    began = time.process_time()
    by_name: dict[str, Scenario] = {each.name: each for each in SCENARIOS}

    def field(name: str) -> Experiment:
        return without_timeline(by_name[name].experiment(folder, seed=seed, cold_start=cold_start))

    if policy.endswith(OTHER):
        name = policy.removesuffix(OTHER)
        reference = next(each for each in REFERENCES if not scenario.startswith(each))
        entry = PolicySpec(name, hindsight_target(field(reference), name))
    else:
        (entry,) = parse_policy_specs(policy)
    result = run_policy(field(scenario), entry)
    cell: Cell = {"scenario": scenario, "seed": seed, "cold_start": cold_start}
    cell |= result.to_json() | {"policy": policy, "cpu_seconds": round(time.process_time() - began, 1)}
    return cell | {"inputs": inputs_of(folder, policy)}


def key_of(cell: Cell) -> Key:
    """Return the key of a cell."""
    return cell["scenario"], cell["seed"], cell["cold_start"], cell["policy"]


@lru_cache(maxsize=64)
def inputs_of(folder: Path, policy: str) -> str:
    """Return the digest of a policy's inputs: the traces, the simulator and, for Trimtab, the tuner."""
    digest = hashlib.sha256()
    excluded = UNUSED_MODULES if policy in TUNER_POLICIES else (*UNUSED_MODULES, "trimtab")
    for path in sorted(each for each in folder.iterdir() if each.is_file()):
        digest.update(path.name.encode() + path.read_bytes())
    packages = [
        trimtab_simulator,
        trimtab_operator.tuner if policy in TUNER_POLICIES else trimtab_operator.tuner.engine_model,
    ]
    for package in packages:
        root = Path(package.__file__ or "").parent
        for path in sorted(root.rglob("*.py")):
            if path.stem not in excluded:
                digest.update(path.read_bytes())
    digest.update(Path(simulator_benchmarks.scenarios.__file__).read_bytes())
    return digest.hexdigest()[:16]


def read_cells(path: Path) -> dict[Key, Cell]:
    """Return the cells of earlier runs, of each the newest; truncated lines are skipped."""
    cells = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            cell = json.loads(line)
        except ValueError:
            continue
        cells[key_of(cell)] = cell
    return cells


def is_current(cell: Cell, folder: Path) -> bool:
    """Return True if the cell's inputs are unchanged."""
    return bool(cell.get("inputs") == inputs_of(folder, cell["policy"]))


def run_missing(
    path: Path, folder: Path, wanted: Iterable[Key], *, jobs: int, fresh: bool, seconds: float = math.inf
) -> dict[Key, Cell]:
    """Compute missing and outdated cells, and append each one when it is done. No cell is started after this many
    seconds.
    """
    cells = read_cells(path)
    missing = [key for key in wanted if fresh or key not in cells or not is_current(cells[key], folder)]
    until = time.monotonic() + seconds
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file, ProcessPoolExecutor(jobs) as pool:
        if missing and cells:
            file.write("\n")  # after a line that was cut off
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
                _report_progress(cell, count, len(missing))


def _report_progress(cell: Cell, count: int, total: int) -> None:
    label = f"{cell['scenario']}/{cell['cold_start']:g}/{cell['policy']}/{cell['seed']}"
    figures = f"{cell['gpu_hours']:.2f} h @ {100 * cell['attainment']:.2f} % ({cell['cpu_seconds']:.0f} s)"
    print(f"{count}/{total} {label}: {figures}", file=sys.stderr, flush=True)
