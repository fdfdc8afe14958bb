"""Which graphs a start captures."""

import logging

import pytest
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.runner.graphs.plan import NO_GRAPHS, graph_plan
from trimtab_engine.runner.start import plan_for


@pytest.fixture
def config() -> EngineConfig:
    return EngineConfig(model="m", device="cuda")


def test_ranks_whose_collectives_can_be_captured_have_the_configuration_s_graphs(config: EngineConfig) -> None:
    assert graph_plan(config).keys
    assert plan_for(config, can_capture=True) == graph_plan(config)


def test_ranks_that_talk_through_host_memory_have_none_and_the_warning_says_what_to_do(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert plan_for(config, can_capture=False) == NO_GRAPHS
    assert "fewer GPUs than ranks" in caplog.text
    assert "give each rank a GPU" in caplog.text


def test_there_is_nothing_to_warn_of_where_no_graphs_were_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    eager = EngineConfig(model="m", device="cuda", enforce_eager=True)
    with caplog.at_level(logging.WARNING):
        assert plan_for(eager, can_capture=False) == NO_GRAPHS
    assert not caplog.records
