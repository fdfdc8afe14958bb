"""Result table: cells are stored when done, an interrupted run continues, and rows are means with their spread."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from simulator_benchmarks import cells as kept
from simulator_benchmarks import table
from simulator_benchmarks.cells import Key, inputs_of, key_of, read_cells, run_cell, run_missing
from simulator_benchmarks.scenarios import SCENARIOS, Scenario
from simulator_benchmarks.table import Summary, captured, markdown, rows_of, summarize, wanted_cells
from simulator_benchmarks.table_page import table_page
from trimtab_simulator.policies.names import PolicySpec

POLICIES = ("static-n", "oracle", "trimtab", "kubeai")


def a_cell(policy: str, hours: float, *, seed: int = 0, attainment: float = 0.995, **more: Any) -> dict[str, Any]:
    return {
        "scenario": "day",
        "seed": seed,
        "cold_start": 120.0,
        "policy": policy,
        "gpu_hours": hours,
        "attainment": attainment,
        "ttft_p95": 0.5,
        "preempted_token_share": 0.0,
        "reversals_per_knob_per_10min": {"replicas": 2, "max_num_batched_tokens": 1},
        **more,
    }


CELLS = [
    *(a_cell(policy, hours, seed=seed) for policy, hours in (("static-n", 8.0), ("oracle", 4.0)) for seed in (0, 1)),
    a_cell("trimtab", 5.0),
    a_cell("trimtab", 5.4, seed=1, attainment=0.98),
    a_cell("kubeai", 6.0, target=32.0),
]
WANTED: list[Key] = [("day", seed, 120.0, policy) for policy in (*POLICIES, "hpa-running") for seed in (0, 1)]


def test_row_has_means_spreads_and_captured_saving() -> None:
    rows = rows_of({key_of(cell): cell for cell in CELLS}, WANTED)
    text = markdown(rows)
    assert "### day, cold start 120 s" in text
    assert "| trimtab | 5.20 (5.00–5.40) | 98.75 % (98.00) | 70 % | 1.30 | 0.50 s | 2, 1 | – | 2 of 2 |" in text
    assert "| kubeai | 6.00 (6.00–6.00) | 99.50 % (99.50) | 50 % | 1.50 | 0.50 s | 2, 1 | 32 | 1 of 2 |" in text
    assert "| hpa-running | not run | | | | | | | 0 of 2 |" in text
    page = table_page(text, rows)
    assert page.count("<title>") == 1 + len(CELLS)
    assert "hpa-running (not run)" in page
    assert "prefers-color-scheme:dark" in page
    assert "http" not in page


def test_summary_counts_cells_that_the_oracle_attains() -> None:
    cells = [*CELLS, a_cell("oracle", 4.0, seed=2, attainment=0.98), a_cell("trimtab", 9.0, seed=2, attainment=0.97)]
    wanted = [*WANTED, ("day", 2, 120.0, "oracle"), ("day", 2, 120.0, "trimtab")]
    summary = {each.policy: each for each in summarize(rows_of({key_of(cell): cell for cell in cells}, wanted))}
    assert summary["oracle"] == Summary("oracle", 3, 2, 2, 1.0)
    assert summary["trimtab"][:4] == ("trimtab", 3, 2, 1)
    assert summary["hpa-running"] == Summary("hpa-running", 0, 0, 0, None)


def test_captured_is_none_without_possible_savings() -> None:
    assert captured([a_cell("x", 1)], [a_cell("static-n", 4)], [a_cell("oracle", 4)]) is None
    assert captured([a_cell("x", 1)], [], []) is None


def test_patterns_select_cells_and_cold_starts_of_a_scenario() -> None:
    everything = wanted_cells([])
    assert len(set(everything)) == len(everything)
    assert {key[2] for key in everything if key[0] == "llm-d"} == {100.0}
    assert {key[3] for key in everything if key[2] == 5.0} == {"static-n", "oracle", "trimtab"}
    assert {key[0] for key in everything} == {scenario.name for scenario in SCENARIOS}
    assert wanted_cells(["day/120/kubeai*/0"]) == [("day", 0, 120.0, name) for name in ("kubeai", "kubeai@other")]
    assert wanted_cells(["night/*"]) == []


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the requested replays instead of running them, all in this process."""
    ran: list[str] = []

    def run_cell(folder: Path, scenario: str, seed: int, cold_start: float, policy: str) -> dict[str, Any]:
        ran.append(policy)
        return a_cell(policy, 1.0, seed=seed, inputs=inputs_of(folder, policy), cpu_seconds=0.0)

    monkeypatch.setattr(kept, "run_cell", run_cell)
    monkeypatch.setattr(kept, "ProcessPoolExecutor", ThreadPoolExecutor)
    return ran


