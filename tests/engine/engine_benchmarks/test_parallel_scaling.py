"""The simulated scaling: what must hold of any such figures, and one case by hand."""

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

SMALL, LARGE, MIXTURE = (parse_model_config(values, {}, "config") for values in (LLAMA_8B, LLAMA_70B, QWEN3_235B))


def test_one_request_on_one_gpu_reads_all_weights_but_the_embedding() -> None:
    found = estimate(SMALL, Layout(), batch=1, context=1)
    read = (num_parameters(SMALL) - SMALL.vocab_size * SMALL.hidden_size) * 2
    assert found.step_seconds == pytest.approx(read / BANDWIDTH, rel=1e-3)
    assert found.exchange_share == 0.0


def test_tensor_parallelism_is_faster_by_less_than_its_ranks() -> None:
    alone, two, eight = (estimate(SMALL, Layout(tensor=size), batch=8).step_seconds for size in (1, 2, 8))
    assert alone / 2 < two < alone
    assert alone / 8 < eight < two


def test_data_parallel_copies_of_a_dense_model_serve_so_many_times_more() -> None:
    one, eight = estimate(SMALL, Layout(), batch=32), estimate(SMALL, Layout(data=8), batch=256)
    assert eight.tokens_per_second == pytest.approx(8 * one.tokens_per_second)


def test_a_pipeline_does_not_shorten_a_single_request() -> None:
    assert estimate(SMALL, Layout(pipeline=4), batch=1).step_seconds > estimate(SMALL, Layout(), batch=1).step_seconds


def test_what_does_not_fit_serves_nobody() -> None:
    assert estimate(LARGE, Layout()).num_requests == 0
    assert estimate(LARGE, Layout(tensor=2)).num_requests > 0
    assert estimate(MIXTURE, Layout(tensor=2)).num_requests == 0


def test_weights_are_divided_among_the_ranks_as_the_layout_says() -> None:
    whole = num_parameters(MIXTURE) * 2
    assert estimate(MIXTURE, Layout(tensor=8)).weights_bytes == pytest.approx(whole / 8, rel=0.05)
    attention_everywhere = estimate(MIXTURE, Layout(data=8, expert=True)).weights_bytes
    assert whole / 8 < attention_everywhere < whole / 5


def test_rows_name_every_layout_once_and_count_from_the_smallest_that_fits() -> None:
    rows = scaling_rows()
    assert len({(row["model"], row["layout"]) for row in rows}) == len(rows)
    large = [row for row in rows if row["model"] == "Llama-3.1-70B"]
    assert [row["tokens_per_second"] > 0 for row in large[:2]] == [False, True]
    assert large[1]["factor"] == 1.0
    assert {row["factor_base_gpus"] for row in large[1:]} == {2}
    assert name_of(Layout(tensor=2, data=4, expert=True)) == "TP2 DP4 EP"
