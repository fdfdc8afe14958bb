"""Peers of the engine's rows: absent ones report the reason, failing ones affect only their own cell."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kernel_benchmarks import peers
from kernel_benchmarks.engine_peers import SHAPES, measure_rows, note_absent, select_rows
from kernel_benchmarks.engine_rows import EngineRow, Kind
from kernel_benchmarks.ideal import LLAMA_8B, QWEN3_8B
from kernel_benchmarks.peers import PEERS, Peer
from kernel_benchmarks.peers.served import decode_rate
from kernel_benchmarks.phase import Clock, Phase
from kernel_benchmarks.report import FILE, Report

TRANSFORMERS, NANO, MINI = PEERS


def a_phase(folder: Path, seconds: float = 60.0) -> Phase:
    report, now = Report(folder / FILE, "1"), time.time()
    return Phase("", report, Clock(now, now + seconds, now + seconds), argparse.Namespace())


class Rates:
    """A peer that supports prompts only."""

    def rate(self, row: EngineRow) -> float:
        if row.kind is not Kind.PREFILL:
            raise RuntimeError("no tokens")
        return 7.0


def test_peer_rates_and_failures_are_recorded_in_rows(tmp_path: Path) -> None:
    phase = a_phase(tmp_path)
    rows = select_rows(TRANSFORMERS, LLAMA_8B, "", phase.report)
    assert [row.kind for row in rows] == [Kind.DECODE] * 3 + [Kind.PREFILL]
    assert measure_rows(TRANSFORMERS, Rates(), rows, phase) == []
    found = {row.name: phase.report.rows[row.name]["peers"][TRANSFORMERS.name] for row in rows}
    assert [entry.get("rate") for entry in found.values()] == [None, None, None, 7.0]
    assert "no tokens" in found[rows[0].name]["not_run"]
    assert select_rows(TRANSFORMERS, LLAMA_8B, "", phase.report) == []


def test_rows_without_remaining_time_are_listed(tmp_path: Path) -> None:
    phase = a_phase(tmp_path, seconds=-1.0)
    rows = select_rows(TRANSFORMERS, QWEN3_8B, "", phase.report)
    assert measure_rows(TRANSFORMERS, Rates(), rows, phase) == [row.name for row in rows]
    assert phase.report.rows == {}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def install(*names: str, torch: str = "2.11.0+cu130") -> None:
        monkeypatch.setattr(peers, "find_spec", lambda name: name if name in names else None)
        monkeypatch.setattr(peers, "version", lambda _: torch)

    return install


def test_missing_dependency_of_peer_is_named(installed: Callable[..., None]) -> None:
    installed()
    assert [peer.why_not(QWEN3_8B) for peer in PEERS] == [
        "transformers is not installed", "nanovllm is not installed", "minisgl is not installed",
    ]  # fmt: skip
    installed("transformers", "nanovllm", "minisgl", "flashinfer")
    assert TRANSFORMERS.why_not(LLAMA_8B) == ""
    assert NANO.why_not(QWEN3_8B) == "flash-attn, which nano-vllm imports, is not installed"
    assert NANO.why_not(LLAMA_8B) == "nano-vllm serves Qwen3 only"
    assert MINI.why_not(QWEN3_8B) == "sgl_kernel, which mini-sglang imports, are not installed"
    installed("nanovllm", "flash_attn", "minisgl", "flashinfer", "sgl_kernel")
    assert NANO.why_not(QWEN3_8B) == ""
    assert MINI.why_not(QWEN3_8B) == "mini-sglang requires torch below 2.10; this is 2.11.0+cu130"
    installed("minisgl", "flashinfer", "sgl_kernel", torch="2.9.1")
    assert MINI.why_not(QWEN3_8B) == ""


def test_absent_peer_is_recorded_in_each_of_its_rows(tmp_path: Path) -> None:
    absent = Peer("absent", "no_such_package", "none", lambda shape: "")
    report = Report(tmp_path / FILE, "1")
    for shape in SHAPES:
        assert note_absent(absent, shape, "decode", report)
    assert len(report.rows) == 3
    assert not note_absent(TRANSFORMERS, LLAMA_8B, "", report)


def test_decode_rate_counts_only_while_all_requests_decode() -> None:
    # Both have a token from 2.0 on, and the first one ends at 4.0: tokens at 3, 4 and 3, 4.
    assert decode_rate([[0.0, 1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]]) == 2.0
    with pytest.raises(RuntimeError, match="before all of them"):
        decode_rate([[0.0, 1.0], [2.0, 3.0]])
