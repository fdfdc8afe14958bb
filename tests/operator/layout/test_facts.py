"""Model facts as the engine prints them, read by the operator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
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
            "knows too little of BloomForCausalLM",
        ),
    ],
)
def test_what_is_wrong_with_facts_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelFacts.parse(FACTS | changes)


def test_what_inspect_prints_is_read(tmp_path: Path) -> None:
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
