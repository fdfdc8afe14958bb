"""Block-fp8 checkpoints that the test quantises itself, and weights quantised as they load."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import engine_builders
import pytest
import torch
from safetensors.torch import save_file
from trimtab_engine.errors import ConfigError, ModelError
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.models import loading
from trimtab_engine.models.checkpoint import expected_shapes, expected_tensors
from trimtab_engine.models.facts import model_facts
from trimtab_engine.models.loading import Loader
from trimtab_engine.models.registry import open_model, parse_model_config
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_kernels.w8a8_block_fp8 import dequantize_blocks, quantize_blocks
from trimtab_modelspec.quantization import Quantization
from trimtab_modelspec.tensors import num_quantizable

DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 192,
    "intermediate_size": 320,  # no multiple of a block: gate and up cannot be one weight
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}
MIXTURE: dict[str, Any] = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def a_model(folder: Path, config: dict[str, Any], *, form: str) -> Path:
    """One random model: `plain`, `stored` as fp8 in blocks, or `restored` from that."""
    folder.mkdir()
    quantized = {"quantization_config": FP8} if form == "stored" else {}
    (folder / "config.json").write_text(json.dumps(config | quantized))
    generator = torch.Generator().manual_seed(5)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in expected_shapes(parse_model_config(config, {}, "config.json")).items():
        weight = torch.ones(shape) if name.endswith("norm.weight") else torch.randn(shape, generator=generator) * 0.1
        if not name.endswith("_proj.weight") or form == "plain":
            weights[name] = weight
        elif form == "stored":
            weights[name], weights[name + "_scale_inv"] = quantize_blocks(weight)
        else:
            weights[name] = dequantize_blocks(*quantize_blocks(weight), torch.float32)
    save_file(weights, folder / "model.safetensors")
    return folder


an_engine = partial(
    engine_builders.an_engine, load_format="auto", block_size=16, num_gpu_blocks_override=40, max_num_seqs=4
)


def logprobs(model: Path, **changes: Any) -> torch.Tensor:
    """Return logits of one prompt's own tokens."""
    engine = an_engine(model, **changes)
    params = Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    engine.add(AddRequest("r", [(5 * i) % 127 for i in range(100)], params, arrival_time=0.0))
    while engine.has_work:
        for output in engine.step().outputs:
            scores = output.prompt_logprobs
    assert scores is not None
    return torch.tensor([score.logprobs[0] for score in scores if score is not None])


@pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_a_stored_checkpoint_computes_with_exactly_its_values(tmp_path: Path, config: dict[str, Any]) -> None:
    stored = logprobs(a_model(tmp_path / "stored", config, form="stored"))
    assert torch.equal(stored, logprobs(a_model(tmp_path / "restored", config, form="restored")))
    plain = logprobs(a_model(tmp_path / "plain", config, form="plain"))
    assert 0 < float((stored - plain).abs().mean()) < 0.5, "log-probabilities here are of order 1 to 10"


def test_weights_quantised_as_they_load_are_those_that_would_be_stored(tmp_path: Path) -> None:
    stored = logprobs(a_model(tmp_path / "stored", DENSE, form="stored"))
    loaded = logprobs(a_model(tmp_path / "plain", DENSE, form="plain"), quantization="fp8")
    assert torch.equal(stored, loaded)


@pytest.mark.parametrize("config", [DENSE, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize("form", ["stored", "plain"])
def test_float8_products_are_within_the_rounding_of_the_activations(
    tmp_path: Path, config: dict[str, Any], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = a_model(tmp_path / form, config, form=form)
    expected = logprobs(model, quantization="fp8")
    monkeypatch.setattr(loading, "multiplies_float8", lambda device: True)  # as on a GPU, by the kernels' references
    error = (logprobs(model, quantization="fp8") - expected).abs()
    assert 0 < float(error.mean()) < 0.25, "log-probabilities here are of order 1 to 10"


def test_dummy_weights_of_quantised_config_are_quantised(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE | {"quantization_config": FP8}))
    engine = an_engine(tmp_path, load_format="dummy")
    assert engine.config()["envelope"]["quantization"] == "fp8"


def test_a_rank_reads_its_blocks_and_refuses_a_part_that_cuts_one(tmp_path: Path) -> None:
    source = open_model(str(a_model(tmp_path / "stored", DENSE, form="stored")))
    load = Loader(source, torch.float32, torch.device("cpu"), lambda count: None, Quantization(is_stored=True))
    name = "model.layers.0.mlp.gate_proj"
    whole = dequantize_blocks(source.tensor(name + ".weight"), source.tensor(name + ".weight_scale_inv"), torch.float32)
    x = torch.randn(3, 192, generator=torch.Generator().manual_seed(2))
    part = load.joined("model.layers.0.mlp.", {"gate_proj": (128, 320)})(x)
    torch.testing.assert_close(part, x @ whole[128:].t(), rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="split at 0 and 160, inside an fp8 block"):
        load.joined("model.layers.0.mlp.", {"gate_proj": (0, 160)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.layers.0.mlp.up_proj.weight_scale_inv": None}, "up_proj.weight is float8 without"),
        (
            {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(2, 2)},
            r"is \[2, 2\], config.json implies \[3, 2\]",
        ),
        ({"model.layers.0.mlp.up_proj.weight": torch.ones(320, 192)}, "has scales, but is torch.float32"),
        ({"model.norm.weight_scale_inv": torch.ones(1, 1)}, "does not use, first model.norm.weight_scale_inv"),
    ],
)
def test_scales_that_do_not_fit_are_named(tmp_path: Path, change: dict[str, torch.Tensor | None], words: str) -> None:
    model = a_model(tmp_path / "stored", DENSE, form="stored")
    source = open_model(str(model))
    weights = {name: source.tensor(name).clone() for name in source.shapes()}
    for name, tensor in change.items():
        weights.pop(name, None)
        weights |= {} if tensor is None else {name: tensor}
    save_file(weights, model / "model.safetensors")
    with pytest.raises(ModelError, match=words):
        an_engine(model)


def test_the_facts_count_a_byte_per_parameter_of_a_projection(tmp_path: Path) -> None:
    stored = model_facts(str(a_model(tmp_path / "stored", MIXTURE, form="stored")))
    plain = model_facts(str(a_model(tmp_path / "plain", MIXTURE, form="plain")))
    assert (stored["quantization"], plain["quantization"]) == ("fp8", None)
    assert stored["supported"]
    assert stored["weights_by_part"]["experts"] == round(plain["weights_by_part"]["experts"] / 2 * (1 + 4 / 128**2))
    assert stored["weights_by_part"]["embedding"] == plain["weights_by_part"]["embedding"]
    assert stored["weights_bytes"] == sum(stored["weights_by_part"].values())
    config = parse_model_config(MIXTURE, {}, "config.json")
    shapes = expected_shapes(config)
    count = sum(shape[0] * shape[1] for name, shape in shapes.items() if name.endswith("_proj.weight"))
    assert num_quantizable(expected_tensors(config)) == count
