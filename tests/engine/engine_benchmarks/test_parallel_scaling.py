"""The simulated scaling: general properties, and one case calculated manually."""

import pytest
from engine_benchmarks.parallel_scaling import (
    BANDWIDTH,
    LLAMA_8B,
    LLAMA_70B,
    QWEN3_235B,
    estimate,
    name_of,
    scaling_rows,
)
from trimtab_engine.models.checkpoint import num_parameters
from trimtab_engine.models.registry import parse_model_config
from trimtab_engine.parallel.ranks import Layout

SMALL, LARGE, MOE = (parse_model_config(values, {}, "config") for values in (LLAMA_8B, LLAMA_70B, QWEN3_235B))


def test_single_request_reads_all_weights_except_embedding() -> None:
    found = estimate(SMALL, Layout(), batch=1, context=1)
    read = (num_parameters(SMALL) - SMALL.vocab_size * SMALL.hidden_size) * 2
    assert found.step_seconds == pytest.approx(read / BANDWIDTH, rel=1e-3)
    assert found.exchange_share == 0.0


def test_tensor_parallel_speedup_is_below_rank_count() -> None:
    alone, two, eight = (estimate(SMALL, Layout(tensor=size), batch=8).step_seconds for size in (1, 2, 8))
    assert alone / 2 < two < alone
    assert alone / 8 < eight < two


def test_data_parallel_throughput_scales_with_copies() -> None:
    one, eight = estimate(SMALL, Layout(), batch=32), estimate(SMALL, Layout(data=8), batch=256)
    assert eight.tokens_per_second == pytest.approx(8 * one.tokens_per_second)


def test_pipeline_does_not_shorten_single_request() -> None:
    assert estimate(SMALL, Layout(pipeline=4), batch=1).step_seconds > estimate(SMALL, Layout(), batch=1).step_seconds


def test_layout_that_does_not_fit_serves_no_request() -> None:
    assert estimate(LARGE, Layout()).num_requests == 0
    assert estimate(LARGE, Layout(tensor=2)).num_requests > 0
    assert estimate(MOE, Layout(tensor=2)).num_requests == 0


def test_weights_are_divided_among_ranks_by_layout() -> None:
    whole = num_parameters(MOE) * 2
    assert estimate(MOE, Layout(tensor=8)).weights_bytes == pytest.approx(whole / 8, rel=0.05)
    attention_everywhere = estimate(MOE, Layout(data=8, expert=True)).weights_bytes
    assert whole / 8 < attention_everywhere < whole / 5


def test_rows_list_each_layout_once_relative_to_smallest() -> None:
    rows = scaling_rows()
    assert len({(row["model"], row["layout"]) for row in rows}) == len(rows)
    large = [row for row in rows if row["model"] == "Llama-3.1-70B"]
    assert [row["tokens_per_second"] > 0 for row in large[:2]] == [False, True]
    assert large[1]["factor"] == 1.0
    assert {row["factor_base_gpus"] for row in large[1:]} == {2}
    assert name_of(Layout(tensor=2, data=4, expert=True)) == "TP2 DP4 EP"
