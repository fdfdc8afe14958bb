"""Scrapes: one page becomes one sample or a failure with a reason, isolated between groups."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import aiohttp
import pytest
from operator_builders import ONE_RANK
from trimtab_operator.engines.scrape import ScrapeFailure, observe_engine, parse_metrics, parse_requests, scrape
from trimtab_operator.observed.engines import EngineTarget
from trimtab_operator.tuner.samples import Sample

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


STEPS = """\
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5"} 3.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 4.0
vllm:time_to_first_token_seconds_sum{engine="0"} 1.5
vllm:time_to_first_token_seconds_count{engine="0"} 4.0
trimtab_step_seconds_count{kind="decode"} 10.0
trimtab_step_seconds_sum{kind="decode"} 0.5
trimtab_step_tokens_total{kind="decode"} 80.0
trimtab_step_sequences_total{kind="decode"} 80.0
trimtab_step_context_tokens_total{kind="decode"} 800.0
trimtab_step_attended_tokens_total{kind="decode"} 800.0
trimtab_recomputed_tokens_total{mode="recompute"} 12.0
"""


def parsed(page: str) -> Sample:
    sample = parse_metrics(page.encode(), at=7.0)
    assert isinstance(sample, Sample), sample
    return sample


def failure(page: str | bytes) -> str:
    sample = parse_metrics(page if isinstance(page, bytes) else page.encode(), at=7.0)
    assert isinstance(sample, ScrapeFailure), sample
    return sample.reason


def test_page_has_preemptions_by_reason(engine: ContractEngine) -> None:
    sample = parsed(engine.metrics)
    gauges = sample.gauges
    assert (sample.at, gauges.running, gauges.waiting, gauges.kv_usage, gauges.config_generation) == (7, 8, 3, 0.98, 1)
    assert sample.counters.preemptions == {"capacity": 37.0, "resize": 3.0}
    assert sample.counters.generated_tokens == 5000.0


def test_vllm_page_is_summed_over_engines() -> None:
    sample = parsed(VLLM_PAGE)
    gauges = sample.gauges
    assert (gauges.running, gauges.waiting, gauges.kv_usage, gauges.config_generation) == (8.0, 2.0, 0.9, None)
    assert (sample.counters.preemptions, sample.counters.generated_tokens) == ({"capacity": 8.0}, 150.0)


def test_without_a_series_of_our_counter_the_page_counts_as_vllm_does(engine: ContractEngine) -> None:
    page = "\n".join(line for line in engine.metrics.splitlines() if not line.startswith("trimtab_preempted")) + "\n"
    assert parsed(page).counters.preemptions == {"capacity": 40.0}


def test_histograms_and_the_sums_over_steps_are_read_too() -> None:
    page = VLLM_PAGE + STEPS
    sample = parsed(page)
    assert sample.ttft is not None
    assert (sample.ttft.counts, sample.ttft.total) == ((3.0, 4.0), 1.5)
    assert sample.counters.decode is not None
    assert (sample.counters.decode.steps, sample.counters.decode.seconds) == (10.0, 0.5)
    assert sample.counters.recomputed_tokens == 12.0


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ("vllm:num_requests_running", "vllm:num_requests_running"),
        ("vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"),
        ("vllm:generation_tokens_total", "vllm:generation_tokens_total"),
    ],
)
def test_a_metric_that_is_missing_is_named(lost: str, named: str) -> None:
    page = "\n".join(line for line in VLLM_PAGE.splitlines() if lost not in line) + "\n"
    assert failure(page) == f"the metrics page lacks {named} (is --disable-log-stats set?)"


def test_whole_numbers_are_numbers_too() -> None:
    page = VLLM_PAGE.replace(" 5.0\n", " 5\n") + "trimtab_config_generation 3\n"
    gauges = parsed(page).gauges
    assert (gauges.running, gauges.config_generation) == (8.0, 3)


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
        VLLM_PAGE + 'vllm:time_to_first_token_seconds_bucket{le="soon"} 1.0\n',
    ],
)
def test_a_page_that_cannot_be_read_is_a_failure_and_no_exception(page: str | bytes) -> None:
    assert failure(page)


ODD_LINES = [
    'vllm:num_requests_running{engine="2"} 5 1700000000000',  # a timestamp
    'vllm:num_requests_running{engine="2"}5',
    'vllm:num_requests_running{engine="2"}\t5',
    'vllm:num_requests_running{engine="2" , model_name="m"}  5.0 ',
    'vllm:num_requests_running{engine="2",model_name="a b} c\\"d"} 5e0',
    'vllm:num_requests_running{engine="2"} 5 # {trace="x"} 1.0',
    "vllm:num_requests_running 5.",
]


@pytest.mark.parametrize("line", ODD_LINES)
def test_a_line_is_read_alike_at_each_look_however_it_is_written(line: str) -> None:
    """The head of a line is cached if it is the only name of the sample."""
    assert [parsed(f"{VLLM_PAGE}{line}\n").gauges.running for _ in range(3)] == [13.0] * 3


def test_cached_series_has_new_value() -> None:
    pages = [
        VLLM_PAGE.replace('waiting{engine="0",model_name="m"} 2.0', f'waiting{{engine="0",model_name="m"}} {n}')
        for n in ("2.0", "7", "1e2", "+3")
    ]
    assert [parsed(page).gauges.waiting for page in pages] == [2.0, 7.0, 100.0, 3.0]


@pytest.mark.parametrize("value", ["1_0", "0x10", "", "nonsense", "5 6 seven"])
def test_invalid_number_fails_for_cached_series(value: str) -> None:
    page = VLLM_PAGE.replace('waiting{engine="0",model_name="m"} 2.0', f'waiting{{engine="0",model_name="m"}} {value}')
    assert parsed(VLLM_PAGE).gauges.waiting == 2.0
    assert failure(page)


def test_impossible_values_are_passed_on_for_the_tuner_to_judge() -> None:
    page = VLLM_PAGE.replace('perc{engine="0",model_name="m"} 0.5', 'perc{engine="0",model_name="m"} NaN')
    assert math.isnan(parsed(page).gauges.kv_usage)


async def test_a_status_other_than_200_is_a_failure(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    engine.status = 500
    assert await scrape(http, engine.url) == ScrapeFailure(f"{engine.url}/metrics responded with status 500")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"columns": {}}', b"[" * 100_000, b"\xff"])
def test_a_list_of_requests_that_cannot_be_read_is_none(body: bytes) -> None:
    assert parse_requests(body, at=7.0) == (None, None)


def a_target(
    engine: ContractEngine, group: str = "a", *, ready: bool = True, needs_layout: bool = False
) -> EngineTarget:
    return EngineTarget(group, "127.0.0.1", ready, "u", needs_layout, api_port=engine.port, admin_port=engine.port)


async def test_a_ready_engine_is_asked_everything_at_once(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    seen = await observe_engine(a_target(engine, needs_layout=True), http=http, token="right", clock=lambda: 99.0)
    assert seen.ready
    assert seen.problem is None
    assert seen.config is not None
    assert seen.sample is not None
    assert (seen.sample.at, seen.sample.counters.preemptions["capacity"]) == (99.0, 37.0)
    assert seen.sample.requests is not None
    assert [row.prompt_tokens for row in seen.sample.requests.finished] == [64, 65]
    assert seen.ledger is not None
    assert (seen.ledger.blocks_total, seen.ledger.device_bytes) == (151, 1_572_864_000)
    assert seen.ledger.free_bytes == 408_944_640
    assert seen.applied is not None
    assert seen.applied["watermark"] == 0.0  # every number that is in force, not only the tuner's
    assert seen.layout == ONE_RANK


async def test_a_layout_that_is_known_is_not_asked_for_again(
    engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    assert (await observe_engine(a_target(engine), http=http, token="right")).layout is None
    assert "GET /admin/v1/layout" not in engine.calls


async def test_loading_engine_is_polled_for_progress(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    engine.loading = True
    seen = await observe_engine(a_target(engine, ready=False), http=http, token="right")
    assert seen.load == ("weights", 40)
    assert (seen.load_message, seen.downloaded_bytes) == ("Downloaded 9 MB in 1 s", 9 * 10**6)
    assert (seen.config, seen.sample) == (None, None)
    assert sorted(engine.calls) == ["GET /admin/v1/config", "GET /startupz"]


async def test_layout_is_known_without_metrics(engine: ContractEngine, http: aiohttp.ClientSession) -> None:
    engine.metrics = "nonsense"
    seen = await observe_engine(a_target(engine), http=http, token="right")
    assert seen.sample is None
    assert seen.problem is not None
    assert seen.config is not None
    assert seen.next_request is None  # the requests are read again


async def test_an_engine_that_does_not_list_its_requests_is_read_all_the_same(
    engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    engine.lists_requests = False
    seen = await observe_engine(a_target(engine), http=http, token="right")
    assert seen.problem is None
    assert seen.sample is not None
    assert seen.sample.requests is None


async def test_an_engine_that_is_gone_is_named_by_its_address(http: aiohttp.ClientSession) -> None:
    gone = EngineTarget("c", "127.0.0.1", True, "u", api_port=1, admin_port=1)
    seen = await observe_engine(gone, http=http, token="right")
    assert seen.problem is not None
    assert "127.0.0.1:1/metrics" in seen.problem


async def test_a_wrong_token_is_said_in_the_readings_problem(
    engine: ContractEngine, http: aiohttp.ClientSession
) -> None:
    seen = await observe_engine(a_target(engine), http=http, token="wrong")
    assert seen.problem is not None
    assert seen.problem.startswith("configuration: the bearer token")
