"""Cache metrics: sources of prompt tokens, evictions, host cache and swap; vLLM's prefix-cache families and
Trimtab's.
"""

from collections.abc import Sequence

from trimtab_engine.api.metrics.factory import FamilyFactory
from trimtab_engine.messages.requests import StepStats

SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
"""vLLM's label values. external_kv_transfer is always 0."""
DEVICE, HOST = "device", "host"  # vLLM's names of the memories that hold cached prompt tokens


class CacheMetrics:
    """Updated from batches of StepStats."""

    def __init__(self, families: FamilyFactory) -> None:
        self._by_source = families.labelled_counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens by source of their keys and values", "source"
        )
        self._cached = families.counter("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache")
        self._cached_by_source = families.labelled_counter(
            "vllm:prompt_tokens_cached_by_source", "Prompt tokens found in the prefix cache, by memory", "source"
        )
        self._queries = families.counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache")
        self._hits = families.counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache")
        self._media_queries = families.counter(
            "vllm:mm_cache_queries", "Images and videos looked up in the processor cache"
        )
        self._media_hits = families.counter("vllm:mm_cache_hits", "Images and videos found in the processor cache")
        self._evicted = families.counter(
            "trimtab_evicted_blocks", "Cached KV blocks evicted for other content; a larger KV cache would keep them"
        )
        self._host_queries = families.counter(
            "vllm:external_prefix_cache_queries", "Tokens missing on the device and looked up in the host cache"
        )
        self._host_hits = families.counter("vllm:external_prefix_cache_hits", "Tokens found in the host cache")
        self._host_blocks = families.gauge("trimtab_host_cache_blocks", "Evicted KV blocks stored in host memory")
        self._offloaded = families.labelled_counter(
            "trimtab_kv_offload_bytes", "Bytes copied between the KV cache and the host cache", "direction"
        )
        self._swapped = families.labelled_counter(
            "trimtab_swapped_bytes", "Bytes copied between the KV cache and the swap space", "direction"
        )
        self._swap_seconds = families.counter("trimtab_swap_seconds", "Seconds spent copying to and from the host")
        for source in SOURCES:
            self._by_source.of(source)
        for direction in ("out", "in"):
            self._swapped.of(direction)
            self._offloaded.of(direction)
        for place in (DEVICE, HOST):
            self._cached_by_source.of(place)

    def media_looked_up(self, queries: int, hits: int) -> None:
        """Count a request's lookups, made in its API server."""
        self._media_queries.inc(queries)
        self._media_hits.inc(hits)

    def on_steps(self, steps: Sequence[StepStats]) -> None:
        for stats in steps:
            self._count(stats)
        self._host_blocks.set(steps[-1].host_cache_blocks)

    def _count(self, stats: StepStats) -> None:
        if stats.num_prompt_tokens:
            cached = stats.num_cached_prompt_tokens
            self._by_source.of("local_compute").inc(stats.num_prompt_tokens - cached)
            self._by_source.of("local_cache_hit").inc(cached)
            self._cached.inc(cached)
            on_host = stats.num_host_cached_prompt_tokens
            self._cached_by_source.of(DEVICE).inc(cached - on_host)
            self._cached_by_source.of(HOST).inc(on_host)
        if stats.prefix_cache_queries:
            self._queries.inc(stats.prefix_cache_queries)
            self._hits.inc(stats.prefix_cache_hits)
        if stats.host_cache_queries:
            self._host_queries.inc(stats.host_cache_queries)
            self._host_hits.inc(stats.host_cache_hits)
        if stats.offloaded_bytes or stats.restored_bytes:
            self._offloaded.of("out").inc(stats.offloaded_bytes)
            self._offloaded.of("in").inc(stats.restored_bytes)
        if stats.evicted_blocks:
            self._evicted.inc(stats.evicted_blocks)
        if stats.swapped_out_bytes or stats.swapped_in_bytes:
            self._swapped.of("out").inc(stats.swapped_out_bytes)
            self._swapped.of("in").inc(stats.swapped_in_bytes)
        if stats.swap_seconds:
            self._swap_seconds.inc(stats.swap_seconds)
