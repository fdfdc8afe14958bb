"""gpt-oss checkpoints with mxfp4 experts, against transformers' dequantised weights and their results."""

import json
from pathlib import Path
from typing import Any

import engine_builders
import pytest
import torch
from safetensors.torch import load_file, save_file
from scaled_checkpoint import store_in_mxfp4
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from trimtab_engine.errors import ModelError
from trimtab_engine.layers.linear import library_for
from trimtab_engine.layers.moe import StackedExperts
from trimtab_engine.models.checkpoint import expected_shapes, expected_tensors
from trimtab_engine.models.decoder import load_moe
from trimtab_engine.models.facts import model_facts
from trimtab_engine.models.loading import Loader
from trimtab_engine.models.registry import open_model, parse_model_config
from trimtab_engine.models.weight_memory import weight_memory_bytes
from trimtab_engine.parallel.groups import SINGLE_RANK
from trimtab_engine.parallel.ranks import Layout
from trimtab_engine.parallel.shard import shard_model
from trimtab_engine.weights.mxfp4 import Mxfp4Source

CPU = torch.device("cpu")
needs_compiled = pytest.mark.skipif(
    library_for(torch.float32, CPU) is None, reason="the operators are not compiled here"
)
VOCABULARY, HIDDEN, WIDE, EXPERTS = 97, 64, 96, 4
CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 13,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "torch_dtype": "bfloat16",
}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
FIRST = "model.layers.0.mlp.experts."


def a_model(folder: Path) -> Path:
    """Write the published format, and in `restored` transformers' dequantised one."""
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: torch.ones(shape) if name.endswith("norm.weight") else torch.randn(shape, generator=generator) * 0.2
        for name, shape in expected_shapes(parse_model_config(CONFIG, {}, "config.json")).items()
    }
    restored = dict(tensors)
    store_in_mxfp4(tensors)
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
        restored[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for place, held, config in (
        (folder / "stored", tensors, CONFIG | {"quantization_config": MXFP4}),
        (folder / "restored", restored, CONFIG),
    ):
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(config))
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, place / "model.safetensors")
    return folder / "stored"


def opened(model: Path) -> Mxfp4Source:
    source = open_model(str(model))
    assert isinstance(source, Mxfp4Source)
    return source


