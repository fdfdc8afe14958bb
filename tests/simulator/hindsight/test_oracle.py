"""Optima in hindsight: paths, the fewest replicas, a baseline's best target, and the oracle."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.parameters import Parameter, Value
from trimtab_simulator.experiment import Experiment
from trimtab_simulator.hindsight.fixed_values import static_best, static_n
from trimtab_simulator.hindsight.oracle import Plan, cheapest_path, find_plan, replay_plan
from trimtab_simulator.hindsight.targets import LADDER, best_target
from trimtab_simulator.objectives import Objectives
from trimtab_simulator.plant.fleet import FleetSettings
from trimtab_simulator.plant.machine import Machine
from trimtab_simulator.policies.kubeai import KubeAi
from trimtab_simulator.replay import ReplaySettings
from trimtab_simulator.trace.arrivals import Arrival, Trace

MACHINE = Machine("m", "g", StepCost(0.01, 1e-4, 1e-4, 0.0), 100_000, max_model_len=8_000)
START: dict[Parameter, Value] = {
    Parameter.MAX_NUM_SEQS: 64,
    Parameter.MAX_NUM_BATCHED_TOKENS: 1024,
    Parameter.WATERMARK: 0.0,
    Parameter.GPU_MEMORY_UTILIZATION: 0.9,
}


def make_experiment(rates: list[float], *, start: int = 1, most: int = 6, prompt: int = 2000) -> Experiment:
    """Two minutes at each rate. A replica serves about 8 prompts of a second's tenth in time."""
    rng = random.Random(1)
    rows, at = [], 0.0
    for index, rate in enumerate(rates):
        end = 120.0 * (index + 1)
        while (at := at + rng.expovariate(rate)) < end:
            rows.append(Arrival(at, rng.randint(1, prompt), rng.randint(1, 20)))
        at = end
    trace = Trace("t", rows, 120.0 * len(rates))
    return Experiment(
        trace, FleetSettings(MACHINE, START, start, 1, most, 60.0), ReplaySettings(), Objectives(1.0, itl_mean=0.2)
    )


def cost_of(
    path: tuple[int, ...], misses: list[list[int]], low: int, seconds: float, cold: float, price: float
) -> float:
    added = sum(max(0, b - a) for a, b in itertools.pairwise(path))
    return sum(n * seconds + price * row[n - low] for n, row in zip(path, misses, strict=True)) + cold * added


@settings(max_examples=100, deadline=None)
@given(
    misses=st.lists(st.lists(st.integers(0, 30), min_size=3, max_size=3), min_size=1, max_size=5),
    cold=st.sampled_from([0.0, 30.0, 500.0]),
    price=st.sampled_from([0.1, 5.0, 100.0]),
)
def test_no_path_is_cheaper_than_the_cheapest(misses: list[list[int]], cold: float, price: float) -> None:
    path = cheapest_path(misses, low=2, first_most=3, seconds=60.0, cold_start=cold, price=price)
    every = (p for p in itertools.product((2, 3, 4), repeat=len(misses)) if p[0] <= 3)
    cheapest = min(cost_of(p, misses, 2, 60.0, cold, price) for p in every)
    assert cost_of(path, misses, 2, 60.0, cold, price) == pytest.approx(cheapest)
    assert path[0] <= 3


def test_a_plan_asks_for_more_ahead_of_time_and_for_fewer_on_time() -> None:
    assert Plan((2, 4, 4, 1, 2), 60.0).schedule(60.0) == [(0.0, 4), (180.0, 1), (180.0, 2)]


@pytest.mark.parametrize("start", [1, 3, 6])
def test_the_fewest_replicas_attain_and_one_fewer_do_not(start: int) -> None:
    experiment = make_experiment([4.0, 18.0], start=start)
    found, outcome = static_n(experiment)
    judged = found.judge("static-n", outcome)
    assert judged.attainment >= 0.99
    count = found.settings.start_replicas
    assert judged.gpu_hours == pytest.approx(count * 240 / 3600)
    fewer = found.with_replicas(count - 1)
    assert count > 1
    assert fewer.judge("static-n", fewer.run_fixed()).attainment < 0.99


def test_most_replicas_are_kept_if_they_do_not_suffice() -> None:
    found, _ = static_n(make_experiment([30.0], most=2))
    assert found.settings.start_replicas == 2


def test_best_fixed_values_are_not_worse_than_start_values() -> None:
    experiment = make_experiment([9.0]).with_parameters({Parameter.MAX_NUM_SEQS: 2})
    found, outcome = static_best(experiment)
    before = experiment.judge("static", experiment.run_fixed()).goodput_tokens_per_s
    assert found.judge("static-best", outcome).goodput_tokens_per_s > 1.2 * before
    assert found.settings.parameters[Parameter.MAX_NUM_SEQS] > 2
    assert found.settings.start_replicas == 1


def test_best_target_attains_with_fewest_gpu_hours() -> None:
    experiment = make_experiment([4.0, 12.0, 4.0], start=2)
    target, outcome = best_target(experiment, KubeAi)
    judged = experiment.judge("kubeai", outcome)
    assert judged.attainment >= 0.99
    index = LADDER.index(target)
    for other in LADDER[index + 1 : index + 3]:
        laxer = experiment.judge("kubeai", experiment.run(KubeAi(other)))
        assert laxer.attainment < 0.99 or laxer.gpu_hours >= judged.gpu_hours - 1e-9


def test_the_oracle_follows_the_load_and_is_ready_before_it() -> None:
    experiment = make_experiment([3.0, 20.0, 3.0])
    fixed, fixed_outcome = static_n(experiment)
    outcome = replay_plan(experiment, find_plan(experiment))
    judged = experiment.judge("oracle", outcome)
    assert judged.attainment >= 0.99
    assert judged.gpu_hours < 0.8 * fixed.judge("static-n", fixed_outcome).gpu_hours
    first = outcome.changes[0]
    assert first.after > first.before
    assert first.at <= 120.0


def test_answers_that_outlast_their_interval_are_planned_for() -> None:
    rng = random.Random(2)
    times = sorted(rng.uniform(0, 600) for _ in range(900))
    trace = Trace("t", [Arrival(at, 50, 4000) for at in times], 600.0)
    machine = Machine("m", "g", StepCost(0.01, 0.0, 4e-4, 0.0), 1_000_000, max_model_len=8_000)
    parameters = {**START, Parameter.MAX_NUM_SEQS: 1024, Parameter.MAX_NUM_BATCHED_TOKENS: 2048}
    experiment = Experiment(
        trace, FleetSettings(machine, parameters, 6, 1, 8, 60.0), ReplaySettings(), Objectives(2.0, itl_mean=0.06)
    )
    judged = experiment.judge("oracle", replay_plan(experiment, find_plan(experiment)))
    assert judged.attainment >= 0.99
    assert judged.gpu_hours < 6 * 600 / 3600
