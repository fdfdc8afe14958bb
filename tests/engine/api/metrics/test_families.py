"""Metric families of docs/reference/contract.md section 4: names, labels, buckets, and their updates."""

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from trimtab_engine.api.metrics.families import STEP_BATCH_SIZE, EngineMetrics, length_buckets
from trimtab_engine.api.metrics.observations import FinishedSequence
from trimtab_engine.errors import ConfigError
from trimtab_engine.messages.requests import StepStats

CONTRACT = Path(__file__).parents[4] / "docs" / "reference" / "contract.md"
LABELS = {"model_name": "m", "engine": "0"}


def make_step(**fields: Any) -> StepStats:
    stats = StepStats(1, 0.0, 0.02, "decode", 2, 3, 25, 100, 200)
    for name, value in fields.items():
        setattr(stats, name, value)
    return stats


def make_finished_sequence(**fields: Any) -> FinishedSequence:
    times = {"arrival": 10.0, "scheduled": 11.0, "first_token": 13.0, "last_token": 17.0, "end": 17.5}
    counts = {"num_prompt_tokens": 5, "num_generation_tokens": 3, "max_tokens": 8, "num_preemptions": 1}
    counts["num_cached_tokens"] = 2
    return FinishedSequence(**{"reason": "stop", **times, **counts, **fields})


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics("m", 4096)


def sample(metrics: EngineMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, LABELS | labels)


def families(metrics: EngineMetrics) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(metrics.exposition().decode())}


def test_every_contract_family_exists(metrics: EngineMetrics) -> None:
    metrics.cache_config({"block_size": "16"})
    metrics.on_step(make_step(memory_bytes={"weights": 1}, config_values={"max_num_seqs": 1.0}, num_scheduled_tokens=1))
    section = CONTRACT.read_text().split("## 4.")[1].split("## 5.")[0]
    named = re.findall(r"`([a-z_]+)(?:\{[^}]*\})?`", section)
    present = {family.removeprefix("vllm:") for family in families(metrics)}
    # "vllm", "model_name" and the like are words of the text, not families
    words = {
        "model_name",
        "engine",
        "mode",
        "reason",
        "kv",
        "seqs",
        "tokens",
        "prefill",
        "decode",
        "mixed",
        "encoder",
        "adapters",
        "expert_weights",
        "nan",
        "nothing_left",
        "full",
        "off",
        "piecewise",
        "too_large",
        "images",
        "all_gather",
        "all_reduce",
        "broadcast",
        "gather",
        "point_to_point",
        "reduce_scatter",
        "device",
        "host",
        "process",
        "download",
        "imports",
        "ready",
        "first_token",
    }
    missing = {n.removesuffix("_total") if n != "iteration_tokens_total" else n for n in named} - words - present
    assert not missing


def test_start_stages_have_one_sample_each(metrics: EngineMetrics) -> None:
    metrics.start_stages({"imports": 1.5, "weights": 0.5})
    metrics.start_stages({"imports": 1.5, "weights": 0.75})
    assert sample(metrics, "trimtab_start_seconds", stage="imports") == 1.5
    assert sample(metrics, "trimtab_start_seconds", stage="weights") == 0.75


def test_every_sample_has_model_and_engine_labels(metrics: EngineMetrics) -> None:
    metrics.on_step(make_step())
    for family in families(metrics).values():
        for one in family.samples:
            assert LABELS.items() <= one.labels.items()


def test_buckets_equal_vllm(metrics: EngineMetrics) -> None:
    def bounds(name: str) -> list[float]:
        found = [s.labels["le"] for s in families(metrics)[name].samples if s.name == f"{name}_bucket"]
        return [float(bound) for bound in found[:-1]]

    assert bounds("vllm:time_to_first_token_seconds")[:5] == [0.001, 0.005, 0.01, 0.02, 0.04]
    assert bounds("vllm:time_to_first_token_seconds")[-3:] == [160, 640, 2560]
    assert bounds("vllm:inter_token_latency_seconds")[:4] == [0.01, 0.025, 0.05, 0.075]
    assert bounds("vllm:e2e_request_latency_seconds")[-1] == 7680
    assert bounds("vllm:request_params_n") == [1, 2, 5, 10, 20]
    assert bounds("vllm:iteration_tokens_total")[-1] == 16384
    assert bounds("vllm:request_prompt_tokens") == length_buckets(4096)


def test_length_buckets_end_at_max_model_len() -> None:
    assert length_buckets(60) == [1, 2, 5, 10, 20, 50]


@pytest.mark.parametrize("num_steps", [1, STEP_BATCH_SIZE - 1, STEP_BATCH_SIZE, 2 * STEP_BATCH_SIZE + 1])
def test_scrape_includes_every_step_and_latest_state(metrics: EngineMetrics, num_steps: int) -> None:
    for number in range(1, num_steps + 1):
        metrics.on_step(make_step(num_running=number, num_generation_tokens=2, num_scheduled_tokens=9))
    for _ in range(2):
        assert sample(metrics, "vllm:generation_tokens_total") == 2 * num_steps
        assert sample(metrics, "vllm:iteration_tokens_total_count") == num_steps
        assert sample(metrics, "vllm:num_requests_running") == num_steps


