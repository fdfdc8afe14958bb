"""AWQ and GPTQ checkpoints, quantised by the tests, against their dequantised weights."""

import json
from pathlib import Path
from typing import Any

import engine_builders
import pytest
import torch
from four_bit_checkpoint import Recipe, quantise, quantised
from safetensors.torch import load_file, save_file
from trimtab_engine.errors import ModelError
from trimtab_engine.layers.linear import library_for
from trimtab_engine.layers.moe import StackedExperts
from trimtab_engine.models.checkpoint import expected_shapes, expected_tensors
from trimtab_engine.models.decoder import head_rows, load_attention, load_mlp, load_moe
from trimtab_engine.models.facts import model_facts
from trimtab_engine.models.loading import Loader, packed_source
from trimtab_engine.models.registry import open_model, parse_model_config
from trimtab_engine.models.weight_memory import weight_memory_bytes
from trimtab_engine.parallel.groups import SINGLE_RANK
from trimtab_engine.parallel.ranks import Layout
from trimtab_engine.parallel.shard import shard_model
from trimtab_engine.weights.four_bits import FourBitsSource
from trimtab_kernels.native.quantised import QuantisedBlocks
from trimtab_modelspec.four_bit_format import FourBits
from trimtab_modelspec.quantization import Quantization
from trimtab_modelspec.tensors import num_quantizable

CPU = torch.device("cpu")
needs_compiled = pytest.mark.skipif(
    library_for(torch.float32, CPU) is None, reason="the operators are not compiled here"
)
VOCABULARY = 97
DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
MIXTURE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LATENT = {key: value for key, value in DENSE.items() if key != "head_dim"} | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
WINDOWS = DENSE | {
    "architectures": ["Gemma3ForCausalLM"],
    "query_pre_attn_scalar": 16,
    "sliding_window": 13,
    "layer_types": ["sliding_attention", "full_attention"],
}
RECIPES = {
    "awq": Recipe("awq"),
    "awq, groups of two blocks, the last not whole": Recipe("awq", group_size=64),
    "awq, one group": Recipe("awq", group_size=-1),
    "awq, groups of half a block": Recipe("awq", group_size=16),
    "gptq": Recipe("gptq"),
    "gptq, symmetric": Recipe("gptq", is_symmetric=True, has_biases=True),
    "gptq, zero points as they are": Recipe("gptq", checkpoint_format="gptq_v2"),
    "gptq, in an order of its own": Recipe("gptq", is_ordered=True),
    "gptq, in several orders": Recipe("gptq", is_ordered=True, is_symmetric=True, shares_orders=False),
    "gptq, one group": Recipe("gptq", group_size=-1, is_symmetric=True),
}
by_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
MLP = "model.layers.0.mlp."


def a_model(folder: Path, recipe: Recipe, words: dict[str, Any] = DENSE) -> Path:
    """Write one random model, quantised and, in `restored`, dequantised."""
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: torch.ones(shape) if name.endswith("norm.weight") else torch.randn(shape, generator=generator) * 0.2
        for name, shape in expected_shapes(parse_model_config(words, {}, "config.json")).items()
    }
    restored = quantise(tensors, recipe)
    for place, held, config in (
        (folder / "stored", tensors, words | {"quantization_config": recipe.config}),
        (folder / "restored", restored, words),
    ):
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(config))
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, place / "model.safetensors")
    return folder / "stored"


def opened(model: Path) -> FourBitsSource:
    source = open_model(str(model))
    assert isinstance(source, FourBitsSource)
    return source


def a_loader(source: FourBitsSource) -> Loader:
    return Loader(source, torch.float32, CPU, lambda count: None)


def logprobs(model: Path, **changes: Any) -> torch.Tensor:
    """Return logits of one prompt's own tokens, in chunks, and of the tokens after it."""
    return torch.tensor(engine_builders.logprobs_of(model, VOCABULARY, **changes))


