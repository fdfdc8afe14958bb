"""Figures computed by the mechanism benchmarks."""

import pytest
from engine_benchmarks.mechanism_bench import decode_gaps, load_of, medians
from trimtab_engine.bench.local_server import LocalServer
from trimtab_engine.bench.serving.client import RequestResult
from trimtab_engine.bench.serving.load import Outcome
from trimtab_engine.bench.serving.samples import Sample


def test_medians_are_taken_per_field() -> None:
    assert medians([{"a": 1.0, "b": 9}, {"a": 3.0, "b": 7}, {"a": 2.0, "b": 8}]) == {"a": 2.0, "b": 8}


def test_gaps_count_after_every_request_has_first_token() -> None:
    early = RequestResult(start_time=0.0, ttft=1.0, itl=[0.5, 2.0, 0.1, 0.2], latency=3.8, success=True)
    late = RequestResult(start_time=0.0, ttft=3.0, itl=[0.4], latency=3.4, success=True)
    # early's tokens arrive at 1.0, 1.5, 3.5, 3.6, 3.8: the gap that ends at 3.5 started before 3.0
    assert decode_gaps(Outcome([early, late])) == pytest.approx([0.1, 0.2, 0.4])


def test_load_is_greedy_with_full_output_length() -> None:
    server = LocalServer("http://server", "http://admin")
    load = load_of(server, [Sample([1, 2], 2, 3), Sample([1, 2], 2, 3)], rate=2.0)
    assert load.times[-1] == pytest.approx(1.0)
    body = load.body_of(load.samples[0])
    assert (body["temperature"], body["ignore_eos"], body["max_tokens"], body["prompt"]) == (0, True, 3, [1, 2])
