"""Comparison of routers: loads with prefixes, cells that continue, and tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from simulator_benchmarks import prefix_scenarios, routing, scenarios
from simulator_benchmarks.prefix_scenarios import PREFIX_SCENARIOS, fixed_fleet
from simulator_benchmarks.routing import Key, Part, key_of, markdown, page, read_cells, run_missing
from trimtab_simulator.plant.routing import RouterKind, RouterSettings
from trimtab_simulator.plant.shared_blocks import shared_blocks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    line = '{{"timestamp": {}, "input_length": 3000, "output_length": 30, "hash_ids": [1, {}, {}]}}'
    rows = (line.format(1000 * i, 2 + i % 5, 100 + i % 5) for i in range(60))
    (tmp_path / scenarios.MOONCAKE).write_text("\n".join(rows))
    return tmp_path


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_scenarios, "AGENT_SECONDS", 20.0)
    monkeypatch.setattr(prefix_scenarios, "STAGE_SECONDS", 1.0)


@pytest.mark.parametrize("scenario", PREFIX_SCENARIOS, ids=lambda scenario: scenario.name)
def test_scenario_has_prefixes_and_caches(scenario: scenarios.Scenario, folder: Path) -> None:
    experiment = fixed_fleet(scenario, folder, seed=1, replicas=3, router=RouterSettings(RouterKind.TRIMTAB))
    arrivals = experiment.trace.arrivals
    assert all(arrival.prefix for arrival in arrivals)
    assert experiment.settings.make_blocks is shared_blocks
    assert experiment.settings.start_replicas == 3
    other = fixed_fleet(scenario, folder, seed=2, replicas=3, router=RouterSettings())
    assert other.trace.arrivals != arrivals


def test_shared_prefix_load_repeats_prefixes_and_questions(folder: Path) -> None:
    (scenario,) = (each for each in PREFIX_SCENARIOS if each.name == "shared-prefix")
    arrivals = fixed_fleet(scenario, folder, seed=0, replicas=1, router=RouterSettings()).trace.arrivals
    prefixes = {arrival.prefix[:11] for arrival in arrivals}
    assert len(arrivals) > len({arrival.prefix for arrival in arrivals}) > len(prefixes)


def test_cells_continue_and_outdated_ones_run_again(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "out" / "cells.jsonl"
    keys = [Key("mooncake", 2, rule) for rule in ("trimtab", "service")]
    first = run_missing(path, folder, keys[:1], seconds=60.0)
    assert run_missing(path, folder, keys, seconds=0.0) == first
    cells = run_missing(path, folder, keys, seconds=60.0)
    assert [key_of(cell) for cell in cells.values()] == keys
    assert len(path.read_text().splitlines()) == 2
    path.write_text(json.dumps(cells[keys[0]] | {"inputs": "old"}) + '\n{"scen')
    assert read_cells(path)[keys[0]]["inputs"] == "old"
    assert run_missing(path, folder, keys[:1], seconds=60.0)[keys[0]]["inputs"] != "old"


def test_table_has_means_over_seeds_and_marks_outdated_cells(folder: Path, tmp_path: Path) -> None:
    part = Part("small", "mooncake", (2,), (RouterKind.TRIMTAB, RouterKind.SERVICE))
    cells = run_missing(tmp_path / "cells.jsonl", folder, part.keys([0, 1]), seconds=60.0)
    (inputs,) = {cell["inputs"] for cell in cells.values()}
    text = markdown(cells, [part], [0, 1], inputs)
    rows = [row for row in text.splitlines() if row.startswith("| 2 |")]
    assert [row.split(" | ")[1] for row in rows] == ["trimtab", "service"]
    assert all(row.endswith("| 2 |") for row in rows)
    assert "| 2 (older) |" in markdown(cells, [part], [0, 1], "other")
    assert page(text).count("<tr>") == 3


def test_percentile_of_ttft_is_in_order(folder: Path, tmp_path: Path) -> None:
    key = Key("mooncake", 2, "trimtab")
    cell = run_missing(tmp_path / "cells.jsonl", folder, [key], seconds=60.0)[key]
    assert cell["ttft_p50"] <= cell["ttft_p90"] <= cell["ttft_p95"]
    assert 0.0 <= cell["hit_share"] <= 1.0
    assert 0.0 <= cell["attained"] <= 1.0


def test_unknown_table_or_rule_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--tables", "nothing"], ["--rules", "magic"]):
        with pytest.raises(SystemExit):
            routing.main(["--traces", str(folder), *arguments])
        assert "known are" in capsys.readouterr().err