@by_recipe
@pytest.mark.parametrize("words", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_a_model_computes_what_its_weights_stand_for(tmp_path: Path, recipe: Recipe, words: dict[str, Any]) -> None:
    found = logprobs(a_model(tmp_path, recipe, words))
    expected = logprobs(tmp_path / "restored")
    assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-4
    assert expected.std() > 0.5, "log-probabilities that say something"


@pytest.mark.parametrize("words", [LATENT, WINDOWS], ids=["latent", "windows"])
@pytest.mark.parametrize("recipe", [RECIPES["awq"], RECIPES["gptq, in an order of its own"]], ids=["awq", "gptq"])
def test_families_with_layers_of_their_own_do_too(tmp_path: Path, recipe: Recipe, words: dict[str, Any]) -> None:
    found = logprobs(a_model(tmp_path, recipe, words))
    expected = logprobs(tmp_path / "restored")
    assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-4


@by_recipe
def test_restored_weights_and_parts_of_them_are_bit_for_bit(tmp_path: Path, recipe: Recipe) -> None:
    source = opened(a_model(tmp_path, recipe))
    for name, tensor in open_model(str(tmp_path / "restored")).shapes().items():
        assert source.shapes()[name] == tensor
    name = f"{MLP}down_proj.weight"  # [64, 96]
    whole = open_model(str(tmp_path / "restored")).tensor(name)
    for rows, columns in ((None, None), ((8, 40), None), (None, (32, 96)), ((3, 61), (5, 91)), ((0, 1), (95, 96))):
        expected = whole[slice(*(rows or (0, 64))), slice(*(columns or (0, 96)))]
        assert torch.equal(source.tensor(name, rows=rows, columns=columns), expected)


@needs_compiled
@by_recipe
def test_blocks_stand_for_the_same_bit_for_bit_or_are_none(tmp_path: Path, recipe: Recipe) -> None:
    source, name = opened(a_model(tmp_path, recipe)), f"{MLP}down_proj.weight"
    for rows, columns in ((None, None), ((8, 40), (32, 96))):
        blocks = source.blocks(name, rows=rows, columns=columns)
        if recipe.group_size == 16 or (recipe.is_ordered and columns is not None):
            assert blocks is None
            continue
        assert blocks is not None
        assert (blocks.order is not None) == recipe.is_ordered
        assert blocks.form.name == ("Q4_0" if recipe.is_symmetric else "zeros")
        assert torch.equal(blocks.restored(), source.tensor(name, rows=rows, columns=columns))
    assert source.blocks(name, columns=(0, 48)) is None
    assert source.blocks("model.norm.weight") is None


def test_scales_that_float16_does_not_hold_are_restored(tmp_path: Path) -> None:
    model = a_model(tmp_path, Recipe("awq"))
    source = opened(model)
    name = f"{MLP}up_proj"
    stored = open_model(str(tmp_path / "restored"))
    assert source.blocks(f"{name}.weight") is not None
    change(model, {f"{name}.scales": torch.full((2, 96), 1e-9)})
    assert opened(model).blocks(f"{name}.weight") is None
    assert opened(model).blocks(f"{MLP}gate_proj.weight") is not None
    assert torch.equal(source.tensor(f"{MLP}gate_proj.weight"), stored.tensor(f"{MLP}gate_proj.weight"))


def change(model: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Rewrite a checkpoint with other tensors; None removes one."""
    tensors = load_file(model / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name, None)
        tensors |= {} if tensor is None else {name: tensor}
    save_file(tensors, model / "model.safetensors")


@needs_compiled
@pytest.mark.parametrize("recipe", [RECIPES["awq"], RECIPES["gptq, symmetric"]], ids=["awq", "gptq"])
def test_ranks_parts_are_parts_of_the_whole(tmp_path: Path, recipe: Recipe) -> None:
    load = a_loader(opened(a_model(tmp_path, recipe)))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    rows = {"q_proj": (0, 64), "k_proj": (0, 32), "v_proj": (0, 32)}
    whole = load.joined("model.layers.0.self_attn.", rows, pairs=16)(x)
    halves = [{"q_proj": (32 * i, 32 * i + 32), "k_proj": (16 * i, 16 * i + 16)} for i in (0, 1)]
    parts = [load.joined("model.layers.0.self_attn.", half, pairs=16)(x) for half in halves]
    assert torch.equal(torch.cat([part[:, :32] for part in parts], dim=1), whole[:, :64])
    assert torch.equal(torch.cat([part[:, 32:] for part in parts], dim=1), whole[:, 64:96])


@needs_compiled
@pytest.mark.parametrize(
    ("recipe", "block_bytes"),
    [
        (Recipe("awq"), 20),
        (Recipe("gptq", is_symmetric=True), 18),
        (Recipe("gptq", is_symmetric=True, is_ordered=True), 18),
        (Recipe("gptq", group_size=16), None),
    ],
)
def test_the_bytes_before_loading_are_those_that_are_held(
    tmp_path: Path, recipe: Recipe, block_bytes: int | None
) -> None:
    source = opened(a_model(tmp_path, recipe))
    tensors = expected_tensors(parse_model_config(DENSE, {}, "config.json"))
    small = num_quantizable(tensors)
    others = sum(tensor.num_elements for tensor in tensors.values()) - small
    held = weight_memory_bytes(source, tensors, None, torch.float32, CPU)
    assert held == 4 * others + (4 * small if block_bytes is None else small * block_bytes // 32)
    assert weight_memory_bytes(source, tensors, None, torch.bfloat16, CPU) == 2 * (small + others)
    if block_bytes is not None:
        assert bytes_of(a_loader(source), DENSE) == held - 4 * others


def bytes_of(load: Loader, words: dict[str, Any]) -> int:
    """Return the total memory of one rank's matmul weights."""
    config, total = parse_model_config(words, {}, "config.json"), 0
    shard = shard_model(config, Layout(), 0)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        attention = load_attention(config, prefix + "self_attn.", shard, SINGLE_RANK, load)
        mlp = load_mlp(config, prefix + "mlp.", shard, SINGLE_RANK, load)
        for product in (attention.qkv, attention.output, mlp.gate_up, mlp.down):
            assert product.native is not None
            total += product.native.weight.numel() * 4
    return total


@needs_compiled
def test_projections_in_several_orders_count_as_restored(tmp_path: Path) -> None:
    source = opened(a_model(tmp_path, RECIPES["gptq, in several orders"]))
    tensors = expected_tensors(parse_model_config(DENSE, {}, "config.json"))
    together = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
    restored = sum(held.num_elements for name, held in tensors.items() if name.endswith(together))
    small = num_quantizable(tensors)
    others = sum(tensor.num_elements for tensor in tensors.values()) - small
    held = weight_memory_bytes(source, tensors, None, torch.float32, CPU)
    assert held == 4 * (others + restored) + (small - restored) * 18 // 32
    load = a_loader(source)
    assert bytes_of(load, DENSE) == held - 4 * others
    assert load.restored == [
        *(f"2 x model.layers.*.mlp.{name}_proj.weight (gptq)" for name in ("gate", "up")),
        *(f"2 x model.layers.*.self_attn.{name}_proj.weight (gptq)" for name in ("k", "q", "v")),
    ]


@needs_compiled
@pytest.mark.parametrize(
    ("recipe", "is_restored"),
    [(Recipe("awq"), ("down_proj",)), (Recipe("gptq", is_symmetric=True, is_ordered=True), ("down_proj", "o_proj"))],
    ids=["awq", "in an order of its own"],
)
def test_restored_parts_of_a_rank_are_counted_as_restored(
    tmp_path: Path, recipe: Recipe, is_restored: tuple[str, ...]
) -> None:
    """Of 96 columns of the down projection each of two ranks gets 48, which splits a block; with a custom column order
    every part of a row does.
    """
    source = opened(a_model(tmp_path, recipe))
    config = parse_model_config(DENSE, {}, "config.json")
    tensors = expected_tensors(config)
    size = 18 if recipe.is_symmetric else 20
    cut = sum(held.num_elements for name, held in tensors.items() if name.removesuffix(".weight").endswith(is_restored))
    small = num_quantizable(tensors)
    others = sum(tensor.num_elements for tensor in tensors.values()) - small
    for rank in (0, 1):
        shard = shard_model(config, Layout(tensor=2), rank)
        held = weight_memory_bytes(source, tensors, None, torch.float32, CPU, config=config, shard=shard)
        assert held == 4 * (others + cut) + (small - cut) * size // 32
        load = a_loader(source)
        for name, columns in (("mlp.down_proj", shard.mlp), ("self_attn.o_proj", head_rows(shard.heads, 16))):
            part = load.part_of_sum(f"model.layers.0.{name}", columns).native
            assert part is not None
            each = 4 if name.endswith(is_restored) else size / 32
            assert part.weight.numel() * 4 == 64 * (columns[1] - columns[0]) * each
        named = {name.split(".")[-2] for name in load.restored}
        assert named == {*is_restored}


@needs_compiled
def test_experts_are_counted_as_they_are_held(tmp_path: Path) -> None:
    source = opened(a_model(tmp_path, Recipe("awq"), MIXTURE))
    tensors = expected_tensors(parse_model_config(MIXTURE, {}, "config.json"))
    experts = sum(tensor.num_elements for tensor in tensors.values() if tensor.part == "experts")
    small = num_quantizable(tensors)
    others = sum(tensor.num_elements for tensor in tensors.values()) - small
    assert weight_memory_bytes(source, tensors, None, torch.float32, CPU) == 4 * others + small * 20 // 32
    config = parse_model_config(MIXTURE, {}, "config.json")
    moving_ones = shard_model(config, Layout(tensor=2, expert=True), 0, num_redundant_experts=0)
    moving = weight_memory_bytes(source, tensors, None, torch.float32, CPU, config=config, shard=moving_ones)
    assert moving == 4 * (others + experts) + (small - experts) * 20 // 32


@needs_compiled
@pytest.mark.parametrize("words", [MIXTURE, LATENT], ids=["softmax", "sigmoids"])
def test_experts_are_multiplied_in_blocks(tmp_path: Path, words: dict[str, Any]) -> None:
    load = a_loader(opened(a_model(tmp_path, Recipe("awq"), words)))
    config = parse_model_config(words, {}, "config.json")
    layer = next(layer for layer in range(config.num_layers) if config.is_moe_layer(layer))
    shard = shard_model(config, Layout(), 0)
    mixture = load_moe(config, f"model.layers.{layer}.mlp.", shard, SINGLE_RANK, load)
    assert not isinstance(mixture.experts, StackedExperts)
    assert len(mixture.experts) == len(shard.experts)
    for expert in mixture.experts:
        wide, down = expert.gate_up.native, expert.down.native
        assert wide is not None
        assert down is not None
        assert wide.weight.numel() * 4 == 2 * 32 * 64 * 20 // 32
        assert down.weight.numel() * 4 == 64 * 32 * 20 // 32


def test_fp8_that_was_asked_for_is_made_of_what_the_integers_stand_for(tmp_path: Path) -> None:
    model = a_model(tmp_path, Recipe("awq"))
    assert packed_source(opened(model), torch.float32, CPU, Quantization(is_stored=False)) is None
    assert torch.equal(logprobs(model, quantization="fp8"), logprobs(tmp_path / "restored", quantization="fp8"))


@needs_compiled
def test_an_output_layer_in_four_bits_is_multiplied_so(tmp_path: Path) -> None:
    recipe = Recipe("gptq", is_symmetric=True)
    source = opened(a_model(tmp_path, recipe, DENSE | {"vocab_size": 96}))
    assert not isinstance(a_loader(source).vocabulary("lm_head.weight", rows=None), QuantisedBlocks)
    plain = source.tensor("model.embed_tokens.weight")
    made, stands_for = quantised(plain, recipe, torch.Generator().manual_seed(1))
    change(tmp_path / "stored", {"lm_head.weight": None, **{f"lm_head.{part}": held for part, held in made.items()}})
    table = a_loader(opened(tmp_path / "stored")).vocabulary("lm_head.weight", rows=(8, 96))
    assert isinstance(table, QuantisedBlocks)
    assert torch.equal(table.restored(), stands_for[8:96])


@pytest.mark.parametrize(
    ("part", "changed", "words"),
    [
        ("qzeros", None, r"up_proj.qzeros is missing; \[2, 12\] is needed with qweight"),
        ("scales", torch.ones(3, 96), r"up_proj.scales is \[3, 96\]; \[2, 96\] is needed"),
        ("g_idx", torch.zeros(63, dtype=torch.int32), r"up_proj.g_idx is \[63\]; \[64\] is needed"),
        ("g_idx", torch.full((64,), 2, dtype=torch.int32), "up_proj.g_idx names groups 2 to 2; there are 2"),
        ("g_idx", torch.full((64,), -1, dtype=torch.int32), "up_proj.g_idx names groups -1 to -1; there are 2"),
        ("bias", torch.ones(96), "does not use, first model.layers.0.mlp.up_proj.bias"),
        ("weight", torch.ones(96, 64, dtype=torch.int32), "up_proj.weight is I32; only"),
    ],
)
def test_parts_that_do_not_fit_are_named(tmp_path: Path, part: str, changed: torch.Tensor | None, words: str) -> None:
    model = a_model(tmp_path, Recipe("gptq"))
    change(model, {f"{MLP}up_proj.{part}": changed})
    with pytest.raises(ModelError, match=words):
        logprobs(model)


@pytest.mark.parametrize("recipe", [Recipe("awq"), Recipe("gptq", group_size=-1)], ids=["awq", "gptq"])
def test_the_facts_count_what_is_stored(tmp_path: Path, recipe: Recipe) -> None:
    stored = model_facts(str(a_model(tmp_path, recipe)))
    plain = model_facts(str(tmp_path / "restored"))
    assert (stored["quantization"], plain["quantization"]) == (recipe.method, None)
    assert stored["num_parameters"] == plain["num_parameters"]
    factor = FourBits(recipe.method, None if recipe.group_size == -1 else 32).weight_bytes / 4
    for part in ("attention", "kv_projection", "dense_mlp"):
        assert stored["weights_by_part"][part] == round(plain["weights_by_part"][part] * factor)
    assert stored["weights_by_part"]["embedding"] == plain["weights_by_part"]["embedding"]


@needs_compiled
@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Recipe("awq"), "weights: awq, 4 bits, multiplied in their stored format"),
        (Recipe("gptq", is_ordered=True), "weights: gptq, 4 bits, multiplied in their stored format"),
        (Recipe("gptq", group_size=16), "weights: gptq, 4 bits, restored to float32 while loading"),
    ],
    ids=["awq", "gptq", "groups of 16"],
)
def test_an_engine_says_how_its_weights_are_held(
    tmp_path: Path, recipe: Recipe, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="trimtab_engine.core"):
        engine = engine_builders.an_engine(
            a_model(tmp_path, recipe), load_format="auto", num_gpu_blocks_override=8, max_model_len=32
        )
    assert engine.config()["envelope"]["quantization"] == recipe.method
    assert words in caplog.text
