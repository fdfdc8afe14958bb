"""The scheduler benchmark runs, measures the requested loads, and prints both formats."""

import json

import pytest
from engine_benchmarks import scheduler_bench


def test_percentiles_use_nearest_rank() -> None:
    seconds = [index / 1000 for index in range(100)]
    assert scheduler_bench.percentile_ms(seconds, 50) == 50.0
    assert scheduler_bench.percentile_ms(seconds, 99) == 99.0
    assert scheduler_bench.percentile_ms([0.002], 99) == 2.0


def test_steady_decode_keeps_number_of_running_requests() -> None:
    measured = scheduler_bench.measure_steady_decode(64, steps=10)
    assert (measured.running, measured.steps, measured.tokens, measured.preemptions) == (64, 10, 640, 0)


def test_json_names_every_load(capsys: pytest.CaptureFixture[str]) -> None:
    assert scheduler_bench.main(["-o", "json", "--steps", "3"]) == 0
    loads = [(m["load"], m["running"]) for m in json.loads(capsys.readouterr().out)["measurements"]]
    assert loads[:3] == [("steady decode", 64), ("steady decode", 256), ("steady decode", 1024)]
    assert loads[3][0] == "mixed"


def test_table_has_a_row_for_each_load() -> None:
    measurements = [scheduler_bench.measure_steady_decode(64, steps=2)]
    assert len(scheduler_bench.table(measurements).splitlines()) == 2
