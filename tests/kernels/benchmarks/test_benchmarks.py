"""The benchmark's code path without a GPU: every row's check in Triton's interpreter on tiny shapes, the file, the
limits of time. Nothing here is a measurement."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.__main__ import MODULES, all_rows, main, measure, parse, run
from benchmarks.paged_peers import flex_paged
from benchmarks.report import Report, identity, plot
from benchmarks.row import Row, Wrong, check

CPU = torch.device("cpu")
IDENTITY = identity(CPU, "3.0")


def a_row(name: str = "kernel", *, ours: float = 1.0, peers: dict[str, Any] | None = None) -> Row:
    return Row(name, "copy", 100.0, 0.9, lambda: torch.tensor([ours]), lambda: torch.ones(1), 0.01, peers or {})


def a_report(path: Path, *, resume: bool = False, **other: str) -> Report:
    report = Report(path / "gpu.json", {**IDENTITY, **other}, "make bench-gpu", resume=resume)
    report.limits["copy"] = 200.0
    return report


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_kernels_rows_pass_their_check(module: Any) -> None:
    rows = list(module.rows(CPU, tiny=True))
    assert rows
    for row in rows:
        check(row)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_given_the_sequences_that_our_kernel_has() -> None:
    torch.manual_seed(0)
    query = torch.randn(3, 4, 16)
    keys, values = (torch.randn(3, 256, 2, 16) for _ in range(2))
    found = flex_paged(query, keys, values, scale=0.1, compiled=False)()
    dense_keys, dense_values = keys.transpose(1, 2), values.transpose(1, 2)
    expected = F.scaled_dot_product_attention(query.unsqueeze(2), dense_keys, dense_values, scale=0.1, enable_gqa=True)
    torch.testing.assert_close(found, expected.squeeze(2))


def test_names_differ() -> None:
    names = [row.name for row in all_rows(CPU, tiny=True)]
    assert len(set(names)) == len(names)


def test_a_wrong_or_unwritten_result_is_found() -> None:
    check(a_row(ours=1.005))
    with pytest.raises(Wrong, match="off by"):
        check(a_row(ours=1.02))
    unwritten = Row("kernel", "copy", 1.0, 0.9, lambda: torch.empty(4), lambda: torch.zeros(4), 0.01)
    with pytest.raises(Wrong):
        check(unwritten)


def test_a_row_is_reported_as_share_of_the_limit_and_beside_its_peers() -> None:
    def missing() -> object:
        raise ImportError("no such library")

    entry = measure(a_row(peers={"other": lambda: None, "absent": missing}), {"copy": 200.0}, _half_a_second)
    assert (entry["rate"], entry["share"]) == (200.0, 1.0)
    assert entry["peers"]["other"] == {"seconds": 0.5, "times_as_long": 1.0}
    assert "no such library" in entry["peers"]["absent"]["not_run"]
    assert "share" not in measure(a_row(), {}, _half_a_second), "without a limit there is no share"
    assert "off by" in measure(a_row(ours=2.0), {"copy": 200.0}, _half_a_second)["error"]


def _half_a_second(call: Any) -> float:
    call()
    return 0.5


def test_a_run_resumes_on_the_same_device_only(tmp_path: Path) -> None:
    def names(report: Report) -> list[str]:
        before = set(report.rows)
        run(report, iter((a_row("one"), a_row("two"))), only="", deadline=float("inf"), seconds=_half_a_second)
        return sorted(set(report.rows) - before)

    assert len(names(a_report(tmp_path))) == 2
    assert len(names(a_report(tmp_path, resume=True))) == 0
    assert len(names(a_report(tmp_path, resume=True, device="another"))) == 2
    assert len(names(a_report(tmp_path))) == 2
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert set(kept["rows"]) == {"one", "two"}
    assert kept["limits"] == {"copy": 200.0}


def test_rows_that_are_not_reached_in_time_are_named(tmp_path: Path) -> None:
    report = a_report(tmp_path)
    left = run(report, iter((a_row("one"), a_row("two"))), only="tw", deadline=0.0, seconds=_half_a_second)
    assert left == ["two"]
    assert not report.rows


def test_the_plot_is_drawn(tmp_path: Path) -> None:
    assert plot({"one": {"share": 0.8, "bar": 0.9}, "failed": {"error": "x"}}, tmp_path / "gpu.svg")
    assert "<svg" in (tmp_path / "gpu.svg").read_text()


def test_the_command_line() -> None:
    options = parse(["--only", "paged", "--resume", "--seed", "3"])
    assert (options.only, options.resume, options.seed) == ("paged", True, 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_without_a_gpu_nothing_is_measured_and_nothing_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--output", str(tmp_path)]) == 2
    assert "nothing was measured" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