def change(model: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Rewrite a checkpoint with other tensors; None removes one."""
    tensors = load_file(model / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name, None)
        tensors |= {} if tensor is None else {name: tensor}
    save_file(tensors, model / "model.safetensors")


def test_experts_are_what_transformers_restores_bit_for_bit(tmp_path: Path) -> None:
    source, restored = opened(a_model(tmp_path)), open_model(str(tmp_path / "restored"))
    assert source.shapes() == restored.shapes()
    for name in restored.shapes():
        assert torch.equal(source.tensor(name), restored.tensor(name))
    name = f"{FIRST}gate_up_proj"
    assert torch.equal(source.tensor(name, rows=(1, 3)), restored.tensor(name)[1:3])
    blocks = source.expert_blocks(f"{FIRST}down_proj", 2, (32, 96))
    assert blocks is not None
    assert torch.equal(blocks.restored(), restored.tensor(f"{FIRST}down_proj")[2, 32:96].t())
    assert source.expert_blocks(f"{FIRST}down_proj", 2, (16, 96)) is None


def test_blocks_may_be_stored_without_their_last_dimension_apart(tmp_path: Path) -> None:
    model, name = a_model(tmp_path), f"{FIRST}down_proj"
    expected = opened(model).tensor(name)
    change(model, {f"{name}_blocks": opened(model)._stored.tensor(f"{name}_blocks").flatten(2).clone()})
    assert torch.equal(opened(model).tensor(name), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_published_model_computes_what_its_experts_stand_for(tmp_path: Path, dtype: str) -> None:
    found, tokens = engine_builders.answer_of(a_model(tmp_path), VOCABULARY, 64, dtype=dtype)
    expected, right = engine_builders.answer_of(tmp_path / "restored", VOCABULARY, 64, dtype=dtype)
    wanted = torch.tensor(expected)
    assert float((torch.tensor(found) - wanted).abs().max() / wanted.abs().max()) <= 1e-4
    assert tokens == right
    assert len(tokens) == 64


@needs_compiled
def test_experts_are_held_in_four_bits_and_a_half(tmp_path: Path) -> None:
    source, config = opened(a_model(tmp_path)), parse_model_config(CONFIG, {}, "config.json")
    load = Loader(source, torch.float32, CPU, lambda count: None)
    mixture = load_moe(config, "model.layers.0.mlp.", shard_model(config, Layout(), 0), SINGLE_RANK, load)
    assert not isinstance(mixture.experts, StackedExperts)
    sizes = [[product.native.weight.numel() * 4 for product in (mlp.gate_up, mlp.down) if product.native]
             for mlp in mixture.experts]  # fmt: skip
    assert sizes == [[2 * WIDE * HIDDEN * 18 // 32, WIDE * HIDDEN * 18 // 32]] * EXPERTS
    assert load.restored == []


@needs_compiled
def test_the_bytes_before_loading_are_those_that_are_held(tmp_path: Path) -> None:
    """Three ranks have 32 inputs of a down projection each, two 48, which cut a block."""
    source, config = opened(a_model(tmp_path)), parse_model_config(CONFIG, {}, "config.json")
    tensors = expected_tensors(config)
    numbers = {name: 2 * EXPERTS * WIDE * HIDDEN * count for name, count in (("gate_up", 2), ("down", 1))}
    others = sum(held.num_elements for held in tensors.values()) - sum(numbers.values())
    held = weight_memory_bytes(source, tensors, None, torch.float32, CPU)
    assert held == 4 * others + sum(numbers.values()) * 18 // 32
    assert weight_memory_bytes(source, tensors, None, torch.bfloat16, CPU) == 2 * (others + sum(numbers.values()))
    second = shard_model(config, Layout(tensor=2), 1)
    cut = weight_memory_bytes(source, tensors, None, torch.float32, CPU, config=config, shard=second)
    assert cut == 4 * (others + numbers["down"]) + numbers["gate_up"] * 18 // 32
    moving = shard_model(config, Layout(tensor=2, expert=True), 0, num_redundant_experts=0)
    held = weight_memory_bytes(source, tensors, None, torch.float32, CPU, config=config, shard=moving)
    assert held == 4 * (others + sum(numbers.values()))


def test_powers_of_two_that_float16_does_not_hold_are_restored(tmp_path: Path) -> None:
    model, name = a_model(tmp_path), f"{FIRST}down_proj"
    scales = opened(model)._stored.tensor(f"{name}_scales").clone()
    scales[1, 5, 0] = 100
    change(model, {f"{name}_scales": scales})
    source = opened(model)
    assert source.expert_blocks(name, 0) is not None
    assert source.expert_blocks(name, 1) is None
    load = Loader(source, torch.float32, CPU, lambda count: None)
    restored = load.stacked_expert(name, 1)
    assert isinstance(restored, torch.Tensor)
    assert torch.equal(restored, source.tensor(name)[1].t())
    if load.is_packed:
        assert load.restored == ["model.layers.*.mlp.experts.down_proj (mxfp4)"]


@pytest.mark.parametrize(
    ("part", "changed", "words"),
    [
        ("scales", None, r"down_proj_scales is missing; \[4, 64, 3\] is needed with .*down_proj_blocks"),
        ("scales", torch.ones(4, 64, 2).byte(), r"down_proj_scales is \[4, 64, 2\]; \[4, 64, 3\] is needed"),
        ("scales", torch.full((4, 64, 3), 255, dtype=torch.uint8), "down_proj_scales has scales that are NaN"),
        ("scales", torch.ones(4, 64, 3), "down_proj_scales is torch.float32, not torch.uint8"),
        (
            "blocks",
            torch.ones(4, 64, 3, 8).byte(),
            r"_blocks is \[4, 64, 3, 8\]; \[experts, out, in / 32, 16\] is needed",
        ),
        ("blocks", None, "does not use, first .*down_proj_scales|lack 1 tensors, first .*experts.down_proj"),
    ],
)
def test_parts_that_do_not_fit_are_named(tmp_path: Path, part: str, changed: torch.Tensor | None, words: str) -> None:
    model = a_model(tmp_path)
    change(model, {f"{FIRST}down_proj_{part}": changed})
    with pytest.raises(ModelError, match=words):
        engine_builders.logprobs_of(model, VOCABULARY)


def test_the_facts_count_experts_as_they_are_stored(tmp_path: Path) -> None:
    stored = model_facts(str(a_model(tmp_path)))
    plain = model_facts(str(tmp_path / "restored"))
    assert (stored["quantization"], stored["supported"]) == ("mxfp4", True)
    files = load_file(tmp_path / "stored" / "model.safetensors")
    packed = sum(held.numel() for name, held in files.items() if name.endswith(("_blocks", "_scales")))
    biases = sum(held.numel() for name, held in files.items() if name.endswith("proj_bias"))
    assert stored["weights_by_part"]["experts"] == packed + 2 * biases
    assert stored["weights_at_dtype"] == plain["weights_by_part"]
    for part in ("attention", "kv_projection", "embedding", "lm_head", "replicated"):
        assert stored["weights_by_part"][part] == plain["weights_by_part"][part]


@needs_compiled
@pytest.mark.parametrize(
    ("dtype", "words"),
    [("float32", "multiplied in their stored format"), ("bfloat16", "restored to bfloat16 while loading")],
)
def test_an_engine_says_how_experts_are_held(
    tmp_path: Path, dtype: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = a_model(tmp_path)
    with caplog.at_level("INFO", logger="trimtab_engine.core"):
        engine = engine_builders.an_engine(
            model, load_format="auto", num_gpu_blocks_override=16, max_model_len=32, dtype=dtype
        )
    assert engine.config()["envelope"]["quantization"] == "mxfp4"
    assert f"weights: mxfp4, 4 bits, experts only, {words}" in caplog.text


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_other_families_in_mxfp4_are_refused_by_name(architecture: str) -> None:
    words = CONFIG | {"architectures": [architecture], "num_experts": 4, "moe_intermediate_size": 32}
    with pytest.raises(ModelError, match=f"quant_method 'mxfp4' is not supported for {architecture}, only for gpt-oss"):
        parse_model_config(words | {"quantization_config": MXFP4}, {}, "config.json")
