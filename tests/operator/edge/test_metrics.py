"""Scraping: one page becomes one sample or a named failure; one group that fails spoils nobody else's reading."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import httpx
import pytest
from operator_builders import ONE_RANK
from trimtab_operator.edge.metrics import (
    EngineSample,
    ScrapeFailure,
    ask,
    parse_metrics,
    scrape,
)
from trimtab_operator.observed.engines import Target

if TYPE_CHECKING:
    from tests.operator.conftest import ContractEngine

VLLM_PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 5.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:gpu_cache_usage_perc{engine="1",model_name="m"} 0.9
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
vllm:num_preemptions_total{engine="1",model_name="m"} 1.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 100.0
vllm:generation_tokens_total{engine="1",model_name="m"} 50.0
"""


def parsed(page: str) -> EngineSample:
    sample = parse_metrics(page.encode(), at=7.0)
    assert isinstance(sample, EngineSample), sample
    return sample


def failure(page: str | bytes) -> str:
    sample = parse_metrics(page if isinstance(page, bytes) else page.encode(), at=7.0)
    assert isinstance(sample, ScrapeFailure), sample
    return sample.reason


def test_our_page_gives_the_preemptions_for_want_of_room_alone(engine: ContractEngine) -> None:
    assert parsed(engine.metrics) == EngineSample(7.0, 8.0, 3.0, 0.98, 37.0, 5000.0, 1)


def test_a_page_of_vllm_is_summed_over_its_engines_and_older_names_are_known() -> None:
    assert parsed(VLLM_PAGE) == EngineSample(7.0, 8.0, 2.0, 0.9, 8.0, 150.0, None)


def test_without_a_series_of_our_counter_the_page_counts_as_vllm_does(engine: ContractEngine) -> None:
    page = "\n".join(line for line in engine.metrics.splitlines() if not line.startswith("trimtab_preempted")) + "\n"
    assert parsed(page).preemptions_total == 40.0


def test_only_resizes_so_far_are_no_preemptions_for_want_of_room(engine: ContractEngine) -> None:
    page = "\n".join(line for line in engine.metrics.splitlines() if 'reason="capacity"' not in line) + "\n"
    assert parsed(page).preemptions_total == 0.0


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ("vllm:num_requests_running", "vllm:num_requests_running"),
        ("vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"),
        ("vllm:num_preemptions_total", "vllm:num_preemptions_total"),
        ("vllm:generation_tokens_total", "vllm:generation_tokens_total"),
    ],
)
def test_a_metric_that_is_missing_is_named(lost: str, named: str) -> None:
    page = "\n".join(line for line in VLLM_PAGE.splitlines() if lost not in line) + "\n"
    assert failure(page) == f"the metrics page lacks {named} (is --disable-log-stats set?)"


def test_whole_numbers_are_numbers_too() -> None:
    page = VLLM_PAGE.replace(" 5.0\n", " 5\n") + "trimtab_config_generation 3\n"
    assert (parsed(page).running, parsed(page).config_generation) == (8.0, 3)


def test_an_empty_page_lacks_everything() -> None:
    assert "vllm:num_requests_running, vllm:num_requests_waiting" in failure("")


@pytest.mark.parametrize(
    "page",
    [
        "<html>502 Bad Gateway</html>",
        "vllm:num_requests_running{engine=",
        "vllm:num_requests_running nonsense\n",
        b"\xff\xfe\x00",
        VLLM_PAGE + 'vllm:num_requests_running{engine="0",model_name="m"} 6.0\n',
        VLLM_PAGE + "trimtab_config_generation NaN\n",
        VLLM_PAGE + "trimtab_config_generation 1.5\n",
    ],
)
def test_a_page_that_cannot_be_read_is_a_failure_and_no_exception(page: str | bytes) -> None:
    assert failure(page).startswith(("the metrics page cannot be read: ", "the metrics page lacks "))


def test_impossible_values_are_passed_on_for_the_tuner_to_judge() -> None:
    page = VLLM_PAGE.replace('perc{engine="0",model_name="m"} 0.5', 'perc{engine="0",model_name="m"} NaN')
    assert math.isnan(parsed(page).kv_usage)


async def test_a_status_other_than_200_is_a_failure(engine: ContractEngine, http: httpx.AsyncClient) -> None:
    engine.status = 500
    assert await scrape(http, engine.url) == ScrapeFailure(f"{engine.url}/metrics answered with status 500")


def a_target(engine: ContractEngine, group: str = "a", *, ready: bool = True, asks_layout: bool = False) -> Target:
    return Target(group, "127.0.0.1", ready, "u", asks_layout, api_port=engine.port, admin_port=engine.port)


async def test_a_ready_engine_is_asked_everything_at_once(engine: ContractEngine, http: httpx.AsyncClient) -> None:
    seen = await ask(a_target(engine, asks_layout=True), http=http, token="right", clock=lambda: 99.0)
    assert seen.reading.ready
    assert seen.reading.problem is None
    assert seen.reading.config is not None
    load = seen.reading.load
    assert load is not None
    assert (load.at, load.preemptions_total, load.blocks_total, load.device_bytes) == (99.0, 37.0, 151, 1_572_864_000)
    assert seen.applied is not None
    assert seen.applied["watermark"] == 0.0  # every number that is in force, not only the tuner's
    assert seen.layout == ONE_RANK


async def test_a_layout_that_is_known_is_not_asked_for_again(engine: ContractEngine, http: httpx.AsyncClient) -> None:
    assert (await ask(a_target(engine), http=http, token="right")).layout is None
    assert "GET /admin/v1/layout" not in engine.calls


async def test_an_engine_that_is_not_ready_is_asked_how_far_it_is_and_not_for_metrics(
    engine: ContractEngine, http: httpx.AsyncClient
) -> None:
    engine.loading = True
    seen = await ask(a_target(engine, ready=False), http=http, token="right")
    assert seen.load == ("weights", 40)
    assert (seen.reading.config, seen.reading.load) == (None, None)
    assert sorted(engine.calls) == ["GET /admin/v1/config", "GET /startupz"]


async def test_what_an_engine_runs_is_known_though_its_metrics_cannot_be_read(
    engine: ContractEngine, http: httpx.AsyncClient
) -> None:
    engine.metrics = "nonsense"
    reading = (await ask(a_target(engine), http=http, token="right")).reading
    assert reading.load is None
    assert reading.problem is not None
    assert reading.config is not None


async def test_an_engine_that_is_gone_is_named_by_its_address(http: httpx.AsyncClient) -> None:
    gone = Target("c", "127.0.0.1", True, "u", api_port=1, admin_port=1)
    reading = (await ask(gone, http=http, token="right")).reading
    assert reading.problem is not None
    assert "127.0.0.1:1/metrics" in reading.problem


async def test_a_wrong_token_is_said_in_the_readings_problem(engine: ContractEngine, http: httpx.AsyncClient) -> None:
    reading = (await ask(a_target(engine), http=http, token="wrong")).reading
    assert reading.problem is not None
    assert reading.problem.startswith("configuration: the bearer token")
