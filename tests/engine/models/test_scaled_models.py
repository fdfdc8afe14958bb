"""compressed-tensors, AutoFP8 and ModelOpt checkpoints: weights equal to the packages' own dequantisation, and models
against their dequantised weights.
"""

import json
from pathlib import Path
from typing import Any

import engine_builders
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scaled_checkpoint import ScaledRecipe, store
from trimtab_engine.errors import ModelError
from trimtab_engine.layers.linear import library_for
from trimtab_engine.layers.moe import StackedExperts
from trimtab_engine.models.checkpoint import expected_shapes, expected_tensors
from trimtab_engine.models.decoder import load_attention, load_moe
from trimtab_engine.models.facts import model_facts
from trimtab_engine.models.loading import Loader
from trimtab_engine.models.registry import open_model, parse_model_config
from trimtab_engine.models.weight_memory import weight_memory_bytes
from trimtab_engine.parallel.groups import SINGLE_RANK
from trimtab_engine.parallel.ranks import Layout
from trimtab_engine.parallel.shard import shard_model
from trimtab_engine.weights.scaled import ScaledSource
from trimtab_engine.weights.source import WeightSource
from trimtab_modelspec.compressed_tensors import compressed_tensors
from trimtab_modelspec.tensors import num_quantizable

CPU = torch.device("cpu")
needs_compiled = pytest.mark.skipif(
    library_for(torch.float32, CPU) is None, reason="the operators are not compiled here"
)
GOLDEN = Path(__file__).parents[2] / "golden" / "compressed_tensors.safetensors"
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
FLOAT: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
INT: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
SMALL: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
GROUPS = {"strategy": "group", "group_size": 32}
BY_TENSOR, BY_CHANNEL = {"strategy": "tensor"}, {"strategy": "channel"}
RECIPES = {
    "FP8-dynamic": ScaledRecipe("float-quantized", FLOAT | BY_CHANNEL),
    "FP8": ScaledRecipe("naive-quantized", FLOAT | BY_TENSOR, has_input_scales=True),
    "FP8-block": ScaledRecipe("float-quantized", FLOAT | {"strategy": "block", "block_structure": [16, 32]}),
    "W8A8": ScaledRecipe("int-quantized", INT | BY_CHANNEL, dtype=torch.float32),
    "W8A8, with zero points": ScaledRecipe("int-quantized", INT | BY_CHANNEL | {"symmetric": False}),
    "W8A16": ScaledRecipe("pack-quantized", INT | BY_CHANNEL, activations=None),
    "W4A16": ScaledRecipe("pack-quantized", SMALL | GROUPS, activations=None),
    "W4A16, by channel": ScaledRecipe("pack-quantized", SMALL | BY_CHANNEL, activations=None),
    "W4A16, with zero points": ScaledRecipe("pack-quantized", SMALL | GROUPS | {"symmetric": False}, activations=None),
    "W4A16, in an order": ScaledRecipe("pack-quantized", SMALL | GROUPS | {"actorder": "group"}, activations=None),
    "AutoFP8": ScaledRecipe(
        "", FLOAT | BY_TENSOR, method="fp8", has_input_scales=True, dtype=torch.float32, ignore=("lm_head",)
    ),
    "ModelOpt": ScaledRecipe("", FLOAT | BY_TENSOR, method="modelopt", has_input_scales=True, dtype=torch.float32),
}
by_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
HELD = {
    "FP8-dynamic": ("e4m3", 1.0),
    "FP8": ("e4m3", 1.0),
    "FP8-block": None,
    "W8A8": ("Q8_0", 34 / 32),
    "W8A8, with zero points": None,
    "W8A16": ("Q8_0", 34 / 32),
    "W4A16": ("Q4_0", 18 / 32),
    "W4A16, by channel": ("Q4_0", 18 / 32),
    "W4A16, with zero points": ("zeros", 20 / 32),
    "W4A16, in an order": ("Q4_0", 18 / 32),
    "AutoFP8": ("e4m3", 1.0),
    "ModelOpt": ("e4m3", 1.0),
}
"""Return a matrix's format, and its bytes per number in memory; None if it is dequantised."""
MLP = "model.layers.0.mlp."


