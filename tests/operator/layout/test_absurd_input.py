"""Facts and specs with extreme numbers: the check returns messages, because it runs in the operator's event loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from random import Random
from typing import Any

import pytest
from trimtab_operator.layout.check import check_layout
from trimtab_operator.layout.facts import ModelFacts, WeightsByPart
from trimtab_operator.layout.gpus import GPUS
from trimtab_operator.layout.nearest import nearest_layouts
from trimtab_operator.resource.spec import Parallelism, Spec

ASpec = Callable[..., Spec]


def absurd_facts(random: Random) -> ModelFacts:
    """Return facts with unrealistic numbers within the types of the contract."""

    def number(least: int = 0) -> int:
        return max(least, random.choice([0, 1, 2, 3, 7, 64, 128, 4096, random.randint(0, 10**5), 10**9, 2**40]))

    num_layers, num_experts = random.choice([1, 2, 7, 126, 10_000, number(1)]), random.choice([0, 0, 1, 8, number()])
    parts = {part.name: number() for part in fields(WeightsByPart)} | {"attention": number(1)}
    kv_heads, per_token = number(1), number(min(1, num_experts))
    dense = sorted(random.sample(range(min(num_layers, 200)), min(3, num_layers))) if num_experts else []
    names = ("hidden_size", "head_size", "vocab_size", "max_model_len")
    return ModelFacts.parse(
        {
            **{name: number(1) for name in (*names, "num_parameters")},
            "model": "m",
            "architecture": "LlamaForCausalLM",
            "supported": True,
            "num_layers": num_layers,
            "num_kv_heads": kv_heads,
            "num_attention_heads": kv_heads * random.choice([1, 2, 3, 8, 2**20]),
            "intermediate_size": number(),
            "dtype": random.choice(["float32", "bfloat16"]),
            "quantization": random.choice([None, "fp8", "another"]),
            "tie_word_embeddings": random.random() < 0.5,
            "num_experts": num_experts,
            "num_experts_per_token": min(per_token, num_experts) if num_experts else per_token,
            "moe_intermediate_size": number(min(1, num_experts)),
            "dense_layers": dense,
            "latent_kv_size": random.choice([0, 0, 1, 576, number()]),
            "kv_groups": random.choice([None, absurd_groups(random, num_layers, number)]),
            "weights_by_part": parts,
            "weights_bytes": sum(parts.values()),
        }
    )


def absurd_groups(random: Random, num_layers: int, number: Callable[[int], int]) -> list[dict[str, Any]]:
    """One or two groups that have each layer once."""
    cut = random.randint(1, num_layers)
    spans = [[0, cut], [cut, num_layers]] if cut < num_layers else [[0, num_layers]]
    return [
        {
            "layers": [span],
            "num_kv_heads": number(1),
            "key_size": number(1),
            "value_size": number(0),
            "window": random.choice([None, number(1)]),
        }
        for span in spans
    ]


@pytest.mark.parametrize("seed", range(300))
def test_the_check_answers_whatever_it_is_asked(a_spec: ASpec, seed: int) -> None:
    random = Random(seed)
    facts = absurd_facts(random)
    layout: dict[str, Any] = {
        "tensor": random.choice([1, 1, 2, 3, 8, 64, 1024]),
        "pipeline": random.choice([1, 1, 2, 3, 32, 128]),
        "data": random.choice([1, 1, 2, 3, 1024]),
        "expert": random.random() < 0.4,
        "gpusPerNode": random.choice([None, None, 1, 2, 3, 8, 64]),
    }
    engine = {
        "maxModelLen": random.choice([None, 1, 100, 16_777_216]),
        "maxNumSeqs": random.choice([None, 1, 65_536]),
        "gpuMemoryUtilization": random.choice([None, "1", "0.0001"]),
        "quantization": random.choice([None, "fp8"]),
        "kvCacheDtype": random.choice([None, "auto", "fp8", "fp8_e5m2"]),
    }
    for refusal in check_layout(a_spec(facts, engine=engine, **layout), facts, random.choice((*GPUS, None))):
        assert refusal.field.startswith(("spec.parallelism", "spec.engine."))
        assert 10 < len(refusal.message) < 1500


def test_pods_that_are_offered_are_no_larger_than_a_spec_can_say(published: Callable[[str], ModelFacts]) -> None:
    """Without gpusPerNode a pod has tensor × pipeline GPUs, here 160, more than gpusPerNode may say."""
    offers = nearest_layouts(Parallelism(tensor=5, pipeline=32), published("Llama-3.1-8B"))
    assert offers
    assert all((offer.parallelism.gpus_per_node or 0) <= 64 for offer in offers)
