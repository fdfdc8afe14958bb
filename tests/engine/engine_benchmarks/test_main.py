"""The benchmark's bookkeeping: a partial run keeps other parts of an earlier run."""

import json
from pathlib import Path
from typing import Any

import pytest
from engine_benchmarks import __main__ as bench

STEADY = {"measurements": [{"load": "steady", "running": 1, "p50_ms": 0.1, "p99_ms": 0.2, "target_p50_ms": None}]}


def test_partial_run_keeps_other_parts_of_same_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(part: str, figures: dict[str, Any]) -> set[str]:
        monkeypatch.setitem(bench.PARTS, part, ("a part", lambda model: figures))
        assert bench.main(["MODEL", "--output", str(tmp_path), "--only", part]) == 0
        return set(json.loads((tmp_path / "cpu.json").read_text()))

    assert measure("scheduler", STEADY) == {"machine", "scheduler"}
    assert measure("live", {"num_failed": 0}) == {"machine", "scheduler", "live"}
    page = (tmp_path / "cpu.md").read_text()
    assert "| steady | 1 | 0.100 |" in page
    assert "| num_failed | 0 |" in page
    monkeypatch.setattr(
        bench, "machine", lambda: {**json.loads((tmp_path / "cpu.json").read_text())["machine"], "cpus": 99}
    )
    assert measure("live", {"num_failed": 1}) == {"machine", "live"}
    capsys.readouterr()
