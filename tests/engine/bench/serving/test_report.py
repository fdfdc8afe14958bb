"""Table, warnings and result file."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trimtab_engine.bench.serving import report


def make_summary(**changes: Any) -> dict[str, Any]:
    figures = {
        "completed": 5,
        "failed": 0,
        "duration": 2.5,
        "request_rate": 2.0,
        "request_throughput": 2.0,
        "mean_ttft_ms": 12.345,
        "p99_ttft_ms": 20.0,
        "mean_client_queue_time_ms": 1.0,
        "client_cpu_share": 0.1,
        "max_send_lag_ms": 1.0,
        "interrupted": False,
    }
    return figures | changes


def test_table_equals_vllm_format() -> None:
    lines = report.table(make_summary()).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert "Successful requests:                     5" in lines
    assert "Benchmark duration (s):                  2.50" in lines
    assert "Mean TTFT (ms):                          12.35" in lines
    assert "P99 TTFT (ms):                           20.00" in lines
    assert "Mean Client Queue Time (ms):             1.00" in lines


def test_goodput_is_shown_with_objectives() -> None:
    assert "Request goodput (req/s):                 1.50" in report.table(make_summary(request_goodput=1.5))
    assert "goodput" not in report.table(make_summary(request_goodput=None))


def test_doubtful_results_have_warnings() -> None:
    assert report.warnings(make_summary()) == []
    (busy,) = report.warnings(make_summary(client_cpu_share=0.95))
    assert "95% of a core" in busy
    (late,) = report.warnings(make_summary(max_send_lag_ms=250.0))
    assert "250 ms later" in late
    assert "Interrupted" in report.table(make_summary(interrupted=True))


def test_failures_are_listed_once_with_count() -> None:
    assert report.errors_line(["a", "b", "a"]) == "  2 × a\n  1 × b"


def test_file_name_equals_vllm() -> None:
    name = report.file_name(
        label="openai", rate=4.0, max_concurrency=8, model="org/m", now=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    )
    assert name == "openai-4.0qps-concurrency8-m-20260102-030405.json"


def test_save_replaces_or_appends(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.json"
    report.save({"a": 1}, path, append=False)
    report.save({"a": 2}, path, append=True)
    assert json.loads(path.read_text()) == [{"a": 1}, {"a": 2}]
    report.save({"a": 3}, path, append=False)
    assert json.loads(path.read_text()) == {"a": 3}


def test_missing_figure_is_a_dash() -> None:
    assert "Mean TTFT (ms):                          -" in report.table(make_summary(mean_ttft_ms=None)).splitlines()


def test_cached_random_prompts_have_a_warning() -> None:
    known = {"dataset_name": "random", "server": {"prefix_cache_hit_rate": 0.875}}
    (warning,) = report.warnings(make_summary(**known))
    assert "88% of these random prompts were already" in warning
    assert "--seed" in warning
    assert report.warnings(make_summary(**known, shared_prefix_share=0.86)) == [], "the shared prefix was requested"
    assert report.warnings(make_summary(**{**known, "dataset_name": "sharegpt"})) == []
