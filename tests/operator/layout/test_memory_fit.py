"""GPU memory of a layout's ranks, by properties and compared with running engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from trimtab_operator.layout.facts import ModelFacts, facts_of_config
from trimtab_operator.layout.gpus import GIB, GPUS, gpu_named
from trimtab_operator.layout.memory_fit import Envelope, memory_fit
from trimtab_operator.layout.rules import facts_problems
from trimtab_operator.resource.spec import Parallelism, Spec

Published = Callable[[str], ModelFacts]
RandomCase = Callable[[int], tuple[dict[str, Any], dict[str, Any]]]
H100 = gpu_named("H100")


def test_the_kv_cache_of_a_small_model_is_what_engines_report(published: Published) -> None:
    """vllm#10511 logs Meta-Llama-3-8B on an H100 of 79.22 GiB at 0.90: 53.29 GiB of KV cache, 14.96 GiB of weights."""
    facts = published("Llama-3.1-8B")
    rank = memory_fit(facts, Parallelism(), H100, Envelope.default(facts, H100)).tightest
    assert rank.formula.weights_bytes / GIB == pytest.approx(14.96, abs=0.005)
    assert rank.formula.kv_bytes / GIB == pytest.approx(53.29, rel=0.01)


def test_a_token_of_llama_70b_takes_40_kib_on_each_of_8_ranks(published: Published) -> None:
    facts = published("Llama-3.1-70B")
    fit = memory_fit(facts, Parallelism(tensor=8), H100, Envelope.default(facts, H100))
    assert (
        fit.tightest.formula.bytes_per_block == 16 * 2 * 80 * 1 * 128 * 2
    )  # block, K and V, layers, head, size, bytes


def test_a_latent_cache_does_not_shrink_with_tensor_ranks(published: Published) -> None:
    facts = published("DeepSeek-V3")
    envelope = Envelope.default(facts, gpu_named("H200"))
    per_block = {
        memory_fit(facts, Parallelism(tensor=t), gpu_named("H200"), envelope).tightest.formula.bytes_per_block
        for t in (1, 8, 16)
    }
    assert per_block == {16 * 61 * 576 * 2}


def test_the_last_stage_decides_where_its_output_layer_outweighs_a_layer(published: Published) -> None:
    facts = published("SmolLM2-135M")
    fit = memory_fit(facts, Parallelism(pipeline=30), H100, Envelope.default(facts, H100))
    assert fit.tightest.stage.is_last


def test_fp8_keys_and_values_double_the_tokens(published: Published, a_spec: Callable[..., Spec]) -> None:
    facts = published("Llama-3.1-8B")
    plain, narrow = (
        memory_fit(facts, Parallelism(), H100, Envelope.of_spec(a_spec(facts, engine=engine), facts, H100))
        for engine in ({}, {"kvCacheDtype": "fp8"})
    )
    assert narrow.kv_tokens == pytest.approx(2 * plain.kv_tokens, abs=16)


def test_vision_encoder_counts_on_first_stage_if_allowed(published: Published) -> None:
    """Only where it is loaded: of some Trimtab's engine serves the text half on GPUs."""
    plain = replace(published("Llama-3.1-8B"), tower_bytes=3 * GIB)
    own = replace(plain, architecture="Qwen2_5_VLForConditionalGeneration")

    def weights(kind: str, limits: dict[str, int] | None, pipeline: int = 1, facts: ModelFacts = plain) -> list[int]:
        engine = {} if limits is None else {"limitMmPerPrompt": limits}
        body = {"model": {"uri": "file:///m"}, "runtime": {"kind": kind}, "engine": engine}
        envelope = Envelope.of_spec(Spec.model_validate(body), facts, H100)
        fit = memory_fit(facts, Parallelism(pipeline=pipeline), H100, envelope)
        return [rank.formula.weights_bytes for rank in fit.ranks]

    (without,) = weights("vllm", {"image": 0, "video": 0})
    assert weights("trimtab", None) == weights("trimtab", {"image": 0, "video": 0}, facts=own) == [without]
    assert weights("trimtab", None, facts=own) == [without + 3 * GIB]
    assert (
        weights("vllm", None) == weights("vllm", {"image": 2}) == weights("vllm", {"image": 0}) == [without + 3 * GIB]
    )
    stages = zip(weights("vllm", {"image": 2}, 2), weights("vllm", {"image": 0, "video": 0}, 2), strict=True)
    assert [seeing - blind for seeing, blind in stages] == [3 * GIB, 0]


def test_the_envelope_is_the_specs_caps_and_else_the_engines_defaults(
    published: Published, a_spec: Callable[..., Spec]
) -> None:
    facts = published("Llama-3.1-8B")
    plain = Envelope.of_spec(a_spec(facts), facts, H100)
    assert (plain.max_num_batched_tokens, plain.max_num_seqs, plain.max_model_len) == (8192, 1024, 131072)
    small = Envelope.of_spec(a_spec(facts), facts, gpu_named("L4"))
    assert (small.max_num_batched_tokens, small.max_num_seqs) == (2048, 256)
    engine = {"maxNumSeqs": 100, "maxNumBatchedTokens": 3000, "maxModelLen": 4096, "enforceEager": True}
    given = Envelope.of_spec(a_spec(facts, engine=engine), facts, H100)
    assert (given.max_num_seqs, given.max_num_batched_tokens) == (200, 6000)  # twice the start
    assert (given.max_model_len, given.captures_graphs) == (4096, False)


@pytest.mark.parametrize("seed", range(200))
def test_memory_is_monotonous(a_random_case: RandomCase, seed: int) -> None:
    """More memory, a larger share, shorter requests or twice the stages never make a layout worse."""
    config, degrees = a_random_case(seed)
    facts, parallelism = facts_of_config(config, "m"), Parallelism(**degrees)
    if facts_problems(parallelism, facts):
        parallelism = Parallelism()
    random = Random(seed)
    gpu = replace(random.choice(GPUS), memory_bytes=random.randint(4 * GIB, 8 * GIB))
    envelope = replace(
        Envelope.default(facts, gpu), max_model_len=random.randint(1, 1 << 22), gpu_memory_utilization="0.5"
    )
    fit = memory_fit(facts, parallelism, gpu, envelope)
    larger = memory_fit(facts, parallelism, replace(gpu, memory_bytes=gpu.memory_bytes + GIB), envelope)
    share = memory_fit(facts, parallelism, gpu, replace(envelope, gpu_memory_utilization="0.6"))
    shorter = memory_fit(facts, parallelism, gpu, replace(envelope, max_model_len=envelope.max_model_len // 2 + 1))
    assert larger.kv_tokens > fit.kv_tokens
    assert share.kv_tokens > fit.kv_tokens
    assert shorter.kv_tokens == fit.kv_tokens
    assert shorter.max_concurrency >= fit.max_concurrency
    assert fit.fits == (fit.max_concurrency >= 1)
    if fit.min_utilization is not None:
        assert memory_fit(facts, parallelism, gpu, replace(envelope, gpu_memory_utilization=fit.min_utilization)).fits
