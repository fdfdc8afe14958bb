"""The table: cells are kept as they come, a run goes on where it was, and rows are means with their spread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trimtab_simulator import table
from trimtab_simulator.table import captured, fields_of, key_of, markdown, read_cells
from trimtab_simulator.table_page import table_page

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


def test_where_nothing_can_be_saved_none_was_captured() -> None:
    assert captured([a_cell("x", 1)], [a_cell("static-n", 4)], [a_cell("oracle", 4)]) is None
    assert captured([a_cell("x", 1)], [], []) is None


def test_a_run_goes_on_where_it_was_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text(json.dumps(a_cell("kubeai", 6.0)) + "\n" + '{"scenario": "da')
    assert list(read_cells(path)) == [("day", 0, 120.0, "kubeai")]
    wanted = [("day", 0, 120.0, "kubeai")]
    assert len(table.fill(path, tmp_path, wanted, jobs=1, fresh=False)) == 1
    assert len(path.read_text().splitlines()) == 1


def test_a_part_is_run_and_what_other_parts_have_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text(json.dumps(a_cell("kubeai", 6.0)) + "\n")
    wanted = [("day", seed, 120.0, "static-n") for seed in range(3)]
    assert list(table.fill(path, tmp_path, wanted, jobs=1, fresh=False, seconds=0)) == [("day", 0, 120.0, "kubeai")]
    table.main(
        ["--traces", str(tmp_path), "--cells", str(path), "--seconds", "0", "--html", str(tmp_path / "page.html"),
         "--scenarios", "day", "--policies", "kubeai,static-n", "--seeds", "0", "--cold-starts", "120"]
    )  # fmt: skip
    assert "6.00 (6.00–6.00)" in (tmp_path / "page.html").read_text()
