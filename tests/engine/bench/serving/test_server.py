"""Counters of the server before and after a run."""

import asyncio
import socket

import pytest
from trimtab_engine.bench.serving.server import counter_changes, parse_counters, wait_until_ready
from trimtab_engine.errors import ConfigError

METRICS = """# HELP vllm:num_preemptions_total x
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
vllm:num_preemptions_total{engine="1",model_name="m"} 4.0
vllm:prefix_cache_queries_total{engine="0"} 100.0
vllm:prefix_cache_hits_total{engine="0"} 25.0
other_total{a="b"} 1.0
vllm:num_requests_running{engine="0"} 5.0
"""


def test_counters_are_summed_over_labels() -> None:
    assert parse_counters(METRICS) == {
        "num_preemptions": 7.0,
        "prefix_cache_queries": 100.0,
        "prefix_cache_hits": 25.0,
    }


def test_run_is_the_difference_of_two_scrapes() -> None:
    before = {"num_preemptions": 2.0, "prefix_cache_queries": 20.0, "prefix_cache_hits": 5.0}
    assert counter_changes(before, parse_counters(METRICS)) == {"preemptions": 5, "prefix_cache_hit_rate": 0.25}


def test_draft_acceptance_is_reported_as_in_vllm() -> None:
    after = {
        "spec_decode_num_drafts": 10.0,
        "spec_decode_num_draft_tokens": 40.0,
        "spec_decode_num_accepted_tokens": 30.0,
    }
    assert counter_changes({}, after) == {"spec_decode_acceptance_rate": 75.0, "spec_decode_acceptance_length": 4.0}


def test_server_without_metrics_reports_nothing() -> None:
    assert counter_changes({}, {}) == {}


def test_refused_connection_error_names_remedy() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot reach {url}: Connection refused; check the server"):
            asyncio.run(wait_until_ready(url, {}, 0.0))
