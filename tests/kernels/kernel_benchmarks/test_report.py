"""The report keeps its results, however the writing process ends."""

from pathlib import Path

import pytest
from kernel_benchmarks.report import FILE, Report, format_error

HERE = {"device": "one", "torch": "2.11"}


def a_report(folder: Path, run: str = "1") -> Report:
    return Report(folder / FILE, run)


def test_report_is_read_back_by_next_process(tmp_path: Path) -> None:
    first = a_report(tmp_path)
    first.start(HERE, "make bench-gpu", keep_rows=False, only="")
    first.limits["copy"] = 2.0
    first.add("row", {"share": 0.5})
    first.add_peer("row", "other", {"seconds": 1.0})
    second = a_report(tmp_path)
    assert (second.identity, second.command, second.limits) == (HERE, "make bench-gpu", {"copy": 2.0})
    assert second.rows["row"]["share"] == 0.5
    assert second.has("row")
    assert second.has_peer("row", "other")
    assert not second.has("another")


def test_remeasured_row_keeps_its_peers(tmp_path: Path) -> None:
    report = a_report(tmp_path)
    report.add_peer("row", "other", {"seconds": 1.0})
    assert not report.has("row"), "only its peer is there"
    report.add("row", {"share": 0.5})
    assert report.has("row")
    assert report.has_peer("row", "other")


def test_start_drops_remeasured_rows_and_other_devices(tmp_path: Path) -> None:
    report = a_report(tmp_path)
    report.start(HERE, "", keep_rows=False, only="")
    for name in ("paged a", "paged b", "norm"):
        report.add(name, {"share": 0.5})
    report.start(HERE, "", keep_rows=True, only="paged")
    assert len(report.rows) == 3
    report.start(HERE, "", keep_rows=False, only="paged")
    assert list(report.rows) == ["norm"]
    report.start({**HERE, "torch": "2.13"}, "", keep_rows=True, only="")
    assert report.rows == {}


def test_failed_rows_are_retried_only_in_another_run(tmp_path: Path) -> None:
    report = a_report(tmp_path)
    report.add("row", {"error": "wrong"})
    report.add_peer("row", "other", {"not_run": "absent"})
    assert (report.has("row"), report.has_peer("row", "other")) == (True, True)
    later = a_report(tmp_path, run="2")
    assert (later.has("row"), later.has_peer("row", "other")) == (False, False)


@pytest.mark.parametrize("peer", ["", "other"])
def test_running_row_fails_when_process_ends(tmp_path: Path, peer: str) -> None:
    report = a_report(tmp_path)
    report.begin("row", peer, seconds=60.0)
    assert a_report(tmp_path).fail_running("ended")
    found = a_report(tmp_path)
    row = found.rows["row"]
    assert (row["peers"][peer]["not_run"] if peer else row["error"]) == "ended"
    assert not found.fail_running("again"), "nothing runs any more"


def test_running_row_is_dropped_without_remaining_time(tmp_path: Path) -> None:
    report = a_report(tmp_path)
    report.begin("row", seconds=60.0)
    report.drop_running()
    assert a_report(tmp_path).rows == {}
    assert a_report(tmp_path).running is None


def test_errors_are_formatted_on_one_line_without_folders() -> None:
    error = ImportError("cannot import name 'core'\n (/tmp/wheels-1/tvm_ffi/__init__.py), 3/4 of it")
    assert format_error(error) == "ImportError: cannot import name 'core' (__init__.py), 3/4 of it"
    assert format_error(ValueError("x" * 500), 20) == "ValueError: " + "x" * 8
