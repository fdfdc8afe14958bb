"""Statistics of a run: vLLM's field names and definitions."""

import pytest
from trimtab_engine.bench.serving.client import RequestResult
from trimtab_engine.bench.serving.load import Outcome
from trimtab_engine.bench.serving.statistics import (
    Goodput,
    details,
    distribution,
    parse_metrics,
    parse_percentiles,
    peak_concurrency,
    peak_tokens_per_second,
    summarize,
)
from trimtab_engine.errors import ConfigError

VLLM_FIELDS = {
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests", "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms", "mean_tpot_ms",
    "median_tpot_ms", "std_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "median_itl_ms", "std_itl_ms", "p99_itl_ms",
    "mean_e2el_ms", "median_e2el_ms", "std_e2el_ms", "p99_e2el_ms",
}  # fmt: skip


def make_result(
    *, start: float = 0.0, ttft: float = 0.1, gaps: tuple[float, ...] = (0.05, 0.15), ok: bool = True
) -> RequestResult:
    return RequestResult(
        prompt_len=10,
        output_len=1 + len(gaps),
        start_time=start,
        ttft=ttft,
        itl=list(gaps),
        latency=ttft + sum(gaps),
        success=ok,
        error="" if ok else "HTTP 500",
    )


def summary(*results: RequestResult, goodput: tuple[str, ...] = (), duration: float = 2.0) -> dict[str, float]:
    return summarize(
        Outcome(list(results), duration=duration),
        metrics=["ttft", "tpot", "itl", "e2el"],
        percentiles=[50, 99, 99.9],
        goodput=Goodput.parse(goodput),
    )


def test_every_vllm_field_is_present() -> None:
    assert set(summary(make_result())) >= VLLM_FIELDS | {"p50_ttft_ms", "p99.9_itl_ms"}


def test_rates_count_completed_requests() -> None:
    figures = summary(make_result(), make_result(), make_result(ok=False))
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (20, 6)
    assert (figures["request_throughput"], figures["output_throughput"]) == (1.0, 3.0)
    assert figures["total_token_throughput"] == 13.0


def test_interrupted_requests_are_neither_completed_nor_failed() -> None:
    figures = summary(make_result(), RequestResult(error="interrupted"))
    assert (figures["completed"], figures["failed"]) == (1, 0)


def test_latencies_are_in_milliseconds() -> None:
    figures = summary(make_result())
    assert figures["mean_ttft_ms"] == pytest.approx(100)
    assert [figures["mean_itl_ms"], figures["mean_tpot_ms"]] == pytest.approx([100, 100])
    assert figures["mean_e2el_ms"] == pytest.approx(300)


def test_single_token_has_no_tpot() -> None:
    assert make_result(gaps=()).tpot == 0.0
    assert summary(make_result(gaps=()), make_result())["mean_tpot_ms"] == pytest.approx(100)


def test_percentiles_interpolate() -> None:
    figures = distribution("ttft", [0.1, 0.2, 0.3, 0.4, 0.5], [0, 25, 90, 100])
    assert [figures[f"p{p}_ttft_ms"] for p in (0, 25, 90, 100)] == pytest.approx([100, 200, 460, 500])
    assert (figures["mean_ttft_ms"], figures["median_ttft_ms"]) == pytest.approx((300, 300))
    assert figures["std_ttft_ms"] == pytest.approx(141.42, abs=0.01)


def test_missing_values_are_none() -> None:
    nothing = summary()
    assert nothing["completed"] == 0
    assert [nothing[name] is None for name in ("mean_e2el_ms", "p99_itl_ms")] == [True, True]


@pytest.mark.parametrize(
    ("objectives", "met"),
    [
        (("ttft:100",), True),  # exactly at the limit
        (("ttft:99",), False),
        (("itl:150",), True),
        (("itl:149",), False),  # applies to every gap
        (("tpot:100",), True),  # their mean meets it
        (("e2el:300", "ttft:100", "tpot:100"), True),
        (("e2el:299", "ttft:100"), False),  # all must be met
    ],
)
def test_goodput_counts_requests_meeting_every_objective(objectives: tuple[str, ...], met: bool) -> None:
    result = RequestResult(output_len=3, ttft=0.1, itl=[0.05, 0.15], latency=0.3, success=True)
    figures = summary(result, goodput=objectives, duration=1.0)
    assert figures["request_goodput"] == float(met)


def test_no_objectives_give_no_goodput() -> None:
    assert summary(make_result())["request_goodput"] is None


@pytest.mark.parametrize("pair", ["ttft", "ttft:x", "ttft:-1", "speed:5", "ttft:nan"])
def test_invalid_objective_is_rejected(pair: str) -> None:
    with pytest.raises(ConfigError, match="NAME:MILLISECONDS"):
        Goodput.parse([pair])


def test_percentiles_and_metrics_are_parsed_and_checked() -> None:
    assert parse_percentiles("50,99.9") == [50.0, 99.9]
    assert parse_metrics("ttft,itl") == ["ttft", "itl"]
    for text in ("", "x", "101", "-1", "nan"):
        with pytest.raises(ConfigError, match="--metric-percentiles"):
            parse_percentiles(text)
    with pytest.raises(ConfigError, match="speed"):
        parse_metrics("ttft,speed")


def test_peak_concurrency_excludes_touching_requests() -> None:
    one_after_another = [make_result(start=0.0, ttft=1.0, gaps=()), make_result(start=1.0, ttft=1.0, gaps=())]
    assert peak_concurrency(one_after_another) == 1
    assert peak_concurrency([*one_after_another, make_result(start=0.5, ttft=1.0, gaps=())]) == 2


def test_peak_tokens_are_of_the_busiest_second() -> None:
    result = make_result(start=5.0, ttft=0.1, gaps=(0.1, 0.1, 1.0))
    assert peak_tokens_per_second([result]) == 3


def test_details_have_one_entry_per_request() -> None:
    lists = details(Outcome([make_result(), make_result(ok=False)]))
    assert lists["output_lens"] == [3, 0]
    assert lists["errors"] == ["", "HTTP 500"]
    assert {len(values) for values in lists.values()} == {2}
