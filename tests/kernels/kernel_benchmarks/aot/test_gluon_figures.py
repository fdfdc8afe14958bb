"""The committed figures of warp-specialised kernels."""

import json
from pathlib import Path

import pytest
from kernel_benchmarks.aot.compiler import Compiled

RESULTS = Path(__file__).parents[4] / "docs/results"
FIGURES = [
    Compiled.of_entry(entry)
    for file in ("aot.json", "aot-triton-3.6.json")
    for entry in json.loads((RESULTS / file).read_text())["kernels"]
    if entry.get("consumer_groups")
]
MIN_PEAK_SHARE = 0.75


def test_figures_include_both_gluon_kernels() -> None:
    assert {entry.kernel for entry in FIGURES} == {"paged_prefill_gluon", "w8a8_block_fp8_gluon"}


@pytest.mark.parametrize("figures", FIGURES, ids=lambda entry: f"{entry.case}, {entry.key[:6]}")
def test_gluon_hot_loops_reach_minimum_peak_share(figures: Compiled) -> None:
    assert figures.target == 90
    assert figures.hot_loop is not None
    assert figures.bound is not None
    assert figures.bound.share >= MIN_PEAK_SHARE
    assert figures.hot_loop.spills == 0
    assert figures.hot_loop.waits * 4 <= figures.hot_loop.products
    assert figures.bulk_bytes > 0