class Tensors:
    """A checkpoint of these, read from nowhere."""

    format = "safetensors"
    where = "config.json"
    config: dict[str, Any]
    generation_config: dict[str, Any]

    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        self._held = held
        self.config, self.generation_config = {}, {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._held.items()}

    def map_files(self) -> None: ...

    def tensor(
        self, name: str, *, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ) -> torch.Tensor:
        found = self._held[name] if rows is None else self._held[name][slice(*rows)]
        return found if columns is None else found[:, slice(*columns)]


def golden_cases() -> dict[str, Any]:
    with safe_open(GOLDEN, "pt") as file:
        cases: dict[str, Any] = json.loads(file.metadata()["cases"])
    return cases


@pytest.mark.parametrize("name", golden_cases())
def test_weights_are_what_the_package_itself_restores(name: str) -> None:
    """tests/engine/fakes/compressed_tensors_golden.py has had them made."""
    case, held = golden_cases()[name], load_file(GOLDEN)
    parts = {f"x.{key.partition('/')[2]}": tensor for key, tensor in held.items() if key.startswith(f"{name}/")}
    expected = parts.pop("x.restored")
    group = {"targets": ["Linear"], "weights": case["weights"]}
    form = compressed_tensors({"format": case["format"], "config_groups": {"group_0": group}}, "config.json")
    stored: WeightSource = Tensors(parts)
    source = ScaledSource(stored, form)
    assert source.shapes() == {"x.weight": (16, 64)}
    assert torch.equal(source.tensor("x.weight"), expected)
    assert torch.equal(source.tensor("x.weight", rows=(3, 13), columns=(5, 41)), expected[3:13, 5:41])
    blocks = source.blocks("x.weight", rows=(2, 15), columns=(32, 64))
    assert (blocks is None) == ("block" in name or ("zero points" in name and "4 bits" not in name))
    if blocks is not None:
        assert torch.equal(blocks.restored(), expected[2:15, 32:64])


def a_model(folder: Path, recipe: ScaledRecipe, words: dict[str, Any] = DENSE) -> Path:
    """Write one random model, quantised and, in `restored`, dequantised."""
    generator = torch.Generator().manual_seed(7)
    tensors = {
        name: torch.ones(shape) if name.endswith("norm.weight") else torch.randn(shape, generator=generator) * 0.2
        for name, shape in expected_shapes(parse_model_config(words, {}, "config.json")).items()
    }
    restored = store(tensors, recipe)
    for place, held, config in (
        (folder / "stored", tensors, words | {"quantization_config": recipe.config}),
        (folder / "restored", restored, words),
    ):
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps(config))
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, place / "model.safetensors")
    return folder / "stored"


def opened(model: Path) -> ScaledSource:
    source = open_model(str(model))
    assert isinstance(source, ScaledSource)
    return source


def a_loader(source: ScaledSource) -> Loader:
    return Loader(source, torch.float32, CPU, lambda count: None)


def check_model(folder: Path, recipe: ScaledRecipe, words: dict[str, Any], **changes: Any) -> None:
    """Log-probabilities within 1e-4, and 64 greedy tokens equal."""
    found, tokens = engine_builders.answer_of(a_model(folder, recipe, words), VOCABULARY, 64, **changes)
    expected, right = engine_builders.answer_of(folder / "restored", VOCABULARY, 64, **changes)
    actual, scale = torch.tensor(found), torch.tensor(expected).abs().max()
    assert float((actual - torch.tensor(expected)).abs().max() / scale) <= 1e-4
    assert tokens == right
    assert len(tokens) == 64


@by_recipe
def test_a_model_computes_what_its_weights_stand_for(tmp_path: Path, recipe: ScaledRecipe) -> None:
    check_model(tmp_path, recipe, DENSE)


@pytest.mark.parametrize("words", [MIXTURE, LATENT], ids=["softmax", "sigmoids"])
@pytest.mark.parametrize("name", ["FP8-dynamic", "W4A16, with zero points"])
def test_so_does_a_mixture_some_of_whose_modules_stay_as_they_are(
    tmp_path: Path, name: str, words: dict[str, Any]
) -> None:
    recipe = RECIPES[name]
    patterns = ("lm_head", "re:.*mlp.gate$", "re:.*self_attn.o_proj", "model.layers.1.mlp.experts.1.up_proj")
    ignoring = ScaledRecipe(recipe.storage, recipe.weights, patterns, recipe.activations)
    check_model(tmp_path, ignoring, words)
    source = opened(tmp_path / "stored")
    assert source.scheme_of("model.layers.1.self_attn.o_proj.weight") is None
    assert source.scheme_of("model.layers.1.mlp.experts.0.up_proj.weight") is not None


