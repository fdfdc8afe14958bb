"""Parsing of the model facts that the engine prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from trimtab_modelspec.kv_groups import KVGroup, LayerKV
from trimtab_operator.layout.facts import ModelFacts

FACTS: dict[str, object] = {
    "model": "/models/m",
    "architecture": "LlamaForCausalLM",
    "supported": True,
    "num_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_kv_heads": 1,
    "head_size": 4,
    "vocab_size": 11,
    "max_model_len": 32,
    "num_parameters": 1000,
    "weights_bytes": 2000,
    "dtype": "bfloat16",
    "quantization": None,
    "tie_word_embeddings": False,
    "num_experts": 0,
    "num_experts_per_token": 0,
    "moe_intermediate_size": 0,
    "dense_layers": [],
    "latent_kv_size": 0,
    "weights_by_part": {
        "embedding": 176,
        "lm_head": 176,
        "attention": 600,
        "kv_projection": 248,
        "dense_mlp": 700,
        "experts": 0,
        "shared_experts": 0,
        "replicated": 100,
    },
    "format": "safetensors",
}


def test_facts_survive_the_way_through_json() -> None:
    facts = ModelFacts.parse(FACTS)
    assert facts.weights_bytes == 2000
    assert ModelFacts.parse(json.loads(json.dumps(facts.to_json()))) == facts


def test_transformers_models_run_on_cpu_only() -> None:
    facts = ModelFacts.parse(FACTS | {"architecture": "Phi3ForCausalLM", "computed_by": "transformers"})
    assert (facts.is_run_on("cpu"), facts.is_run_on("cuda")) == (True, False)
    assert ModelFacts.parse(json.loads(json.dumps(facts.to_json()))) == facts
    assert ModelFacts.parse(FACTS).is_run_on("cuda")


def test_facts_parse_tensor_parallel_sizes() -> None:
    said = FACTS | {"computed_by": "transformers", "tensor_parallel_sizes": [1, 2, 4]}
    facts = ModelFacts.parse(said)
    assert facts.tensor_sizes == (1, 2, 4)
    assert ModelFacts.parse(json.loads(json.dumps(facts.to_json()))) == facts
    older = {key: value for key, value in said.items() if key != "tensor_parallel_sizes"}
    assert ModelFacts.parse(older).tensor_sizes == (1,)
    with pytest.raises(ValueError, match="tensor_parallel_sizes is"):
        ModelFacts.parse(said | {"tensor_parallel_sizes": [0.5]})


def test_facts_count_vision_encoder_separately() -> None:
    facts = ModelFacts.parse(FACTS | {"tower_bytes": 1234})
    assert (facts.tower_bytes, facts.weights_bytes, ModelFacts.parse(FACTS).tower_bytes) == (1234, 2000, 0)
    assert ModelFacts.parse(json.loads(json.dumps(facts.to_json()))) == facts
    with pytest.raises(ValueError, match="tower_bytes is -1"):
        ModelFacts.parse(FACTS | {"tower_bytes": -1})


def a_group(*layers: list[int], window: int | None = None, **sizes: int) -> dict[str, object]:
    """Return the engine's JSON of a KV group with 8 heads of size 64."""
    said = {"num_kv_heads": 8, "key_size": 64, "value_size": 64} | sizes
    return {"layers": list(layers), **said, "window": window}


def test_an_engine_that_names_no_groups_of_layers_has_one() -> None:
    (group,) = ModelFacts.parse(FACTS).kv_groups
    assert group == KVGroup(((0, 2),), LayerKV(num_kv_heads=1, key_size=4, value_size=4))
    (latent,) = ModelFacts.parse(FACTS | {"latent_kv_size": 5}).kv_groups
    assert latent == KVGroup(((0, 2),), LayerKV(num_kv_heads=1, key_size=5, value_size=0))


def test_groups_of_layers_are_read_as_the_engine_names_them() -> None:
    facts = ModelFacts.parse(FACTS | {"kv_groups": [a_group([0, 1], window=128), a_group([1, 2], value_size=32)]})
    assert facts.kv_groups == (
        KVGroup(((0, 1),), LayerKV(num_kv_heads=8, key_size=64, value_size=64, window=128)),
        KVGroup(((1, 2),), LayerKV(num_kv_heads=8, key_size=64, value_size=32)),
    )
    assert ModelFacts.parse(json.loads(json.dumps(facts.to_json()))) == facts


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], r"kv_groups is \[\]; a list of 1 to num_layers 2"),
        ([1], r"kv_groups\[0\] is 1; an object"),
        ([a_group([0, 1])] * 3, "a list of 1 to num_layers 2"),
        ([a_group([0, 1])], "each of the 2 layers once"),
        ([a_group([0, 2]), a_group([1, 2])], "each of the 2 layers once"),
        ([a_group([0, 3])], "each of the 2 layers once"),
        ([a_group([0, 0], [0, 2])], "each of the 2 layers once"),
        ([a_group([0])], r"kv_groups\[0\].layers is \[\[0\]\]; a list of pairs"),
        ([a_group([0, -2])], "a list of pairs of whole numbers"),
        ([a_group([0, 2], key_size=0)], r"kv_groups\[0\].key_size is 0; a whole number of 1 or more"),
        ([a_group([0, 2], window=0)], r"kv_groups\[0\].window is 0"),
    ],
)
def test_invalid_kv_groups_are_named(groups: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelFacts.parse(FACTS | {"kv_groups": groups})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": None}, "num_layers is None"),
        ({"num_layers": True}, "num_layers is True"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0; a whole number of 1 or more"),
        ({"dtype": "float8"}, "dtype is 'float8'"),
        ({"dense_layers": [-1]}, "dense_layers"),
        ({"dense_layers": [0, 0]}, "dense_layers must ascend"),
        ({"dense_layers": [2]}, "stay below num_layers 2"),
        ({"supported": "yes"}, "supported is 'yes'"),
        ({"num_layers": 10**30}, "num_layers is 10{30}; a whole number of 1 to"),
        ({"num_kv_heads": 3}, "num_attention_heads is 2; a multiple of num_kv_heads 3 is needed"),
        (
            {"num_experts": 4, "num_experts_per_token": 5, "moe_intermediate_size": 8},
            "num_experts_per_token is 5; at most num_experts 4",
        ),
        ({"num_experts": 4}, "num_experts_per_token is 0"),
        ({"weights_bytes": 1}, "adds up to 2000, weights_bytes is 1"),
        ({"weights_by_part": None}, "weights_by_part is None"),
        ({"weights_by_part": {}}, "weights_by_part.embedding is None"),
        (
            {"architecture": "BloomForCausalLM", "supported": False, "weights_by_part": None},
            "reports few facts of BloomForCausalLM",
        ),
    ],
)
def test_invalid_facts_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelFacts.parse(FACTS | changes)


def test_facts_parse_inspect_output(tmp_path: Path) -> None:
    """The two packages share no import: the command line is between them, here as in a cluster."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 11,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = (
        "import json, sys; from trimtab_engine.models.facts import model_facts; "
        "print(json.dumps(model_facts(sys.argv[1], load_format='dummy')))"
    )
    printed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True)
    facts = ModelFacts.parse(json.loads(printed.stdout))
    assert (facts.supported, facts.num_layers, facts.num_kv_heads) == (True, 2, 2)
