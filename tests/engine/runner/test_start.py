"""Graphs captured at start-up."""

import logging

import pytest
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.runner.graphs.plan import NO_GRAPHS, graph_plan
from trimtab_engine.runner.start import plan_for


@pytest.fixture
def config() -> EngineConfig:
    return EngineConfig(model="m", device="cuda")


def test_ranks_with_capturable_collectives_have_graphs(config: EngineConfig) -> None:
    assert graph_plan(config).keys
    assert plan_for(config, can_capture=True) == graph_plan(config)


def test_ranks_over_host_memory_have_no_graphs_and_warn(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert plan_for(config, can_capture=False) == NO_GRAPHS
    assert "fewer GPUs than ranks" in caplog.text
    assert "give each rank a GPU" in caplog.text


def test_no_warning_without_requested_graphs(caplog: pytest.LogCaptureFixture) -> None:
    eager = EngineConfig(model="m", device="cuda", enforce_eager=True)
    with caplog.at_level(logging.WARNING):
        assert plan_for(eager, can_capture=False) == NO_GRAPHS
    assert not caplog.records
