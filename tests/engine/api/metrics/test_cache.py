"""Prompt tokens by source, lookups, evictions, swaps."""

from typing import Any

from prometheus_client import CollectorRegistry
from trimtab_engine.api.metrics.cache import CacheMetrics
from trimtab_engine.api.metrics.factory import FamilyFactory
from trimtab_engine.messages.requests import StepStats


def test_prompt_tokens_by_source_and_cached_blocks() -> None:
    registry = CollectorRegistry()
    metrics = CacheMetrics(FamilyFactory(registry, "m", "0", {}))

    def value(name: str, **labels: str) -> Any:
        return registry.get_sample_value(name, {"model_name": "m", "engine": "0", **labels})

    stats = StepStats(1, 0.0, 0.02, "prefill", 2, 3, 25, 100, 200)
    stats.num_prompt_tokens, stats.num_cached_prompt_tokens = 100, 48
    stats.prefix_cache_queries, stats.prefix_cache_hits = 70, 32
    stats.evicted_blocks = 3
    stats.swapped_out_bytes, stats.swapped_in_bytes, stats.swap_seconds = 4096, 1024, 0.25
    for _ in range(2):
        metrics.on_steps([stats])
    assert value("vllm:prompt_tokens_by_source_total", source="local_compute") == 104
    assert value("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 96
    assert value("vllm:prompt_tokens_cached_total") == 96
    assert value("vllm:prompt_tokens_cached_by_source_total", source="device") == 96
    assert value("vllm:prefix_cache_queries_total") == 140
    assert value("vllm:prefix_cache_hits_total") == 64
    assert value("trimtab_evicted_blocks_total") == 6
    assert value("trimtab_swapped_bytes_total", direction="out") == 8192
    assert value("trimtab_swapped_bytes_total", direction="in") == 2048
    assert value("trimtab_swap_seconds_total") == 0.5