def test_step_sets_gauges_and_adds_to_counters(metrics: EngineMetrics) -> None:
    for _ in range(2):
        metrics.on_step(
            make_step(
                num_prompt_tokens=7,
                num_generation_tokens=2,
                num_scheduled_tokens=9,
                preempted={"recompute": {"capacity": 2, "resize": 1}},
                recomputed_tokens=11,
                num_encoded_items=2,
                num_encoded_tokens=600,
                preempt_stall_seconds=[0.5],
                blocked_seconds={"kv": 0.25},
                memory_bytes={"weights": 1000},
                config_values={"max_num_seqs": 64.0},
                config_generation=5,
            )
        )
    assert sample(metrics, "vllm:num_requests_running") == 2
    assert sample(metrics, "vllm:num_requests_waiting") == 3
    assert sample(metrics, "vllm:kv_cache_usage_perc") == 0.25
    assert sample(metrics, "vllm:num_preemptions_total") == 6
    assert sample(metrics, "vllm:prompt_tokens_total") == 14
    assert sample(metrics, "vllm:generation_tokens_total") == 4
    assert sample(metrics, "vllm:iteration_tokens_total_sum") == 18
    assert sample(metrics, "trimtab_preempted_requests_total", mode="recompute", reason="capacity") == 4
    assert sample(metrics, "trimtab_recomputed_tokens_total") == 22
    assert sample(metrics, "trimtab_encoded_items_total") == 4
    assert sample(metrics, "trimtab_encoded_tokens_total") == 1200
    assert sample(metrics, "trimtab_preempt_stall_seconds_count") == 2
    assert sample(metrics, "trimtab_blocked_seconds_total", reason="kv") == 0.5
    assert sample(metrics, "trimtab_memory_bytes", kind="weights") == 1000
    assert sample(metrics, "trimtab_config_generation") == 5
    assert sample(metrics, "trimtab_config_value", field="max_num_seqs") == 64
    assert sample(metrics, "trimtab_kv_blocks", state="free") == 75
    assert sample(metrics, "trimtab_kv_blocks", state="cap") == 200
    assert sample(metrics, "trimtab_step_seconds_count", kind="decode") == 2


def test_counters_start_at_zero_for_rates(metrics: EngineMetrics) -> None:
    for reason in ("stop", "length", "abort", "error"):
        assert sample(metrics, "vllm:request_success_total", finished_reason=reason) == 0
    for mode, reason in (("recompute", "capacity"), ("swap", "capacity"), ("swap", "resize"), ("recompute", "reset")):
        assert sample(metrics, "trimtab_preempted_requests_total", mode=mode, reason=reason) == 0
    for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
        assert sample(metrics, "vllm:prompt_tokens_by_source_total", source=source) == 0
    assert sample(metrics, "vllm:prefix_cache_queries_total") == sample(metrics, "vllm:prefix_cache_hits_total") == 0


def test_sequence_time_is_split_into_queue_prefill_decode(metrics: EngineMetrics) -> None:
    metrics.finished(make_finished_sequence())
    metrics.request_finished(2, 3)
    for name, seconds in (
        ("e2e_request_latency_seconds", 7.5),
        ("request_queue_time_seconds", 1.0),
        ("request_prefill_time_seconds", 2.0),
        ("request_decode_time_seconds", 4.0),
        ("request_inference_time_seconds", 6.0),
        ("request_time_per_output_token_seconds", 2.0),
        ("request_prompt_tokens", 5),
        ("request_generation_tokens", 3),
        ("request_params_max_tokens", 8),
        ("request_num_preemptions", 1),
        ("request_prefill_kv_computed_tokens", 3),
        ("request_params_n", 2),
        ("request_max_num_generation_tokens", 3),
    ):
        assert sample(metrics, f"vllm:{name}_sum") == seconds, name


def test_sequence_that_never_ran_has_no_phases(metrics: EngineMetrics) -> None:
    metrics.finished(make_finished_sequence(reason="abort", scheduled=None, first_token=None, last_token=None))
    assert sample(metrics, "vllm:request_success_total", finished_reason="abort") == 1
    assert sample(metrics, "vllm:request_prefill_time_seconds_count") == 0


def test_custom_buckets_replace_those_of_named_family() -> None:
    metrics = EngineMetrics("m", 4096, custom_buckets={"vllm:time_to_first_token_seconds": [0.5, 2]})
    found = families(metrics)["vllm:time_to_first_token_seconds"].samples
    assert [s.labels["le"] for s in found if s.name.endswith("_bucket")] == ["0.5", "2.0", "+Inf"]
    with pytest.raises(ConfigError, match="unknown histogram vllm:nonsense"):
        EngineMetrics("m", 4096, custom_buckets={"vllm:nonsense": [1]})


def test_served_request_is_counted(server: Any) -> None:
    before = server.metric("vllm:request_success_total", finished_reason="length")
    server.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5, "n": 2})
    assert server.metric("vllm:request_success_total", finished_reason="length", model_name="stub") == before + 2
    assert server.metric("vllm:time_to_first_token_seconds_count") == 2
    assert server.metric("vllm:inter_token_latency_seconds_count") == 8
    assert server.metric("vllm:request_params_n_count") == 1
    assert server.metric("vllm:cache_config_info", block_size="16") == 1


def test_disable_log_stats_leaves_no_metrics(start_server: Any) -> None:
    server = start_server("--disable-log-stats")
    server.http.post("/v1/completions", json={"prompt": "abc"})
    assert "vllm:" not in server.http.get("/metrics").text


def test_drafts_are_counted_in_total_and_by_position(metrics: EngineMetrics) -> None:
    metrics.on_step(make_step(num_drafts=2, num_draft_tokens=6, accepted_per_position=[2, 1, 0]))
    metrics.on_step(make_step(num_drafts=1, num_draft_tokens=3, accepted_per_position=[1, 1, 1]))
    metrics.on_step(make_step())
    assert sample(metrics, "vllm:spec_decode_num_drafts_total") == 3
    assert sample(metrics, "vllm:spec_decode_num_draft_tokens_total") == 9
    assert sample(metrics, "vllm:spec_decode_num_accepted_tokens_total") == 6
    by_position = [
        sample(metrics, "vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(n)) for n in range(3)
    ]
    assert by_position == [3, 2, 1]
