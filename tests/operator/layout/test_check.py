"""Validation of layouts of published models, computed manually, and the suggested layouts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from trimtab_operator.layout.check import check_layout, layout_problems
from trimtab_operator.layout.facts import ModelFacts, facts_of_config
from trimtab_operator.layout.gpus import GIB, GPUS, Gpu, gpu_named
from trimtab_operator.layout.memory_fit import Envelope
from trimtab_operator.layout.nearest import nearest_layouts
from trimtab_operator.resource.spec import Parallelism, Spec

Published = Callable[[str], ModelFacts]
ASpec = Callable[..., Spec]
RandomCase = Callable[[int], tuple[dict[str, Any], dict[str, Any]]]

# Per GPU, in GiB: its share of the weights + KV of one request. 0.9 of the GPU gives H100 71.3, A100-80 71.2, H200
# 125.8, B200 160.5, L4 19.8. Activations, graphs and others take 1.5 to 4.
VERDICTS = [
    # model, GPU, layout, maxModelLen (None: the model's), works
    ("Llama-3.1-8B", "H100", {}, None, True),  # 15.0 + 16.0
    ("Llama-3.1-8B", "L4", {}, None, False),  # 15.0 + 16.0
    ("Llama-3.1-8B", "L4", {}, 8192, True),  # 15.0 + 1.0
    ("Llama-3.1-8B", "L4", {"tensor": 2}, None, True),  # 7.5 + 8.0
    ("Llama-3.1-70B", "H100", {"tensor": 1}, 8192, False),  # 131.4
    ("Llama-3.1-70B", "H100", {"tensor": 2}, None, False),  # 65.7 + 20.0
    ("Llama-3.1-70B", "H100", {"tensor": 4}, None, True),  # 32.9 + 10.0
    ("Llama-3.1-70B", "H200", {"tensor": 1}, 8192, False),  # 131.4
    ("Llama-3.1-70B", "H200", {"tensor": 2}, None, True),  # 65.7 + 20.0
    ("Llama-3.1-70B", "B200", {"tensor": 1}, 8192, True),  # 131.4 + 2.5
    ("Llama-3.1-70B", "H100", {"tensor": 1, "pipeline": 4}, None, True),  # 32.9 + 10.0
    ("Llama-3.1-405B", "H100", {"tensor": 8}, 8192, False),  # 94.5
    ("Llama-3.1-405B", "H100", {"tensor": 8, "pipeline": 2, "gpusPerNode": 8}, None, True),  # 47.2 + 3.9
    ("Llama-3.1-405B", "H100", {"tensor": 16, "gpusPerNode": 8}, None, True),  # 47.2 + 7.9: 8 KV heads, each twice
    ("Llama-3.1-405B", "A100-80", {"tensor": 8, "pipeline": 2, "gpusPerNode": 8}, None, True),
    ("Llama-3.1-405B", "H200", {"tensor": 8}, None, True),  # 94.5 + 7.9
    ("Llama-3.1-405B", "H200", {"tensor": 4}, 8192, False),  # 189
    ("Qwen3-235B-A22B", "H200", {"tensor": 8}, None, True),  # 54.7 + 1.8
    ("Qwen3-235B-A22B", "H200", {"tensor": 4}, None, True),  # 109.5 + 1.8
    ("Qwen3-235B-A22B", "H200", {"tensor": 2}, 4096, False),  # 219
    ("Qwen3-235B-A22B", "H100", {"tensor": 4}, 4096, False),  # 109.5
    ("Qwen3-235B-A22B", "H100", {"tensor": 8, "expert": True}, None, True),  # 54.7 + 1.8
    ("Qwen3-235B-A22B", "H200", {"tensor": 1, "data": 8, "expert": True, "gpusPerNode": 8}, None, True),  # 53 + 14 + 7
    ("Qwen3-235B-A22B", "H200", {"tensor": 1, "data": 5, "gpusPerNode": 5}, None, False),  # 1536 by 5
    ("DeepSeek-V3", "H200", {"tensor": 8}, None, True),  # 78.8 + 10.7
    ("DeepSeek-V3", "H100", {"tensor": 8}, 4096, False),  # 78.8
    ("DeepSeek-V3", "H100", {"tensor": 8, "pipeline": 2, "gpusPerNode": 8}, None, True),  # 40 + 5.4
    ("DeepSeek-V3", "B200", {"tensor": 8}, None, True),
    ("Llama-4-Scout", "H100", {"tensor": 4}, None, False),  # 50.2 + 480: ten million tokens
    ("Llama-4-Scout", "H100", {"tensor": 4}, 131072, True),  # 50.2 + 6.0
    ("Llama-4-Scout", "H100", {"tensor": 2}, 8192, False),  # 100.4
    ("Llama-4-Scout", "H100", {"tensor": 16}, 131072, False),  # 40 heads by 16
    ("Llama-4-Maverick", "H100", {"tensor": 8}, 8192, False),  # 93.3
    ("Llama-4-Maverick", "H200", {"tensor": 8}, 131072, True),  # 93.3 + 3.0
    ("Llama-4-Maverick", "H100", {"tensor": 8, "pipeline": 2, "gpusPerNode": 8}, 131072, True),  # 46.6 + 1.5
    ("SmolLM2-135M", "L4", {"tensor": 2}, None, False),  # 9 heads by 2
    ("SmolLM2-135M", "L4", {"tensor": 3}, None, True),
    ("SmolLM2-135M", "L4", {"pipeline": 2}, None, True),
]


@pytest.mark.parametrize(("model", "gpu", "layout", "max_model_len", "works"), VERDICTS)
def test_published_models_on_known_gpus(
    published: Published,
    a_spec: ASpec,
    model: str,
    gpu: str,
    layout: dict[str, Any],
    max_model_len: int | None,
    works: bool,
) -> None:
    facts = published(model)
    engine = {} if max_model_len is None else {"maxModelLen": max_model_len}
    refusals = check_layout(a_spec(facts, engine=engine, **layout), facts, gpu_named(gpu))
    assert (not refusals) == works, [str(refusal) for refusal in refusals]


def test_cpu_only_architecture_is_rejected_on_gpus(published: Published) -> None:
    facts = replace(published("Llama-3.1-8B"), architecture="Phi3ForCausalLM", is_by_transformers=True)
    spec = Spec.model_validate({"model": {"uri": "file:///m"}})
    (refusal,) = check_layout(spec, facts, gpu_named("H200"))
    assert refusal.field == "spec.model.uri"
    assert facts.architecture in refusal.message


def test_cpu_only_architecture_is_accepted_on_cpu(published: Published) -> None:
    facts = replace(published("Llama-3.1-8B"), architecture="Phi3ForCausalLM", is_by_transformers=True)
    spec = Spec.model_validate({"model": {"uri": "file:///m"}, "runtime": {"device": "cpu"}})
    assert check_layout(spec, facts) == ()


@pytest.mark.parametrize("model", ["Llama-4-Scout", "Llama-4-Maverick", "DeepSeek-V3"])
def test_chunks_latent_vectors_and_routing_by_sigmoids_run_on_gpus(published: Published, model: str) -> None:
    assert published(model).is_run_on("cuda")


def test_a_model_that_is_too_large_is_refused_with_the_sum_and_what_would_do(
    published: Published, a_spec: ASpec
) -> None:
    facts = published("Llama-3.1-405B")
    (refusal,) = check_layout(a_spec(facts, tensor=8), facts, gpu_named("H100"))
    assert refusal.field == "spec.parallelism"
    assert "a rank needs 105.8 GiB: 94.5 GiB of weights, 7.9 GiB of KV cache" in refusal.message
    assert "of the GPU's 79.2 GiB (H100), gpuMemoryUtilization 0.9 allows 71.3 GiB" in refusal.message
    assert re.search(
        r"tensor 8 × pipeline 2, gpusPerNode 8 \(\d+ tokens of KV cache, \d+\.\d requests", refusal.message
    )


def test_shorter_requests_and_a_larger_share_are_offered_where_they_would_do(
    published: Published, a_spec: ASpec
) -> None:
    facts = published("Llama-3.1-8B")
    spec = a_spec(facts, engine={"gpuMemoryUtilization": "0.40"})
    (refusal,) = check_layout(spec, facts, gpu_named("H100"))
    found = re.search(r"set maxModelLen to (\d+) or less, or raise gpuMemoryUtilization to (0\.\d+)", refusal.message)
    assert found is not None
    shorter = a_spec(facts, engine={"gpuMemoryUtilization": "0.40", "maxModelLen": int(found[1])})
    larger = a_spec(facts, engine={"gpuMemoryUtilization": found[2]})
    assert check_layout(shorter, facts, gpu_named("H100")) == ()
    assert check_layout(larger, facts, gpu_named("H100")) == ()


def test_requests_longer_than_the_models_positions_are_refused(published: Published, a_spec: ASpec) -> None:
    facts = published("Llama-3.1-8B")
    (refusal,) = check_layout(a_spec(facts, engine={"maxModelLen": 131073}), facts, gpu_named("H100"))
    assert (
        str(refusal)
        == "spec.engine.maxModelLen: is 131073, but the model's positions allow 1 to 131072; use at most 131072"
    )


@pytest.mark.parametrize(
    ("gpu", "dtype", "works"), [("A100", "fp8", False), ("A100", "fp8_e5m2", True), ("L4", "fp8", True)]
)
def test_an_fp8_cache_needs_a_gpu_that_has_it(
    published: Published, a_spec: ASpec, gpu: str, dtype: str, works: bool
) -> None:
    facts = published("Llama-3.1-8B")
    spec = a_spec(facts, engine={"kvCacheDtype": dtype, "maxModelLen": 4096})
    fields = [refusal.field for refusal in check_layout(spec, facts, gpu_named(gpu))]
    assert fields == ([] if works else ["spec.engine.kvCacheDtype"])


def test_check_layout_without_facts_checks_spec_only(a_spec: ASpec) -> None:
    assert check_layout(a_spec(tensor=7), None) == ()
    (refusal,) = check_layout(a_spec(tensor=2, gpusPerNode=4), None)
    assert str(refusal).startswith("spec.parallelism.gpusPerNode: is 4, but a replica has 2 ranks")


def test_check_layout_without_gpu_skips_memory(published: Published) -> None:
    facts = published("Llama-3.1-405B")
    body: dict[str, Any] = {"model": {"uri": "file:///m"}}
    assert check_layout(Spec.model_validate(body), facts) == ()
    on_cpu = Spec.model_validate({**body, "runtime": {"device": "cpu"}})
    assert check_layout(on_cpu, facts, gpu_named("H100")) == ()


@pytest.mark.parametrize("seed", range(300))
def test_every_layout_that_is_offered_passes_the_check(a_random_case: RandomCase, a_spec: ASpec, seed: int) -> None:
    random = Random(seed)
    config, degrees = a_random_case(seed)
    facts, gpu = facts_of_config(config, "m"), random.choice((*GPUS, None))
    asked = Parallelism(**degrees, gpus_per_node=random.choice([None, None, 1, 2, 4, 8]))
    envelope = Envelope.default(facts, gpu) if gpu is not None else None
    offers = nearest_layouts(asked, facts, gpu, envelope)
    assert offers, "one rank always works for these small models"
    for offer in offers:
        spec = a_spec(facts, **offer.parallelism.model_dump(by_alias=True))
        assert check_layout(spec, facts, gpu) == ()
    is_refused = bool(layout_problems(asked, facts, gpu, envelope))
    assert is_refused == (asked not in [offer.parallelism for offer in offers])


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Llama-3.1-70B", "Qwen3-235B-A22B"])
def test_offers_for_published_models_pass_the_check(published: Published, a_spec: ASpec, gpu: Gpu, model: str) -> None:
    facts = published(model)
    spec = a_spec(facts, engine={"maxModelLen": 4096}, tensor=3)
    offers = nearest_layouts(spec.parallelism, facts, gpu, Envelope.of_spec(spec, facts, gpu))
    assert offers
    for offer in offers:
        layout = offer.parallelism.model_dump(by_alias=True)
        assert check_layout(a_spec(facts, engine={"maxModelLen": 4096}, **layout), facts, gpu) == ()
        assert offer.fit is not None
        assert offer.fit.kv_tokens >= 4096


def test_a_mixture_that_is_too_large_is_refused_with_its_data_ranks(published: Published, a_spec: ASpec) -> None:
    facts = published("Qwen3-235B-A22B")
    (refusal,) = check_layout(a_spec(facts, tensor=2, data=2, gpusPerNode=4), facts, gpu_named("H100"))
    assert refusal.message.startswith("is tensor 2 × pipeline 1 × data 2, but a rank needs")
    assert "set more tensor, pipeline or data ranks" in refusal.message


def test_check_layout_names_settings_if_nothing_fits(published: Published, a_spec: ASpec) -> None:
    facts = published("Llama-3.1-8B")
    spec = a_spec(facts, engine={"gpuMemoryUtilization": "0.01"})
    (refusal,) = check_layout(spec, facts, gpu_named("H100"))
    assert "raise gpuMemoryUtilization to" in refusal.message
    assert refusal.message.endswith("On H100 GPUs no layout works with this gpuMemoryUtilization and maxModelLen")


def test_a_tower_that_does_not_fit_is_named_with_what_drops_it(published: Published) -> None:
    facts = replace(published("Llama-3.1-8B"), tower_bytes=60 * GIB)
    body: dict[str, Any] = {
        "model": {"uri": "file:///m"},
        "runtime": {"kind": "vllm"},
        "engine": {"maxModelLen": 4096},
    }
    (refusal,) = check_layout(Spec.model_validate(body), facts, gpu_named("H100"))
    assert "75.0 GiB of weights (60.0 GiB of them for images and videos)" in refusal.message
    assert "serve text only with limitMmPerPrompt {image: 0, video: 0}" in refusal.message
    body["engine"] |= {"limitMmPerPrompt": {"image": 0, "video": 0}}
    assert check_layout(Spec.model_validate(body), facts, gpu_named("H100")) == ()