@needs_compiled
@pytest.mark.parametrize("name", RECIPES)
def test_matrices_are_held_as_small_as_the_products_take_them(tmp_path: Path, name: str) -> None:
    source, held = opened(a_model(tmp_path, RECIPES[name])), HELD[name]
    blocks = source.blocks(f"{MLP}up_proj.weight")
    tensors = expected_tensors(parse_model_config(DENSE, {}, "config.json"))
    small = num_quantizable(tensors)
    others = sum(tensor.num_elements for tensor in tensors.values()) - small
    counted = weight_memory_bytes(source, tensors, None, torch.float32, CPU)
    assert counted == 4 * others + round(small * (4 if held is None else held[1]))
    assert weight_memory_bytes(source, tensors, None, torch.bfloat16, CPU) == 2 * (small + others)
    if held is None:
        assert blocks is None
        return
    assert blocks is not None
    assert blocks.form.name == held[0]
    assert torch.equal(blocks.restored(), source.tensor(f"{MLP}up_proj.weight"))
    load, shard = a_loader(source), shard_model(parse_model_config(DENSE, {}, "config.json"), Layout(), 0)
    config = parse_model_config(DENSE, {}, "config.json")
    attention = load_attention(config, "model.layers.0.self_attn.", shard, SINGLE_RANK, load)
    assert attention.qkv.native is not None
    assert attention.qkv.native.weight.numel() * 4 == 128 * 64 * held[1]
    assert load.restored == []


@needs_compiled
def test_experts_are_multiplied_as_they_are_stored(tmp_path: Path) -> None:
    load = a_loader(opened(a_model(tmp_path, RECIPES["FP8-dynamic"], MIXTURE)))
    config = parse_model_config(MIXTURE, {}, "config.json")
    mixture = load_moe(config, "model.layers.0.mlp.", shard_model(config, Layout(), 0), SINGLE_RANK, load)
    assert not isinstance(mixture.experts, StackedExperts)
    for expert in mixture.experts:
        assert expert.gate_up.native is not None
        assert expert.gate_up.native.weight.numel() * 4 == 2 * 32 * 64


def test_ignored_projections_beside_quantised_ones_are_restored_and_named(tmp_path: Path) -> None:
    recipe = RECIPES["FP8-dynamic"]
    ignoring = ScaledRecipe(recipe.storage, recipe.weights, ("re:.*k_proj",))
    source = opened(a_model(tmp_path, ignoring))
    load, config = a_loader(source), parse_model_config(DENSE, {}, "config.json")
    shard = shard_model(config, Layout(), 0)
    load_attention(config, "model.layers.0.self_attn.", shard, SINGLE_RANK, load)
    if load.is_packed:
        assert load.restored == [f"model.layers.*.self_attn.{name}_proj.weight (float8 by channel)" for name in "qv"]
    tensors = expected_tensors(config)
    restored = sum(
        t.num_elements for name, t in tensors.items() if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
    )
    small = num_quantizable(tensors)
    others = sum(tensor.num_elements for tensor in tensors.values()) - small
    counted = weight_memory_bytes(source, tensors, None, torch.float32, CPU)
    assert counted == 4 * (others + small) - (3 * (small - restored) if load.is_packed else 0)


