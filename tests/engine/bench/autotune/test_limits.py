"""Parsing and evaluation of limits."""

import pytest
from trimtab_engine.bench.autotune.limits import Limit, Limits
from trimtab_engine.bench.serving.statistics import distribution
from trimtab_engine.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("ttft:500", Limit("ttft", 99, 500)),  # vLLM's script checks p99
        ("itl:p95:80", Limit("itl", 95, 80)),
        ("e2el:p99.9:1e4", Limit("e2el", 99.9, 10_000)),
    ],
)
def test_limit_parses_metric_percentile_and_milliseconds(text: str, limit: Limit) -> None:
    assert Limit.parse(text) == limit


@pytest.mark.parametrize(
    "text", ["ttft", "500", "ttft:fast", "ttft:95:500", "ttft:p101:5", "itl:p95:", "e2e:5", "itl:0"]
)
def test_invalid_limit_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="such as ttft:500 or itl:p95:80"):
        Limit.parse(text)


def test_duplicate_limit_is_rejected() -> None:
    with pytest.raises(ConfigError, match="p99_ttft_ms is set twice"):
        Limits.parse(["ttft:500", "ttft:p99:400"])


@pytest.mark.parametrize("percentile", [50, 95, 99, 99.9, 99.95])
def test_limit_checks_the_figure_of_bench_serve(percentile: float) -> None:
    assert Limit("itl", percentile, 1).figure in distribution("itl", [0.1], [percentile])


def test_every_limit_applies_and_excess_is_of_the_worst() -> None:
    limits = Limits.parse(["ttft:500", "itl:100"])
    assert limits.excess({"p99_ttft_ms": 400, "p99_itl_ms": 200}) == 2
    assert limits.violations({"p99_ttft_ms": 400, "p99_itl_ms": 200}) == ["ITL p99 200 ms > 100"]
    assert limits.violations({"p99_ttft_ms": 500, "p99_itl_ms": 100}) == []


def test_unmeasured_metric_violates_its_limit() -> None:
    """An output of one token has no gaps."""
    assert Limits.parse(["itl:100"]).violations({"p99_itl_ms": None}) == ["no ITL was measured"]


def test_low_cache_hit_rate_is_a_violation() -> None:
    limits = Limits.parse([], 0.5)
    assert limits.violations({"prefix_cache_hit_rate": 0.5}) == []
    assert limits.violations({"prefix_cache_hit_rate": 0.25}) == ["prefix cache hit rate 25% < 50%"]
    assert limits.violations({}) != []
