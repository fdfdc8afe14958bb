"""Figures of other Triton versions are in separate files, and the page shows the differences."""

import json
from pathlib import Path
from typing import Any

from kernel_benchmarks.aot.other_versions import PINNED, comparison, differs, file_name, other_runs

REPOSITORY = Path(__file__).parents[4]


def an_entry(case: str = "case", **changes: Any) -> dict[str, Any]:
    entry = {"case": case, "kernel": "kernel", "target": 90, "registers": 100, "spill_bytes": 0}
    return {**entry, "shared_bytes": 1024, "wgmma": False, "num_warps": 4, "num_stages": 3, **changes}


def test_pinned_triton_equals_constraints() -> None:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith(f"triton=={PINNED}.")]


def test_each_version_has_own_file(tmp_path: Path) -> None:
    assert (file_name(f"{PINNED}.1"), file_name("3.6.0")) == ("aot.json", "aot-triton-3.6.json")
    for name, version in (("aot.json", "3.9.0"), ("aot-triton-3.6.json", "3.6.0")):
        (tmp_path / name).write_text(json.dumps({"triton": version, "kernels": [an_entry()]}))
    assert other_runs(tmp_path) == {"3.6.0": [an_entry()]}


def test_small_register_changes_are_no_difference() -> None:
    assert not differs(an_entry(), an_entry(registers=110))
    assert differs(an_entry(), an_entry(registers=80))
    assert differs(an_entry(), an_entry(spill_bytes=8))
    assert differs(an_entry(wgmma=True), an_entry())


def test_page_shows_important_cases_and_differences() -> None:
    cases = [an_entry("like"), an_entry("asked"), an_entry("other"), an_entry("absent")]
    page = comparison(cases, "3.6.0", [*cases[:2], an_entry("other", spill_bytes=16)], frozenset({"asked"}))
    assert "| asked | kernel | 100 · 1 | 100 · 1 |" in page
    assert "| other | kernel | 100 · 1 | 100 · 1, spills 16 |" in page
    assert not [line for line in page if line.startswith("| like")]
    assert "Not compiled by 3.6.0: absent (kernel) for sm_90." in page
    assert any(line.startswith("3 kernels for sm_90 compile and fit; of these spill: 1 on sm_90.") for line in page)


def test_repeated_launches_of_a_case_are_compared_in_order() -> None:
    pair = [an_entry(), an_entry(registers=200)]
    page = comparison(pair, "3.6.0", [an_entry(), an_entry(registers=100)], frozenset())
    assert "| case | kernel | 200 · 1 | 100 · 1 |" in page
    assert len([line for line in page if line.startswith("| case | kernel | ")]) == 2  # the head, and one row


def test_other_configurations_are_not_compared() -> None:
    page = comparison([an_entry()], "3.6.0", [an_entry(num_warps=8, registers=200)], frozenset({"case"}))
    assert not [line for line in page if line.startswith("| case | kernel | 100")]
