"""Other load generators: their commands, their result files, and the message if they are missing."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_benchmarks import clients_bench
from engine_benchmarks.clients_bench import (
    KINDS,
    REQUESTS,
    Figures,
    Tool,
    read_aiperf,
    read_guidellm,
    read_own,
    table,
    tools,
)


def written(folder: Path, name: str, content: dict[str, Any]) -> Path:
    (folder / name).write_text(json.dumps(content))
    return folder


def test_guidellm_results_are_parsed(tmp_path: Path) -> None:
    metrics = {
        "request_totals": {"successful": 22, "errored": 1, "incomplete": 1, "total": 24},
        "requests_per_second": {"successful": {"mean": 2.5}},
        "time_to_first_token_ms": {"successful": {"mean": 100.0}},
        "inter_token_latency_ms": {"successful": {"mean": 20.0}},
    }
    folder = written(tmp_path, "guidellm.json", {"benchmarks": [{"metrics": metrics}]})
    assert read_guidellm(folder) == Figures(22, 2, 2.5, 100.0, 20.0)


@pytest.mark.parametrize(("errors", "failed"), [(None, 0), ({"avg": 3.0}, 3)])
def test_aiperf_results_are_parsed(tmp_path: Path, errors: Any, failed: int) -> None:
    figures = {
        "request_count": {"avg": 24.0},
        "error_request_count": errors,
        "request_throughput": {"avg": 2.5},
        "time_to_first_token": {"avg": 100.0},
        "inter_token_latency": {"avg": 20.0},
    }
    folder = written(tmp_path, "profile_export_aiperf.json", figures)
    assert read_aiperf(folder) == Figures(24, failed, 2.5, 100.0, 20.0)


def test_own_results_are_parsed(tmp_path: Path) -> None:
    result = {"completed": 24, "failed": 0, "request_throughput": 2.5, "mean_ttft_ms": 100.0, "mean_tpot_ms": 20.0}
    assert read_own(written(tmp_path, "own.json", result)) == Figures(24, 0, 2.5, 100.0, 20.0)


def test_every_tool_gets_same_server_model_and_load(tmp_path: Path) -> None:
    for tool in tools("guidellm", "aiperf"):
        for kind in KINDS:
            command = " ".join(tool.command("program", "http://server:1", "/model", kind, tmp_path))
            for part in ("program", "http://server:1", "/model", str(REQUESTS), "64", "16"):
                assert part in command


def test_missing_tool_has_no_program() -> None:
    missing = {tool.name: tool.program for tool in tools("/nowhere/guidellm", "/nowhere/aiperf")}
    assert missing == {"trimtab-engine bench serve": sys.executable, "guidellm": None, "aiperf": None}


def a_tool(program: str, script: str) -> Tool:
    return Tool("a tool", program, lambda program, url, model, kind, folder: [program, "-c", script], read_own)


def test_failed_tool_is_quoted() -> None:
    with pytest.raises(RuntimeError, match="ended with 3: out of luck"):
        clients_bench._run(a_tool(sys.executable, "print('out of luck'); exit(3)"), "u", "m", "chat")


def test_table_has_a_row_for_each_run() -> None:
    rows = table({("a tool", "chat"): Figures(24, 0, 2.5, 100.0, 20.0)}, [a_tool(sys.executable, "")]).splitlines()
    assert len(rows) == 3
    assert "| chat | 24 | 0 | 2.50 | 100 | 20 |" in rows[2]
