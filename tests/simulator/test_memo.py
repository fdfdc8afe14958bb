"""Findings of searches are kept by what was searched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from trimtab_operator.tuner.parameters import Parameter, Value
from trimtab_simulator import memo
from trimtab_simulator.contest import Contest
from trimtab_simulator.objectives import Objectives
from trimtab_simulator.plant.fleet import FleetSettings
from trimtab_simulator.plant.machine import machine_of
from trimtab_simulator.policies.names import Entry
from trimtab_simulator.replay import Loop
from trimtab_simulator.results import compete
from trimtab_simulator.trace.arrivals import Arrival, Trace

KNOBS: dict[Parameter, Value] = {
    Parameter.MAX_NUM_SEQS: 64,
    Parameter.MAX_NUM_BATCHED_TOKENS: 1024,
    Parameter.WATERMARK: 0.0,
    Parameter.GPU_MEMORY_UTILIZATION: 0.9,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def a_contest(prompt: int = 500) -> Contest:
    trace = Trace("t", [Arrival(i / 4, prompt, 20) for i in range(400)], 100.0)
    fleet = FleetSettings(machine_of("llama-3.1-8b", "h200"), KNOBS, 1, 1, 4, 60.0)
    return Contest(trace, fleet, Loop(), Objectives(1.0, itl_mean=0.05))


def test_a_key_names_everything_that_a_search_depends_on() -> None:
    contest = a_contest()
    others = [
        a_contest(prompt=501),
        replace(contest, objectives=Objectives(1.0, itl_mean=0.06)),
        contest.with_parameters({Parameter.MAX_NUM_SEQS: 63}),
        contest.with_replicas(2),
        contest.with_queues_ordered,
        replace(contest, loop=Loop(seed=1)),
    ]
    keys = {memo.key_of(each, "oracle") for each in (contest, *others)} | {memo.key_of(contest, "kubeai")}
    assert len(keys) == 2 + len(others)
    assert memo.key_of(a_contest(), "oracle") in keys


@pytest.mark.parametrize("name", ["static-n", "static-best", "oracle", "kubeai"])
def test_what_is_recalled_is_what_was_found(name: str) -> None:
    contest = a_contest()
    first = compete(contest, Entry(name))
    assert list(memo.folder().glob("*.json"))
    second = compete(contest, Entry(name))
    assert first.score == second.score
    assert (first.target, first.start_replicas) == (second.target, second.start_replicas)


def test_fixed_replicas_are_searched_once_whatever_a_start_takes() -> None:
    contest = a_contest()
    other = replace(contest, settings=replace(contest.settings, cold_start_seconds=300.0))
    first, second = compete(contest, Entry("static-n")), compete(other, Entry("static-n"))
    assert first.score == second.score
    assert len(list(memo.folder().glob("*.json"))) == 1


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_broken_finding_is_none(content: str) -> None:
    memo.folder().mkdir(parents=True)
    (memo.folder() / "key.json").write_text(content)
    assert memo.recall("key") is None
