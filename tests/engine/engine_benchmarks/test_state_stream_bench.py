"""The benchmark of the state stream runs, and the ledger's cost is in its range."""

import re

import pytest
from engine_benchmarks import state_stream_bench


def test_bench_reports_cost_per_block_boundary(capsys: pytest.CaptureFixture[str]) -> None:
    state_stream_bench.main(["--runs", "2"])
    output = capsys.readouterr().out
    (extra,) = re.findall(r"ledger: (-?[\d.]+) µs more per block boundary", output)
    assert float(extra) < 5.0  # the bar is 1 µs on an idle machine
    assert "step-time fit" in output
