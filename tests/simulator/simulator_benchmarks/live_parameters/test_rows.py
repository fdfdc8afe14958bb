"""Rows are measured on seeded loads and list their inputs."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest
from simulator_benchmarks.live_parameters import mixes, storm
from simulator_benchmarks.live_parameters.__main__ import ROWS, main
from simulator_benchmarks.live_parameters.loads import BOTH, BUDGETS, Phase, best_budget, budget_of, h200, poisson
from simulator_benchmarks.live_parameters.mixes import ScheduledPolicy
from simulator_benchmarks.live_parameters.scenes import CLIENTS, scene_settings
from simulator_benchmarks.scenarios import CODE, CONVERSATIONS
from trimtab_operator.tuner.parameters import Parameter
from trimtab_simulator.policies.policy import STAY, PolicyInput

LOG = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A development slice of two small logs."""
    for name, prompt, answer in ((CONVERSATIONS, 900, 200), (CODE, 2000, 25)):
        rows = "".join(f"2023-11-16 18:15:{i:02d}.0000000,{prompt + 10 * i},{answer + i}\n" for i in range(40))
        (tmp_path / name).write_bytes(gzip.compress((LOG + rows).encode()))
    return tmp_path


def test_phases_follow_each_other_and_a_seed_draws_the_same(folder: Path) -> None:
    phases = [Phase(CONVERSATIONS, 5.0, 100.0), Phase(CODE, 2.0, 100.0)]
    trace = poisson(folder, phases, 3)
    assert trace.arrivals == poisson(folder, phases, 3).arrivals
    assert trace.arrivals != poisson(folder, phases, 4).arrivals
    assert trace.seconds == 200.0
    assert {arrival.prompt >= 2000 for arrival in trace.arrivals if arrival.at < 100} == {False}
    assert {arrival.prompt >= 2000 for arrival in trace.arrivals if arrival.at >= 100} == {True}


def test_scheduled_policy_switches_once_at_its_time() -> None:
    policy = ScheduledPolicy([(900.0, budget_of(512))])
    assert policy.decide(PolicyInput(885.0, 1, {}, ())) is STAY
    assert policy.decide(PolicyInput(900.0, 1, {}, ())).parameters == {Parameter.MAX_NUM_BATCHED_TOKENS: 512}
    assert policy.decide(PolicyInput(915.0, 1, {}, ())) is STAY


def test_the_best_fixed_budget_is_one_of_the_grid(folder: Path) -> None:
    budget, goodput = best_budget(poisson(folder, [Phase(CODE, 3.0, 60.0)], 0), BOTH, 0, 10.0)
    assert budget in BUDGETS
    assert goodput > 0


def test_scene_engine_holds_half_of_its_clients() -> None:
    machine = scene_settings(headroom=True).machine
    assert 0.4 < machine.kv_tokens / (CLIENTS * 256) < 0.6
    assert machine.blocks_at(machine.cap_utilization) > 2 * machine.blocks_at(0.90)
    assert scene_settings(headroom=False).machine.cap_utilization == 0.90
    assert h200({}, headroom=False).machine.cap_utilization == 0.90


def test_storm_yields_calm_time_and_ttft(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storm, "CALM_SECONDS", 60.0)
    monkeypatch.setattr(storm, "STORM_SECONDS", 120.0)
    figures = list(storm.storm(folder, 0))
    assert [figure.load for figure in figures] == ["headroom"] * 5 + ["no headroom"] * 4
    assert {figure.measure for figure in figures} == {
        "seconds until under 1 %",
        "recomputed share from then on",
        "TTFT p50 of Off's",
        "TTFT p50 of enough KV's",
        "direction changes of a parameter in 10 min",
    }
    assert all(figure.value >= 0 for figure in figures)


@pytest.mark.parametrize(
    ("recomputed", "expected"),
    [
        ([0, 0, 0, 0], (0.0, 0.0)),
        ([0, 30, 20, 0, 0], (30.0, 0.0)),
        ([0, 30, 0, 4, 0, 0], (15.0, 0.001)),  # later storms count
        ([0, 30, 20, 20], (math.inf, 1.0)),
    ],
)
def test_a_storm_ends_with_the_first_calm_window(recomputed: list[float], expected: tuple[float, float]) -> None:
    windows = [(15.0 * (index + 1), count, 1000.0) for index, count in enumerate(recomputed)]
    assert storm.time_to_calm(windows) == pytest.approx(expected)


def test_a_shift_is_judged_once_it_has_settled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixes, "PHASE_SECONDS", 60.0)
    monkeypatch.setattr(mixes, "SETTLED_SECONDS", 30.0)
    monkeypatch.setattr(mixes, "PAIRS", (("conv", "code"),))
    figures = list(mixes.shifts(folder, 0))
    assert [figure.load for figure in figures] == [
        "conv, code, conv: second", "conv, code, conv: third", "conv, code, conv",
    ]  # fmt: skip
    assert figures[0].details["switched"] > 0


def test_unknown_row_is_rejected(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as rejected:
        main(["--traces", str(folder), "--rows", "scenes,weather"])
    assert rejected.value.code == 2
    assert f"weather; known are {', '.join(ROWS)}" in capsys.readouterr().err
