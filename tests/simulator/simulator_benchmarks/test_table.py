"""Result table: cells are stored when done, an interrupted run continues, and rows are means with their spread."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from simulator_benchmarks import cells as kept
from simulator_benchmarks import table
from simulator_benchmarks.cells import inputs_of, key_of, parse_policies, read_cells, run_missing
from simulator_benchmarks.table import captured, fields_of, markdown
from simulator_benchmarks.table_page import table_page
from trimtab_simulator.errors import BadRequest

POLICIES = ("static-n", "oracle", "trimtab", "kubeai")


def a_cell(policy: str, hours: float, *, seed: int = 0, attainment: float = 0.995, **more: Any) -> dict[str, Any]:
    return {
        "scenario": "day",
        "seed": seed,
        "cold_start": 120.0,
        "policy": policy,
        "gpu_hours": hours,
        "attainment": attainment,
        "goodput_tokens_per_s": 1000.0,
        "ttft_p95": 0.5,
        "reversals_per_knob_per_10min": {"replicas": 2, "max_num_batched_tokens": 1},
        **more,
    }


def test_a_row_has_means_spreads_and_the_saving_that_was_captured() -> None:
    cells = [
        *(
            a_cell(policy, hours, seed=seed)
            for policy, hours in (("static-n", 8.0), ("oracle", 4.0))
            for seed in (0, 1)
        ),
        a_cell("trimtab", 5.0),
        a_cell("trimtab", 5.4, seed=1, attainment=0.99),
        a_cell("kubeai", 6.0, target=32.0),
    ]
    wanted = [("day", seed, 120.0, policy) for policy in (*POLICIES, "hpa-running") for seed in (0, 1)]
    text = markdown({key_of(cell): cell for cell in cells}, wanted)
    assert "### day, cold start 120 s" in text
    assert "| trimtab | 5.20 (5.00–5.40) | 99.25 % (99.00) | 70 % | 1,000 | 0.50 s | 2, 1 | – | 2 of 2 |" in text
    assert "| kubeai | 6.00 (6.00–6.00) | 99.50 % (99.50) | 50 % | 1,000 | 0.50 s | 2, 1 | 32 | 1 of 2 |" in text
    assert "| hpa-running | not run | | | | | | | 0 of 2 |" in text
    page = table_page(text, {key_of(cell): cell for cell in cells}, fields_of(wanted))
    assert page.count("<circle") == 7
    assert "hpa-running (not run)" in page


def test_captured_is_none_without_possible_savings() -> None:
    assert captured([a_cell("x", 1)], [a_cell("static-n", 4)], [a_cell("oracle", 4)]) is None
    assert captured([a_cell("x", 1)], [], []) is None


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
    assert len(path.read_text().splitlines()) == 2
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


def test_baseline_target_may_be_number_or_scenario() -> None:
    assert parse_policies("kubeai, kubeai@32,kubeai@day,kubeai@day") == ["kubeai", "kubeai@32", "kubeai@day"]
    with pytest.raises(BadRequest, match="trimtab has no target; remove @day"):
        parse_policies("trimtab@day")
    with pytest.raises(BadRequest, match="kubeai@night: after the @ must be a number above 0, or one of day, burst"):
        parse_policies("kubeai@night")
    with pytest.raises(BadRequest, match="known are"):
        parse_policies("nobody")


def test_table_compares_with_cheapest_baseline_with_foreign_target() -> None:
    cells = [
        {**a_cell("trimtab", 5.0, attainment=0.992), "scenario": "mix"},
        {**a_cell("kubeai@day", 4.0, attainment=0.9), "scenario": "mix"},
        {**a_cell("hpa-running@day", 8.0), "scenario": "mix"},
        {**a_cell("aibrix-kpa@day", 9.0), "scenario": "mix"},
        {**a_cell("trimtab", 3.0), "scenario": "code"},
        {**a_cell("kubeai@day", 2.0, attainment=0.8), "scenario": "code"},
    ]
    wanted = [key_of(cell) for cell in cells]
    text = markdown({key_of(cell): cell for cell in cells}, wanted)
    assert "| mix, 120 s | 5.00 h @ 99.20 % | hpa-running@day 8.00 h @ 99.50 % | -38 % | 1 |" in text
    assert "| code, 120 s | 3.00 h @ 99.50 % | none; closest kubeai@day 2.00 h @ 80.00 % | – | 1 |" in text
    assert "### Ours against" not in markdown({}, wanted)


def test_row_counts_outdated_cells() -> None:
    cell = a_cell("kubeai", 6.0)
    text = markdown({key_of(cell): cell}, [key_of(cell)], {key_of(cell)})
    assert "| 1 of 1, 1 older |" in text


def test_partial_run_keeps_other_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text(json.dumps(a_cell("kubeai", 6.0)) + "\n")
    wanted = [("day", seed, 120.0, "static-n") for seed in range(3)]
    assert list(run_missing(path, tmp_path, wanted, jobs=1, fresh=False, seconds=0)) == [("day", 0, 120.0, "kubeai")]
    table.main(
        ["--traces", str(tmp_path), "--cells", str(path), "--seconds", "0", "--html", str(tmp_path / "page.html"),
         "--scenarios", "day", "--policies", "kubeai,static-n", "--seeds", "0", "--cold-starts", "120"]
    )  # fmt: skip
    assert "6.00 (6.00–6.00)" in (tmp_path / "page.html").read_text()