def test_interrupted_run_continues(tmp_path: Path, runs: list[str]) -> None:
    path = tmp_path / "out" / "cells.jsonl"
    path.parent.mkdir()
    whole = a_cell("kubeai", 6.0, inputs=inputs_of(tmp_path, "kubeai"))
    path.write_text(json.dumps(whole) + "\n" + '{"scenario": "da')
    assert list(read_cells(path)) == [("day", 0, 120.0, "kubeai")]
    wanted = [("day", 0, 120.0, policy) for policy in ("kubeai", "oracle")]
    assert len(run_missing(path, tmp_path, wanted, jobs=1, fresh=False)) == 2
    assert runs == ["oracle"]
    assert set(read_cells(path)) == set(wanted)
    run_missing(path, tmp_path, wanted, jobs=1, fresh=True)
    assert runs == ["oracle", "kubeai", "oracle"]


def test_a_cell_that_was_made_from_other_inputs_is_made_again(tmp_path: Path, runs: list[str]) -> None:
    path, folder = tmp_path / "cells.jsonl", tmp_path / "traces"
    folder.mkdir()
    (folder / "day.csv").write_text("1")
    wanted = [("day", 0, 120.0, "kubeai")]
    run_missing(path, folder, wanted, jobs=1, fresh=False)
    run_missing(path, folder, wanted, jobs=1, fresh=False)
    assert runs == ["kubeai"]
    inputs_of.cache_clear()
    (folder / "day.csv").write_text("2")
    run_missing(path, folder, wanted, jobs=1, fresh=False)
    assert runs == ["kubeai", "kubeai"]


def test_tuner_changes_invalidate_only_its_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_bytes
    before = inputs_of(tmp_path, "trimtab"), inputs_of(tmp_path, "kubeai")
    inputs_of.cache_clear()
    changed = ("decide.py", "policies/trimtab.py")
    monkeypatch.setattr(Path, "read_bytes", lambda it: read(it) + b"#" * str(it).endswith(changed))
    ours, theirs = inputs_of(tmp_path, "trimtab"), inputs_of(tmp_path, "kubeai")
    assert ours == inputs_of(tmp_path, "replicas-only")
    assert theirs == inputs_of(tmp_path, "oracle")
    assert ours != theirs
    assert ours != before[0]
    assert theirs == before[1]
    inputs_of.cache_clear()


@pytest.mark.parametrize(
    ("scenario", "reference"), [("mix", "day"), ("day", "r1"), ("day-from-1", "r1"), ("r1-real", "day")]
)
def test_other_target_is_the_best_on_another_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scenario: str, reference: str
) -> None:
    asked: list[tuple[str, PolicySpec]] = []

    class Ran(Exception):
        pass

    def run_policy(experiment: str, entry: PolicySpec) -> None:
        asked.append((experiment, entry))
        raise Ran

    monkeypatch.setattr(kept, "without_timeline", lambda experiment: experiment)
    monkeypatch.setattr(
        Scenario, "experiment", lambda self, folder, *, seed, cold_start: f"{self.name}, {seed}, {cold_start:g}"
    )
    monkeypatch.setattr(kept, "hindsight_target", lambda experiment, name: {f"{reference}, 2, 60": 45.0}[experiment])
    monkeypatch.setattr(kept, "run_policy", run_policy)
    with pytest.raises(Ran):
        run_cell(tmp_path, scenario, 2, 60.0, "kubeai@other")
    assert asked == [(f"{scenario}, 2, 60", PolicySpec("kubeai", 45.0))]


def test_row_counts_outdated_cells() -> None:
    cell = a_cell("kubeai", 6.0)
    assert "| 1 of 1, 1 older |" in markdown(rows_of({key_of(cell): cell}, [key_of(cell)], {key_of(cell)}))


def test_partial_run_keeps_other_cells(tmp_path: Path) -> None:
    path, page, rows = tmp_path / "cells.jsonl", tmp_path / "page.html", tmp_path / "rows.json"
    path.write_text(json.dumps(a_cell("kubeai", 6.0)) + "\n")
    wanted = [("day", seed, 120.0, "static-n") for seed in range(3)]
    assert list(run_missing(path, tmp_path, wanted, jobs=1, fresh=False, seconds=0)) == [("day", 0, 120.0, "kubeai")]
    table.main(
        ["--traces", str(tmp_path), "--cells", str(path), "--seconds", "0", "--html", str(page), "--json", str(rows),
         "--only", "day/120/kubeai/*,day/120/static-n/*"]
    )  # fmt: skip
    assert "6.00 (6.00–6.00)" in page.read_text()
    assert [(row["policy"], row["hours"]) for row in json.loads(rows.read_text())] == [("kubeai", [6.0])]
    with pytest.raises(SystemExit):
        table.main(["--traces", str(tmp_path), "--only", "night/*"])