def test_several_groups_are_told_apart_by_their_targets(tmp_path: Path) -> None:
    """Names go before classes, as in compressed-tensors."""
    model = a_model(tmp_path, RECIPES["FP8-dynamic"])
    config = json.loads((model / "config.json").read_text())
    other = json.loads((a_model(tmp_path / "other", RECIPES["W4A16"]) / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    (small,) = other["quantization_config"]["config_groups"].values()
    groups["group_0"]["format"] = "float-quantized"
    groups["group_1"] = small | {"targets": ["re:.*down_proj"], "format": "pack-quantized"}
    config["quantization_config"]["format"] = "mixed-precision"
    (model / "config.json").write_text(json.dumps(config))
    tensors, packed = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "other" / "stored"))
    mixed = {name: held for name, held in tensors.items() if "down_proj" not in name}
    mixed |= {name: held for name, held in packed.items() if "down_proj" in name}
    save_file(mixed, model / "model.safetensors")
    source = opened(model)
    restored = open_model(str(tmp_path / "other" / "restored"))
    assert torch.equal(source.tensor(f"{MLP}down_proj.weight"), restored.tensor(f"{MLP}down_proj.weight"))
    assert source.form.words == "float8 by channel and int4 by group, activations as they are"


def test_a_text_half_is_known_by_the_names_that_its_whole_checkpoint_has(tmp_path: Path) -> None:
    words = DENSE | {"architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": 16, "sliding_window": None}
    model = a_model(tmp_path, RECIPES["W4A16"], words | {"layer_types": ["full_attention"] * 2})
    plain = open_model(str(tmp_path / "restored"))
    config = json.loads((model / "config.json").read_text())
    scheme = config.pop("quantization_config")
    scheme["config_groups"]["group_0"]["targets"] = ["re:language_model.model.layers"]
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config, "quantization_config": scheme}
    (model / "config.json").write_text(json.dumps(whole))
    tensors = load_file(model / "model.safetensors")
    tower = {"vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight": torch.ones(4, 4)}
    save_file({f"language_model.{name}": held for name, held in tensors.items()} | tower, model / "model.safetensors")
    source = opened(model)
    assert source.shapes() == plain.shapes()
    assert source.scheme_of(f"{MLP}up_proj.weight") is not None


@pytest.mark.parametrize("place", ["k_scale", "k_proj.k_scale", "attn.k_scale", "k_proj.output_scale"])
def test_scales_of_keys_are_found_wherever_tools_write_them(tmp_path: Path, place: str) -> None:
    model = a_model(tmp_path, RECIPES["FP8-dynamic"])
    change(model, {f"model.layers.0.self_attn.{place}": torch.tensor([0.25])})
    load = a_loader(opened(model))
    assert load.kv_scale("model.layers.0.self_attn.", "k") == 0.25
    assert load.kv_scale("model.layers.0.self_attn.", "v") == 1.0
    assert len(engine_builders.logprobs_of(model, VOCABULARY, kv_cache_dtype="fp8")) == 55


def test_modelopt_may_say_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    model = a_model(tmp_path, RECIPES["ModelOpt"])
    words = json.loads((model / "config.json").read_text())
    said = words.pop("quantization_config")
    (model / "config.json").write_text(json.dumps(words))
    (model / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": said["quant_algo"]}})
    )
    assert model_facts(str(model))["quantization"] == "modelopt"
    assert torch.equal(
        opened(model).tensor(f"{MLP}up_proj.weight"),
        open_model(str(tmp_path / "restored")).tensor(f"{MLP}up_proj.weight"),
    )


