"""`bench start`: stages of a start, median and p95."""

import json
import os
from pathlib import Path

import pytest
from trimtab_engine.bench.start_bench import Start, drop_page_cache, read_stages, summarize, table
from trimtab_engine.cli import main

METRICS = """# TYPE trimtab_start_seconds gauge
trimtab_start_seconds{engine="0",model_name="m",stage="process"} 0.25
trimtab_start_seconds{engine="0",model_name="m",stage="imports"} 1.5
trimtab_start_seconds{engine="0",model_name="m",stage="first_token"} 5.0e-02
trimtab_layout_ranks{engine="0",model_name="m"} 1.0
"""


def make_start(ready_seconds: float, **stages: float) -> Start:
    return Start(ready_seconds, 2 * ready_seconds, stages)


def test_stages_of_metrics_are_in_order() -> None:
    assert list(read_stages(METRICS).items()) == [("process", 0.25), ("imports", 1.5), ("first_token", 0.05)]


def test_summary_has_median_and_p95_of_each_stage() -> None:
    summary = summarize([make_start(float(second), weights=second / 2) for second in range(1, 102)])
    assert summary["ready"] == {"median": 51.0, "p95": 96.0}
    assert summary["cpu"] == {"median": 102.0, "p95": 192.0}
    assert summary["stage weights"] == {"median": 25.5, "p95": 48.0}


def test_table_has_stages_then_totals_then_first_token() -> None:
    lines = table(summarize([make_start(2.0, imports=1.25, ready=0.5, first_token=0.125)])).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "stage",
        "imports",
        "ready",
        "total until ready",
        "CPU time until ready",
        "first_token",
    ]
    assert lines[1].split() == ["imports", "1.25", "1.25"]


def test_dropped_page_cache_keeps_content(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 8192)
    drop_page_cache(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == b"x" * 8192


def test_start_measures_every_stage(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "start.json"
    flags = "--load-format dummy --device cpu --device-memory-bytes 512Mi --max-model-len 64 --max-num-seqs 4"
    assert (
        main(["bench", "start", str(tiny_model), "--runs", "1", "--serve-flags", flags, "--output-json", str(output)])
        == 0
    )
    (start,) = json.loads(output.read_text())["starts"]
    stages = start["stages"]
    assert list(stages)[:2] == ["process", "imports"]
    assert {"weights", "profile", "kv_cache", "ready", "first_token"} <= set(stages)
    until_ready = sum(seconds for stage, seconds in stages.items() if stage != "first_token")
    assert until_ready <= start["ready_seconds"] + 0.05
    assert until_ready > 0.5 * start["ready_seconds"]
    assert "total until ready" in capsys.readouterr().out


def test_rejected_serve_flags_exit_with_2(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "start", str(tiny_model), "--serve-flags", "--device typo"]) == 2
    assert "invalid choice" in capsys.readouterr().err


def test_unclosed_quotation_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "start", os.devnull, "--serve-flags", "'"]) == 2
    assert "close the quotation" in capsys.readouterr().err
