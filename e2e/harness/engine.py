"""Metrics of an engine, scraped from its pod through the API server."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from harness.kube import Kube

API_PORT = 8000


@dataclass(frozen=True, slots=True)
class EngineReading:
    """One scrape. Counters count from the engine's start; `kv_usage` is 0..1."""

    preemptions: float
    running: float
    waiting: float
    kv_usage: float
    kv_tokens: int
    kv_tokens_cap: int
    generation_tokens: float
    computed_tokens: float
    recomputed_tokens: float
    config_generation: int
    values: dict[str, float] = field(default_factory=dict)  # the applied value of each live field


def read_engine(kube: Kube, namespace: str, pod: str) -> EngineReading:
    """Scrape `pod`; raises KubectlError when it does not answer, KeyError when a family is missing."""
    return parse(kube.pod_http(namespace, pod, API_PORT, "/metrics"))


def parse(text: str) -> EngineReading:
    plain: dict[str, float] = {}
    blocks: dict[str, float] = {}
    values: dict[str, float] = {}
    block_size = 0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "trimtab_kv_blocks":
                blocks[sample.labels["state"]] = sample.value
            elif sample.name == "trimtab_config_value":
                values[sample.labels["field"]] = sample.value
            elif sample.name.startswith("vllm:cache_config_info"):
                block_size = int(sample.labels["block_size"])
            elif not sample.name.endswith(("_bucket", "_created")):
                plain[sample.name] = plain.get(sample.name, 0.0) + sample.value
    return EngineReading(
        preemptions=plain["vllm:num_preemptions_total"],
        running=plain["vllm:num_requests_running"],
        waiting=plain["vllm:num_requests_waiting"],
        kv_usage=plain["vllm:kv_cache_usage_perc"],
        kv_tokens=int(blocks["total"]) * block_size,
        kv_tokens_cap=int(blocks["cap"]) * block_size,
        generation_tokens=plain["vllm:generation_tokens_total"],
        computed_tokens=plain["trimtab_step_tokens_total"],
        recomputed_tokens=plain["trimtab_recomputed_tokens_total"],
        config_generation=int(plain["trimtab_config_generation"]),
        values=values,
    )
