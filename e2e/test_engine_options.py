"""Scenario: options of spec.engine that are not tuned take effect in the engine."""

from __future__ import annotations

from conftest import Apply
from harness.answer import EXPECTED, ask
from harness.deployment import Deployment
from harness.engine import read_engine
from harness.kube import Kube
from prometheus_client.parser import text_string_to_metric_families

API_PORT = 8000
OPTIONS = {
    "gpuMemoryUtilization": "0.95",  # two API servers and the core leave room for 880 KV tokens
    "maxModelLen": 512,
    "preemptionMode": "auto",
    "swapSpace": "64Mi",
    "enablePrefixCaching": True,
    "speculative": {"method": "ngram", "numSpeculativeTokens": 3},
    "apiServerCount": 2,
}


def _counter(deployment: Deployment, kube: Kube, name: str) -> float:
    text = kube.pod_http(deployment.namespace, deployment.pod()["metadata"]["name"], API_PORT, "/metrics")
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]
    assert samples, f"{name} is not in /metrics"
    return sum(sample.value for sample in samples)


def test_engine_options_of_spec_take_effect(apply: Apply, kube: Kube) -> None:
    deployment = apply(engine=OPTIONS)
    deployment.ready()
    first, again = ask(deployment), ask(deployment)
    assert EXPECTED in first.text
    assert again.text == first.text
    assert (
        _counter(deployment, kube, "vllm:generation_tokens_total") == first.completion_tokens + again.completion_tokens
    )
    assert _counter(deployment, kube, "vllm:prefix_cache_hits_total") > 0
    in_force = read_engine(kube, deployment.namespace, deployment.pod()["metadata"]["name"]).values
    assert in_force["num_speculative_tokens"] == 3
    assert in_force["swap_space_bytes"] == 64 << 20
    assert in_force["enable_prefix_caching"] == 1
