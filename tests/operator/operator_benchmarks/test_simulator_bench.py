"""Calculations of the comparison between simulator and engine; no engine is started here."""

import pytest
from engine_benchmarks.mechanism_bench import load_of
from operator_benchmarks.simulator_bench import SETTINGS, Pair, fit_machine, intervals, page, simulated, sums_of
from trimtab_engine.bench.local_server import LocalServer
from trimtab_engine.bench.serving.samples import Words, random_samples

PAGE = """# TYPE trimtab_step_seconds histogram
trimtab_step_seconds_bucket{engine="0",kind="decode",le="+Inf"} 4
trimtab_step_seconds_count{engine="0",kind="decode"} 4
trimtab_step_seconds_sum{engine="0",kind="decode"} 0.5
trimtab_step_seconds_count{engine="1",kind="decode"} 6
trimtab_step_seconds_sum{engine="1",kind="decode"} 1.5
# TYPE trimtab_step_tokens_total counter
trimtab_step_tokens_total{engine="0",kind="decode"} 40
trimtab_step_tokens_total{engine="1",kind="decode"} 2
"""


def test_sums_add_all_cores() -> None:
    assert sums_of(PAGE) == {"decode": {"steps": 10, "seconds": 2.0, "tokens": 42, "sequences": 0, "context": 0}}


def test_a_kind_that_took_no_step_meanwhile_is_no_interval() -> None:
    first = {"decode": {"steps": 1.0, "seconds": 1.0}, "mixed": {"steps": 2.0, "seconds": 1.0}}
    second = {"decode": {"steps": 3.0, "seconds": 2.5}, "mixed": {"steps": 2.0, "seconds": 1.0}}
    third = {**second, "prefill": {"steps": 1.0, "seconds": 0.5}}
    assert intervals([first, second, third]) == [{"steps": 2.0, "seconds": 1.5}, {"steps": 1.0, "seconds": 0.5}]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_times_are_fitted_and_the_load_is_replayed_with_them(setting) -> None:  # type: ignore[no-untyped-def]
    rows = [
        {"steps": 1.0, "tokens": t, "sequences": s, "context": c, "seconds": 0.01 + 0.001 * t + 0.002 * s + 1e-5 * c}
        for t, s, c in ((1.0, 1.0, 200.0), (8.0, 8.0, 900.0), (64.0, 3.0, 400.0), (256.0, 2.0, 300.0), (4.0, 4.0, 2e3))
    ]
    machine = fit_machine(setting, rows)
    assert machine.cost.per_token == pytest.approx(0.001, rel=1e-3)
    assert machine.cost.per_step == pytest.approx(0.01, rel=1e-2)
    samples = random_samples(40, setting.lengths, Words(None, seed=2))
    found = simulated(setting, machine, load_of(LocalServer("", ""), samples, rate=4.0))
    assert found["ttft_p95"] > found["itl_p95"] > 0.01
    assert (found["preemptions"] > 0) == (setting is SETTINGS[2])


def test_a_figure_that_is_too_far_off_is_named() -> None:
    real = {"throughput": 100.0, "ttft_p95": 1.0, "itl_p95": 0.1, "preemptions": 0.0}
    text = page([Pair("a", 80, 1.5, {}, real, {**real, "ttft_p95": 1.2})])
    assert "| TTFT p95, s | 1 | 1.2 | +20% **missed** |" in text
    assert "| tokens/s | 100 | 100 | +0% |" in text
    assert "preemptions" not in text
