"""Model facts from file headers only."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from trimtab_engine.errors import ModelError
from trimtab_engine.models.checkpoint import expected_shapes
from trimtab_engine.models.facts import model_facts
from trimtab_engine.models.registry import parse_model_config

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "attention_bias": True,
    "torch_dtype": "bfloat16",
}
KEYS = {
    "model", "architecture", "supported", "num_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_kv_heads", "head_size", "vocab_size", "max_model_len", "num_parameters", "weights_bytes", "dtype",
    "tie_word_embeddings", "num_experts", "num_experts_per_token", "moe_intermediate_size", "dense_layers",
    "latent_kv_size", "kv_groups", "quantization", "weights_by_part", "format",
}  # fmt: skip


def a_model(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes = expected_shapes(parse_model_config(CONFIG, {}, "config.json"))
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def test_facts_of_a_supported_model(tmp_path: Path) -> None:
    facts = model_facts(str(a_model(tmp_path)))
    assert facts.keys() == KEYS
    assert facts["supported"] is True
    assert (facts["num_layers"], facts["num_kv_heads"], facts["head_size"], facts["format"]) == (2, 1, 4, "safetensors")
    shapes = expected_shapes(parse_model_config(CONFIG, {}, "config.json")).values()
    assert facts["num_parameters"] == sum(torch.Size(shape).numel() for shape in shapes)
    assert facts["weights_bytes"] == 2 * facts["num_parameters"]


GOLDEN = json.loads((Path(__file__).parents[2] / "golden/model_facts.json").read_text())


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_facts_are_those_of_the_contract(case: dict[str, Any], tmp_path: Path) -> None:
    """The operator, which shares no code with the engine, is held to the same file."""
    (tmp_path / "config.json").write_text(json.dumps(case["config"]))
    facts = model_facts(str(tmp_path), load_format="dummy")
    assert {key: value for key, value in facts.items() if key not in ("model", "format")} == case["facts"]


def test_a_mixture_says_where_its_experts_are(tmp_path: Path) -> None:
    mixture = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "mlp_only_layers": [1]}
    config = CONFIG | mixture | {"architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = model_facts(str(tmp_path), load_format="dummy")
    assert (facts["num_experts"], facts["num_experts_per_token"], facts["dense_layers"]) == (6, 2, [1])
    assert facts["weights_by_part"]["experts"] == 6 * 3 * 8 * 10 * 2  # one MoE layer, bfloat16


def test_an_architecture_that_is_not_built_has_facts_too(tmp_path: Path) -> None:
    config = {"architectures": ["OursForCausalLM"], "num_hidden_layers": 3, "num_local_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(5)}, tmp_path / "model.safetensors")
    facts = model_facts(str(tmp_path))
    assert facts.keys() == KEYS | {"refusal"}
    assert facts["supported"] is False
    assert "architecture OursForCausalLM is not supported" in facts["refusal"]
    assert (facts["num_layers"], facts["num_experts"], facts["num_parameters"]) == (3, 8, 5)


def test_facts_unreadable_config_raises_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model at"):
        model_facts(str(tmp_path / "missing"))


def test_no_torch_is_imported(tmp_path: Path) -> None:
    a_model(tmp_path)
    code = (
        "import sys; from trimtab_engine.models.facts import model_facts; model_facts(sys.argv[1]); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
