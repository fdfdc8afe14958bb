"""Parser of metrics pages, with the gaps and faults of real pages."""

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families
from trimtab_operator.tuner.samples import Histogram, Work
from trimtab_operator.tuner.samples.series import USED_NAMES, Labels, Unreadable, sample_of

NEEDED = """
vllm:num_requests_running{engine="0"} 3
vllm:num_requests_waiting{engine="0"} 2
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:generation_tokens_total{engine="0"} 100
"""


def series(page: str) -> dict[str, list[tuple[Labels, float]]]:
    found: dict[str, list[tuple[Labels, float]]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_vllm_page_without_trimtab_families_suffices() -> None:
    sample = sample_of(series(NEEDED + "vllm:num_preemptions_total 7\n"), at=5.0)
    assert (sample.at, sample.gauges.running, sample.gauges.waiting, sample.gauges.kv_usage) == (5.0, 3, 2, 0.5)
    assert sample.counters.preemptions == {"capacity": 7}
    assert (sample.counters.decode, sample.counters.arrived, sample.gauges.config_generation) == (None, None, None)


def test_older_names_are_understood() -> None:
    page = NEEDED.replace("kv_cache_usage_perc", "gpu_cache_usage_perc").replace("tokens_total", "tokens")
    assert sample_of(series(page), at=0).gauges.kv_usage == 0.5


def test_missing_metrics_are_named() -> None:
    page = NEEDED.replace("vllm:num_requests_waiting", "vllm:something_else")
    with pytest.raises(Unreadable, match=r"lacks vllm:num_requests_waiting \(is --disable-log-stats set"):
        sample_of(series(page), at=0)


def test_preemptions_keep_their_reasons() -> None:
    page = """
trimtab_preempted_requests_total{mode="recompute",reason="capacity"} 4
trimtab_preempted_requests_total{mode="swap",reason="capacity"} 2
trimtab_preempted_requests_total{mode="recompute",reason="resize"} 9
"""
    assert sample_of(series(NEEDED + page), at=0).counters.preemptions == {"capacity": 6, "resize": 9}


def test_ranks_are_summed_and_the_fullest_cache_counts() -> None:
    page = NEEDED + NEEDED.replace('engine="0"', 'engine="1"').replace("0.5", "0.9")
    sample = sample_of(series(page), at=0)
    assert (sample.gauges.running, sample.counters.generated_tokens, sample.gauges.kv_usage) == (6, 200, 0.9)


def test_mixed_steps_count_as_prefill() -> None:
    page = NEEDED
    for kind, n in (("prefill", 1), ("decode", 2), ("mixed", 4)):
        page += f"""
trimtab_step_seconds_count{{kind="{kind}"}} {n}
trimtab_step_seconds_sum{{kind="{kind}"}} {n / 10}
trimtab_step_tokens_total{{kind="{kind}"}} {n * 100}
trimtab_step_sequences_total{{kind="{kind}"}} {n * 3}
trimtab_step_context_tokens_total{{kind="{kind}"}} {n * 1000}
trimtab_step_attended_tokens_total{{kind="{kind}"}} {n * 5000}
"""
    counters = sample_of(series(page), at=0).counters
    assert counters.decode == Work(2, 200, 6, 2000, 10000, 0.2)
    assert counters.prefill == Work(5, 500, 15, 5000, 25000, 0.5)


def buckets(name: str, counts: dict[str, int], engine: str = "0") -> str:
    return "".join(f'{name}_bucket{{le="{le}",engine="{engine}"}} {n}\n' for le, n in counts.items())


def test_a_histogram_is_that_of_all_ranks() -> None:
    name = "vllm:time_to_first_token_seconds"
    page = NEEDED + buckets(name, {"0.1": 1, "1": 3, "+Inf": 4}) + buckets(name, {"0.1": 2, "1": 2, "+Inf": 2}, "1")
    page += f'{name}_sum{{engine="0"}} 2.5\n{name}_sum{{engine="1"}} 0.5\n'
    assert sample_of(series(page), at=0).ttft == Histogram((0.1, 1.0, math.inf), (3, 5, 6), 3.0)


@pytest.mark.parametrize(
    "page",
    [
        buckets("vllm:time_to_first_token_seconds", {"0.1": 1, "1": 3}),  # without the last edge
        buckets("vllm:time_to_first_token_seconds", {"0.1": 1, "+Inf": 3})
        + buckets("vllm:time_to_first_token_seconds", {"0.2": 1, "+Inf": 3}, "1"),  # two ranks with different edges
    ],
)
def test_a_histogram_that_makes_no_sense_is_none(page: str) -> None:
    assert sample_of(series(NEEDED + page), at=0).ttft is None


def test_impossible_numbers_are_passed_on() -> None:
    sample = sample_of(series(NEEDED.replace("0.5", "NaN").replace(" 3", " -3")), at=0)
    assert math.isnan(sample.gauges.kv_usage)
    assert sample.gauges.running == -3


def test_a_generation_that_is_no_whole_number_is_unreadable() -> None:
    with pytest.raises(Unreadable, match="whole number"):
        sample_of(series(NEEDED + "trimtab_config_generation 1.5\n"), at=0)


def test_used_names_exclude_unread_series() -> None:
    assert "vllm:time_to_first_token_seconds_bucket" in USED_NAMES
    assert "vllm:request_prompt_tokens_bucket" not in USED_NAMES


def test_series_of_each_counter_are_known_by_rank() -> None:
    """A page that lacks one rank of one counter differs from a complete page."""
    page = NEEDED + NEEDED.replace('engine="0"', 'engine="1"')
    page += 'trimtab_arrived_requests_total{engine="0"} 5\ntrimtab_arrived_requests_total{engine="1"} 6\n'
    whole = sample_of(series(page), at=0).ranks
    partial = sample_of(series(page.replace('trimtab_arrived_requests_total{engine="1"} 6\n', "")), at=0).ranks
    assert whole - partial == {("trimtab_arrived_requests_total", "1")}
    assert partial < whole
