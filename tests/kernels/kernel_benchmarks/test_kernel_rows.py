"""The kernel phase without a GPU: every row's check in Triton's interpreter on tiny shapes, the report, and the time
limit. Not a measurement.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_benchmarks.kernel_rows import MODULES, all_rows, measure, run, run_modules
from kernel_benchmarks.paged_peers import flex_paged
from kernel_benchmarks.phase import Clock, Phase
from kernel_benchmarks.report import FILE, Report
from kernel_benchmarks.row import Row, WrongResult, check
from kernel_benchmarks.sample import mask_invalid_tokens

CPU = torch.device("cpu")


def a_row(name: str = "kernel", *, ours: float = 1.0, **peers: Any) -> Row:
    return Row(name, "copy", 100.0, 0.9, lambda: torch.tensor([ours]), lambda: torch.ones(1), 0.01, **peers)


def a_phase(folder: Path, *, only: str = "", seconds: float = 60.0, run: str = "1") -> Phase:
    report = Report(folder / FILE, run)
    report.limits["copy"] = 200.0
    now = time.time()
    return Phase(only, report, Clock(now, now + seconds, now + seconds), argparse.Namespace())


def half_a_second(call: Any) -> float:
    call()
    return 0.5


def absent() -> object:
    raise ImportError("no such library")


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_rows_of_every_kernel_pass_their_check(module: Any) -> None:
    rows = list(module.rows(CPU, tiny=True))
    assert rows
    for row in rows:
        check(row)


@pytest.mark.parametrize(
    ("top_k", "top_p", "allowed"),
    [(8, 0.5, 4), (8, 0.7505, 5), (8, 0.74995, 5), (8, 0.7495, 4), (4, 1.0, 4), (4, 0.59995, 4)],
    ids=["ties", "above the border", "at the border", "below the border", "top-k only", "of what top-k leaves"],
)
def test_token_tied_with_kept_one_may_be_drawn(top_k: int, top_p: float, allowed: int) -> None:
    """Row i draws token i. The next lower token may be drawn only if rounded sums may include it."""
    logits = torch.tensor([0.45, 0.1, 0.1, 0.1, 0.09, 0.08, 0.05, 0.03]).log().repeat(8, 1)
    limits = [torch.full((8,), value) for value in (1.0, top_k, top_p, 0.0)]
    found = mask_invalid_tokens(lambda: (torch.arange(8), torch.zeros(8)), logits, *limits)
    assert found[:allowed].tolist() == list(range(allowed))
    assert bool(found[allowed:].isnan().all())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gets_same_sequences_as_kernel() -> None:
    torch.manual_seed(0)
    query = torch.randn(3, 4, 16)
    keys, values = (torch.randn(3, 256, 2, 16) for _ in range(2))
    found = flex_paged(query, keys, values, scale=0.1, compiled=False)()
    dense_keys, dense_values = keys.transpose(1, 2), values.transpose(1, 2)
    expected = F.scaled_dot_product_attention(query.unsqueeze(2), dense_keys, dense_values, scale=0.1, enable_gqa=True)
    torch.testing.assert_close(found, expected.squeeze(2))


def test_row_names_are_distinct() -> None:
    names = [row.name for row in all_rows(CPU, tiny=True)]
    assert len(set(names)) == len(names)


def test_check_detects_wrong_and_unwritten_results() -> None:
    check(a_row(ours=1.005))
    with pytest.raises(WrongResult, match="off by"):
        check(a_row(ours=1.02))
    unwritten = Row("kernel", "copy", 1.0, 0.9, lambda: torch.empty(4), lambda: torch.zeros(4), 0.01)
    with pytest.raises(WrongResult):
        check(unwritten)


def test_share_is_relative_to_limit_of_same_run() -> None:
    entry = measure(a_row(), {"copy": 200.0}, half_a_second)
    assert (entry["rate"], entry["share"]) == (200.0, 1.0)
    assert "share" not in measure(a_row(), {}, half_a_second), "without a limit there is no share"
    assert "off by" in measure(a_row(ours=2.0), {"copy": 200.0}, half_a_second)["error"]


def test_quick_peers_run_with_row_and_compiled_peers_after_all(tmp_path: Path) -> None:
    row = a_row(peers={"quick": lambda: None, "absent": absent}, compiled={"slow": lambda: None})
    assert run(iter((row,)), a_phase(tmp_path), half_a_second, peers=False) == []
    peers = Report(tmp_path / FILE, "1").rows["kernel"]["peers"]
    assert peers["quick"]["seconds"] == 0.5
    assert "no such library" in peers["absent"]["not_run"]
    assert "slow" not in peers
    assert run(iter((row,)), a_phase(tmp_path), half_a_second, peers=True) == []
    assert Report(tmp_path / FILE).rows["kernel"]["peers"]["slow"]["seconds"] == 0.5


def test_measured_rows_are_kept_and_missing_ones_listed(tmp_path: Path) -> None:
    rows = a_row("one"), a_row("two")
    assert run(iter(rows), a_phase(tmp_path, only="one"), half_a_second, peers=False) == []
    late = a_phase(tmp_path, seconds=-1.0)
    assert run(iter(rows), late, half_a_second, peers=False) == ["two"]
    assert list(late.report.rows) == ["one"]


def test_wrong_kernel_is_recorded_and_not_retried(tmp_path: Path) -> None:
    calls: list[int] = []

    def wrong() -> torch.Tensor:
        calls.append(1)
        return torch.full((1,), 7.0)

    row = Row("kernel", "copy", 1.0, 0.9, wrong, lambda: torch.ones(1), 0.1)
    for number in ("1", "1", "2"):
        run(iter((row,)), a_phase(tmp_path, run=number), half_a_second, peers=False)
    assert "off by" in Report(tmp_path / FILE).rows["kernel"]["error"]
    assert len(calls) == 2, "once in each of two runs"


def test_kernel_with_failing_inputs_loses_only_its_rows(tmp_path: Path) -> None:
    def out_of_memory(device: torch.device, *, tiny: bool) -> Iterator[Row]:
        yield a_row("first")
        raise MemoryError("32 GiB")

    def well(device: torch.device, *, tiny: bool) -> Iterator[Row]:
        yield a_row("second")

    modules = [ModuleType("kernel_benchmarks.large"), ModuleType("kernel_benchmarks.small")]
    for module, rows in zip(modules, (out_of_memory, well), strict=True):
        module.rows = rows  # type: ignore[attr-defined]
    phase = a_phase(tmp_path)
    assert run_modules(modules, CPU, phase, half_a_second, peers=False) == []
    assert list(phase.report.rows) == ["first", "large, its inputs", "second"]
    assert "32 GiB" in phase.report.rows["large, its inputs"]["error"]
