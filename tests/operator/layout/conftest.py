"""Facts for the layout tests: published configurations, and random models of supported kinds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from trimtab_operator.layout.facts import ModelFacts, facts_of_config
from trimtab_operator.resource.spec import Spec

Config = dict[str, Any]
RandomCase = Callable[[int], tuple[Config, dict[str, Any]]]

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="session")
def configs() -> dict[str, Config]:
    """The published config.json files' values, by model."""
    return json.loads((GOLDEN / "published_configs.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def published(configs: dict[str, Config]) -> Callable[[str], ModelFacts]:
    return lambda name: facts_of_config(configs[name], name)


@pytest.fixture(scope="session")
def a_spec() -> Callable[..., Spec]:
    """Return a spec of a layout. CPU-only models use the vllm runtime, so that only numbers matter."""

    def build(facts: ModelFacts | None = None, *, engine: dict[str, Any] | None = None, **parallelism: Any) -> Spec:
        kind = "trimtab" if facts is None or facts.is_run_on("cuda") else "vllm"
        body = {"parallelism": parallelism, "engine": engine or {}, "runtime": {"kind": kind}}
        return Spec.model_validate({"model": {"uri": "file:///m"}, **body})

    return build


@pytest.fixture(scope="session")
def a_random_case() -> RandomCase:
    """A small model and a layout, by seed: about half of the layouts do not work for their model."""

    def build(seed: int) -> tuple[Config, dict[str, Any]]:
        random = Random(seed)
        return _random_config(random), _random_layout(random)

    return build


def _random_config(random: Random) -> Config:
    """A small model that the engine runs: dense or a mixture, with numbers that often do not divide."""
    is_moe = random.random() < 0.5
    kv_heads = random.choice([1, 2, 3, 4, 6, 8])
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if is_moe else random.choice(["LlamaForCausalLM", "Qwen2ForCausalLM"])],
        "hidden_size": 8 * random.randint(1, 8),
        "head_dim": 2 * random.randint(1, 4),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * random.choice([1, 2, 3, 4]),
        "num_hidden_layers": random.randint(1, 9),
        "intermediate_size": random.choice([12, 16, 18, 24, 32, 36, 40, 48]),
        "vocab_size": random.randint(100, 300),
        "max_position_embeddings": 64,
        "tie_word_embeddings": random.random() < 0.5,
        "attention_bias": random.random() < 0.5,
        "torch_dtype": "bfloat16",
    }
    if is_moe:
        config |= {
            "num_experts": random.choice([2, 3, 4, 6, 8, 12]),
            "num_experts_per_tok": random.choice([1, 2]),
            "moe_intermediate_size": random.choice([6, 8, 10, 12, 24]),
            "decoder_sparse_step": random.choice([1, 1, 2]),
            "mlp_only_layers": random.sample(range(9), random.randint(0, 2)),
        }
    return config


def _random_layout(random: Random) -> dict[str, Any]:
    return {
        "tensor": random.choice([1, 1, 2, 2, 3, 4, 6, 8]),
        "pipeline": random.choice([1, 1, 2, 3, 4, 8]),
        "data": random.choice([1, 1, 1, 2, 3, 4]),
        "expert": random.random() < 0.4,
    }
