"""Scenarios use the files that they name, at their nominal rates. Small stand-ins replace the real files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from simulator_benchmarks import scenarios
from simulator_benchmarks.scenarios import SCENARIOS, Scenario
from trimtab_simulator.trace.load import highest_rate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two days of rates, and logs of a few requests."""
    header = "client,window_start_s,rate,cv\n"
    rows = "".join(f"1,{600 * i},{10 + i % 144},1\n" for i in range(288))
    (tmp_path / scenarios.SMALL_RATES).write_text(header + rows)
    (tmp_path / scenarios.MID_RATES).write_text(header + "".join(f"1,{600 * i},10,1\n" for i in range(7 * 144)))
    (tmp_path / scenarios.R1_RATES).write_text(header + "".join(f"1,{600 * i},5,1\n" for i in range(72)))
    length = '{"client": 1, "window_start_s": 0, "input_tokens": "{900: 1.0}", "output_tokens": "{1500: 1.0}"}'
    (tmp_path / scenarios.R1_LENGTHS).write_text(length)
    for name, prompt, output in ((scenarios.CONVERSATIONS, 1000, 200), (scenarios.CODE, 2000, 30)):
        stamps = (f"2023-11-16 18:{i // 60:02}:{i % 60:02}.0,{prompt},{output}" for i in range(600))
        (tmp_path / name).write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(stamps))
    moon = '{{"timestamp": {}, "input_length": 9000, "output_length": 300, "hash_ids": [1]}}'
    (tmp_path / scenarios.MOONCAKE).write_text("\n".join(moon.format(3000 * i) for i in range(300)))
    return tmp_path


LOADS = [each for each in SCENARIOS if not each.name.endswith(("-real", "-from-1"))]


@pytest.mark.parametrize("scenario", LOADS, ids=lambda scenario: scenario.name)
def test_every_scenario_can_be_made_and_repeats(scenario: Scenario, folder: Path) -> None:
    experiment = scenario.experiment(folder, seed=1, cold_start=60.0)
    assert experiment.trace.arrivals
    assert all(0 <= a.at <= experiment.trace.seconds and not a.prefix for a in experiment.trace.arrivals)
    assert experiment.settings.cold_start_seconds == 60.0
    again, other = (scenario.experiment(folder, seed=seed).trace.arrivals for seed in (1, 2))
    assert experiment.trace.arrivals == again != other


def test_a_day_passes_in_two_hours_up_to_its_peak(folder: Path) -> None:
    (day,) = (each for each in SCENARIOS if each.name == "day")
    trace = day.experiment(folder).trace
    assert trace.seconds == 7200
    assert highest_rate(trace.arrivals) == pytest.approx(30, rel=0.15)


def test_mix_alternates_code_load(folder: Path) -> None:
    (mix,) = (each for each in SCENARIOS if each.name == "mix")
    code = [a for a in mix.experiment(folder).trace.arrivals if a.prompt == 2000]
    busy, calm = (sum(int(a.at / 600) % 2 == turn for a in code) for turn in (0, 1))
    assert calm == pytest.approx(0.15 * busy, rel=0.25)


def test_scenarios_from_one_differ_in_their_start_only() -> None:
    named = {each.name: each for each in SCENARIOS}
    for scenario in LOADS:
        if f"{scenario.name}-from-1" in named:
            assert named[f"{scenario.name}-from-1"] == replace(
                scenario, name=f"{scenario.name}-from-1", start_replicas=1
            )


def test_ramp_rises_sixfold_in_ten_minutes(folder: Path) -> None:
    (ramp,) = (each for each in SCENARIOS if each.name == "ramp")
    arrivals = ramp.experiment(folder).trace.arrivals
    before, top = (sum(start <= a.at < start + 600 for a in arrivals) / 600 for start in (0, 1500))
    assert before == pytest.approx(5, rel=0.1)
    assert top == pytest.approx(30, rel=0.05)


def test_llm_d_scenario_has_the_published_load(folder: Path) -> None:
    (llm_d,) = (each for each in SCENARIOS if each.name == "llm-d")
    experiment = llm_d.experiment(folder)
    arrivals = experiment.trace.arrivals
    assert experiment.trace.seconds == 2430
    assert len(arrivals) == 2 * 330 + (4 + 6 + 8 + 10 + 4) * 360 + 300
    assert sum(a.prompt for a in arrivals) / len(arrivals) == pytest.approx(4000, rel=0.01)
    assert {a.output < 900 or a.output > 1100 for a in arrivals} == {False}
    assert (experiment.settings.min_replicas, experiment.settings.max_replicas, llm_d.cold_start) == (3, 8, 100.0)
