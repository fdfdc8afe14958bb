"""The page lists rows, targets, shares and peers, and marks missing measurements."""

from pathlib import Path
from typing import Any

from kernel_benchmarks.page import TARGETS, markdown, meets, plot, write_pages
from kernel_benchmarks.report import FILE, Report

ROWS: dict[str, dict[str, Any]] = {
    "paged_decode 256 of 1024 bfloat16": {
        "limit": "copy", "bar": 0.85, "seconds": 3e-4, "rate": 3.6e12, "share": 0.84, "date": "2026-01-02",
        "peers": {"torch SDPA, contiguous": {"seconds": 6e-4}, "FlashInfer": {"not_run": "No | module"}},
    },
    "engine llama-3.1-8b decode 32 x 1k": {
        "limit": "model", "bar": 0.85, "rate": 6200.0, "limit_rate": 7100.0, "share": 0.873, "date": "2026-01-01",
        "kernel_compilations": 0,
        "peers": {"transformers continuous batching": {"rate": 1550.0}},
    },
    "engine llama-3.1-8b GPU busy, 32 x 1k": {"limit": "time", "bar": 0.97, "share": 0.98, "peers": {}},
    "engine llama-3.1-8b live KV resize of 10 GiB under load": {
        "limit": "seconds", "bar": 0.2, "seconds": 0.05, "peers": {"a restart": {"seconds": 41.0}},
    },
    "rms_norm 16384x4096": {"limit": "copy", "bar": 0.9, "error": "Wrong: off by 2"},
}  # fmt: skip


def a_report(folder: Path) -> Report:
    report = Report(folder / FILE, "1")
    report.identity = {"device": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "python": "3.12.3"}
    report.command, report.limits, report.rows = "make bench-gpu (seed 3)", {"copy": 4.3e12}, dict(ROWS)
    report.limits_at_end = {"copy": 4.085e12}
    return report


def test_page_shows_device_versions_command_dates_and_rows(tmp_path: Path) -> None:
    text = markdown(a_report(tmp_path), with_plot=True)
    expected = ("NVIDIA H200", "torch 2.11.0", "triton 3.6.0", "`make bench-gpu (seed 3)`", "copy 4.3 T/s", "gpu.svg")
    for part in (*expected, "At its end: copy -5.0%"):
        assert part in text
    assert "2026-01-01 to 2026-01-02" in text
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert set(ROWS) | {requested.what for requested in TARGETS} <= set(lines)
    assert "| 300.0 µs, 3.6 TB/s | 0.840 ✗ | 0.85 |" in lines["paged_decode 256 of 1024 bfloat16"]
    assert "600.0 µs, Trimtab 2.00 times as fast; FlashInfer: not run (No / module)" in text
    assert "6,200 tokens/s | 0.873 ✓" in text
    assert "1,550 tokens/s, Trimtab 4.00 times as fast" in text
    assert "50 ms of 200 allowed" in text
    assert "a restart: 41.0 s" in text
    assert "failed: Wrong: off by 2" in text


def test_missing_measurements_are_marked(tmp_path: Path) -> None:
    text = markdown(a_report(tmp_path), with_plot=False)
    assert "| fused MoE | 0.65 of the binding limit | not measured |  |" in text
    assert "| memory-bound kernels | 0.90 of copy | 0 of 1 |  |" in text
    assert "| no kernel compiled after warm-up | 0 in every row of the engine | 1 of 1 |  |" in text
    assert "| live KV resize of 10 GiB under load | stall of 200 ms at most | 1 of 1 | 50 ms of 200 allowed |" in text


def test_rows_without_target_are_counted(tmp_path: Path) -> None:
    report = a_report(tmp_path)
    report.rows["lora 40x64 rank 16"] = {"limit": "read", "bar": 0.0, "seconds": 1e-5, "rate": 1e12, "share": 0.25}
    text = markdown(report, with_plot=False)
    assert "| adapters added to GEMMs | none | 1 measured | 0.25 to 0.25 |" in text


def test_every_measured_row_belongs_to_a_target() -> None:
    import torch
    from kernel_benchmarks.engine_rows import ROWS as engine_rows
    from kernel_benchmarks.kernel_rows import all_rows

    names = [row.name for row in all_rows(torch.device("cpu"), tiny=True)] + [row.name for row in engine_rows]
    assert [name for name in names if sum(requested.answers(name) for requested in TARGETS) != 1] == []


def test_meets_compares_shares_or_seconds() -> None:
    met = [meets(row) for row in ROWS.values()]
    assert met == [False, True, True, True, False]
    assert meets({"limit": "copy", "bar": 0.0, "share": 0.3}) is None


def test_write_pages_writes_both_files(tmp_path: Path) -> None:
    assert write_pages(a_report(tmp_path), tmp_path)
    assert "<svg" in (tmp_path / "gpu.svg").read_text()
    assert "(gpu.svg)" in (tmp_path / "gpu.md").read_text()
    assert plot({}, tmp_path / "empty.svg"), "a run without any share is still drawn"