def change(model: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Rewrite a checkpoint with other tensors; None removes one."""
    tensors = load_file(model / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name, None)
        tensors |= {} if tensor is None else {name: tensor}
    save_file(tensors, model / "model.safetensors")


NAN8 = torch.full((96, 64), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("name", "part", "changed", "words"),
    [
        ("FP8-dynamic", "weight_scale", None, "up_proj.weight is float8 without .*up_proj.weight_scale"),
        ("FP8-dynamic", "weight_scale", torch.ones(95, 1), r"up_proj.weight_scale is \[95, 1\]; \[96, 1\] is needed"),
        ("FP8-dynamic", "weight_scale", torch.ones(1), r"is \[1\]; \[96, 1\] is needed \(float8 by channel\)"),
        ("FP8-dynamic", "weight_scale", torch.full((96, 1), torch.nan), "up_proj.weight_scale has scales that are NaN"),
        ("FP8-dynamic", "weight", NAN8, "up_proj.weight has NaN in it"),
        ("FP8-dynamic", "weight", torch.ones(96, 64), "up_proj.weight has scales, but is torch.float32"),
        ("FP8-dynamic", "weight", None, "up_proj.weight is missing, but .*up_proj.weight_scale exists"),
        ("AutoFP8", "weight_scale", torch.ones(2), r"up_proj.weight_scale is \[2\]; \[1\] is needed"),
        ("W8A8", "weight_scale", None, "up_proj.weight is int8 without"),
        ("W8A8, with zero points", "weight_zero_point", None, r"weight_zero_point is missing; \[96, 1\] is needed"),
        ("W4A16", "weight_scale", None, "up_proj.weight_scale is missing, but .*up_proj.weight_packed exists"),
        ("W4A16", "weight_shape", torch.tensor([96, 65]), r"weight_shape is \[96, 65\], but .* has \[96, 64\]"),
        ("W4A16", "weight_packed", torch.ones(96, 8), "up_proj.weight_packed is torch.float32, not torch.int32"),
        ("W4A16, in an order", "weight_g_idx", None, r"up_proj.weight_g_idx is missing; \[64\] is needed"),
        (
            "W4A16, in an order",
            "weight_g_idx",
            torch.full((64,), 2, dtype=torch.int32),
            "up_proj.weight_g_idx names groups 2 to 2; there are 2",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named(
    tmp_path: Path, name: str, part: str, changed: torch.Tensor | None, words: str
) -> None:
    model = a_model(tmp_path, RECIPES[name])
    change(model, {f"{MLP}up_proj.{part}": changed})
    with pytest.raises(ModelError, match=words):
        engine_builders.logprobs_of(model, VOCABULARY)


def test_a_module_that_no_group_names_but_has_scales_is_named(tmp_path: Path) -> None:
    model = a_model(tmp_path, RECIPES["FP8-dynamic"])
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:.*self_attn"]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"mlp.down_proj.weight_scale is stored, but no group .* as a target"):
        open_model(str(model))


@pytest.mark.parametrize("name", ["FP8-dynamic", "W4A16, with zero points", "AutoFP8"])
def test_the_facts_count_what_is_stored(tmp_path: Path, name: str) -> None:
    stored = model_facts(str(a_model(tmp_path, RECIPES[name])))
    plain = model_facts(str(tmp_path / "restored"))
    names = {"AutoFP8": "fp8-tensor"}
    assert (stored["quantization"], plain["quantization"]) == (names.get(name, "compressed-tensors"), None)
    assert stored["num_parameters"] == plain["num_parameters"]
    assert stored["weights_at_dtype"] == plain["weights_by_part"]
    assert "weights_at_dtype" not in plain
    files = load_file(tmp_path / "stored" / "model.safetensors")
    of_mlp = (held for key, held in files.items() if ".mlp." in key and "input_scale" not in key and "shape" not in key)
    nearly = sum(held.numel() * held.element_size() for held in of_mlp)
    assert stored["weights_by_part"]["dense_mlp"] == pytest.approx(nearly, abs=16)
    assert stored["weights_by_part"]["embedding"] == plain["weights_by_part"]["embedding"]


@needs_compiled
@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        (
            "FP8-dynamic",
            "float32",
            "weights: compressed-tensors, float8 by channel, activations as they are, multiplied in their stored",
        ),
        (
            "FP8-dynamic",
            "bfloat16",
            "weights: compressed-tensors, float8 by channel, activations as they are, restored to bfloat16",
        ),
        ("FP8-block", "float32", "weights: compressed-tensors, float8 by block, activations as they are, restored to"),
        ("AutoFP8", "float32", "weights: fp8-tensor, float8 by tensor, activations as they are, multiplied in"),
    ],
)
def test_an_engine_says_how_its_weights_are_held(
    tmp_path: Path, name: str, dtype: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = a_model(tmp_path, RECIPES[name])
    change(model, {"model.layers.0.self_attn.k_scale": torch.ones(1)})
    with caplog.at_level("INFO", logger="trimtab_engine.core"):
        engine = engine_builders.an_engine(
            model, load_format="auto", num_gpu_blocks_override=8, max_model_len=32, dtype=dtype
        )
    assert engine.config()["envelope"]["quantization"] == opened(model).form.name
    assert words in caplog.text
    assert "weights restored to" not in caplog.text
    assert "the checkpoint's key and value scales apply only to --kv-cache-dtype fp8" in caplog.text
