"""Cached searches are keyed by their inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from trimtab_operator.tuner.parameters import Parameter, Value
from trimtab_simulator import search_cache
from trimtab_simulator.experiment import Experiment
from trimtab_simulator.objectives import Objectives
from trimtab_simulator.plant.fleet import FleetSettings
from trimtab_simulator.plant.machine import machine_of
from trimtab_simulator.policies.names import PolicySpec
from trimtab_simulator.replay import ReplaySettings
from trimtab_simulator.results import run_policy
from trimtab_simulator.trace.arrivals import Arrival, Trace

PARAMETERS: dict[Parameter, Value] = {
    Parameter.MAX_NUM_SEQS: 64,
    Parameter.MAX_NUM_BATCHED_TOKENS: 1024,
    Parameter.WATERMARK: 0.0,
    Parameter.GPU_MEMORY_UTILIZATION: 0.9,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def make_experiment(prompt: int = 500) -> Experiment:
    trace = Trace("t", [Arrival(i / 4, prompt, 20) for i in range(400)], 100.0)
    fleet = FleetSettings(machine_of("llama-3.1-8b", "h200"), PARAMETERS, 1, 1, 4, 60.0)
    return Experiment(trace, fleet, ReplaySettings(), Objectives(1.0, itl_mean=0.05))


def test_a_key_names_everything_that_a_search_depends_on() -> None:
    experiment = make_experiment()
    others = [
        make_experiment(prompt=501),
        replace(experiment, objectives=Objectives(1.0, itl_mean=0.06)),
        experiment.with_parameters({Parameter.MAX_NUM_SEQS: 63}),
        experiment.with_replicas(2),
        experiment.with_queues_ordered,
        replace(experiment, loop=ReplaySettings(seed=1)),
    ]
    keys = {search_cache.key_of(each, "oracle") for each in (experiment, *others)} | {
        search_cache.key_of(experiment, "kubeai")
    }
    assert len(keys) == 2 + len(others)
    assert search_cache.key_of(make_experiment(), "oracle") in keys


@pytest.mark.parametrize("name", ["static-n", "static-best", "oracle", "kubeai"])
def test_cached_result_equals_search_result(name: str) -> None:
    experiment = make_experiment()
    first = run_policy(experiment, PolicySpec(name))
    assert list(search_cache.folder().glob("*.json"))
    second = run_policy(experiment, PolicySpec(name))
    assert first.score == second.score
    assert (first.target, first.start_replicas) == (second.target, second.start_replicas)


def test_fixed_replicas_are_searched_once_for_all_cold_starts() -> None:
    experiment = make_experiment()
    other = replace(experiment, settings=replace(experiment.settings, cold_start_seconds=300.0))
    first, second = run_policy(experiment, PolicySpec("static-n")), run_policy(other, PolicySpec("static-n"))
    assert first.score == second.score
    assert len(list(search_cache.folder().glob("*.json"))) == 1


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_broken_finding_is_none(content: str) -> None:
    search_cache.folder().mkdir(parents=True)
    (search_cache.folder() / "key.json").write_text(content)
    assert search_cache.load_result("key") is None
