"""GGUF files in the format of llama.cpp's converter, against the original checkpoint."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import engine_builders
import gguf
import numpy
import pytest
import torch
from safetensors.torch import save_file
from trimtab_engine.cli.facts_table import bytes_on_disk
from trimtab_engine.errors import ModelError
from trimtab_engine.models.checkpoint import check_tensors, expected_shapes
from trimtab_engine.models.pooler import pooling_of
from trimtab_engine.models.registry import GGUF_NAMES, open_model, parse_model_config
from trimtab_engine.weights.gguf_file import GLOBAL_NAMES, ROPE_FREQUENCIES, GgufSource
from trimtab_engine.weights.packing import Packing
from trimtab_modelspec.config import ModelConfig

VOCABULARY, HEAD = 97, 16
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HEAD, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 5000.0, "eos_token_id": 7,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"architectures": ["LlamaForCausalLM"], "attention_bias": True}),
    "llama 3.1": ("llama", {"architectures": ["LlamaForCausalLM"], "rope_scaling": LLAMA3}),
    "llama yarn": ("llama", {"architectures": ["LlamaForCausalLM"], "rope_scaling": YARN}),
    "qwen2": ("qwen2", {"architectures": ["Qwen2ForCausalLM"]}),
    "qwen3": ("qwen3", {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}),
    "qwen3moe": (
        "qwen3moe",
        {
            "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 5, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "norm_topk_prob": True,
        },
    ),
    "gemma3": (
        "gemma3",
        {
            "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7, "sliding_window": 13,
            "query_pre_attn_scalar": HEAD, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
}  # fmt: skip


def a_checkpoint(folder: Path, words: Mapping[str, Any]) -> tuple[Path, dict[str, torch.Tensor]]:
    """Random weights; norms are near the identity: 1, or 0 for norms stored as weight minus 1."""
    config, generator = SIZES | dict(words), torch.Generator().manual_seed(0)
    parsed = parse_model_config(config, {}, "config.json")
    tensors = {}
    for name, shape in expected_shapes(parsed).items():
        spread, middle = (0.1, 1 - parsed.norm_offset) if name.endswith("norm.weight") else (0.2, 0.0)
        tensors[name] = torch.randn(shape, generator=generator) * spread + middle
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder, tensors


def a_writer(file: Path, kind: str, config: Mapping[str, Any], **options: Any) -> gguf.GGUFWriter:
    """Write a file with the converter's metadata."""
    writer = gguf.GGUFWriter(file, kind, **options)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_eos_token_id(config["eos_token_id"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
    if "original_max_position_embeddings" in scaling and scaling["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    return writer


def divisors(theta: float, scaling: Mapping[str, Any]) -> numpy.ndarray:
    """Llama 3.1's model card, for each frequency by itself, as the converter writes them."""
    original, found = scaling["original_max_position_embeddings"], []
    for place in range(0, HEAD, 2):
        length = 2 * math.pi * theta ** (place / HEAD)
        smooth = (original / length - scaling["low_freq_factor"]) / (
            scaling["high_freq_factor"] - scaling["low_freq_factor"]
        )
        if length < original / scaling["high_freq_factor"]:
            found.append(1.0)
        elif length > original / scaling["low_freq_factor"]:
            found.append(scaling["factor"])
        else:
            found.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return numpy.array(found, dtype=numpy.float32)


def stored(kind: str, name: str, tensor: torch.Tensor) -> numpy.ndarray:
    """Adjacent rotary pairs, and norms with the architecture's offset."""
    part = name.split(".")[-2]
    if GGUF_NAMES[kind].has_adjacent_pairs and part in ("q_proj", "k_proj"):
        tensor = tensor.view(-1, 2, HEAD // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    if kind == "gemma3" and name.endswith("norm.weight"):
        tensor = tensor + 1
    array: numpy.ndarray = tensor.contiguous().numpy()
    return array


def with_experts_together(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A projection of all experts of a layer in one tensor, under the name of one with {} for the number."""
    together: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        together.setdefault(re.sub(r"(?<=experts\.)\d+", "{}", name), []).append(tensor)
    return {name: torch.stack(held) if "{}" in name else held[0] for name, held in together.items()}


def write(writer: gguf.GGUFWriter) -> None:
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()


def a_gguf(file: Path, case: str, **options: Any) -> Path:
    """Write the checkpoint and the GGUF file; return the checkpoint."""
    kind, words = CHECKPOINTS[case]
    folder, tensors = a_checkpoint(file.parent / "plain", words)
    config = SIZES | words
    writer = a_writer(file, kind, config, **options)
    names = GGUF_NAMES[kind]
    ours = {theirs: name for name, theirs in {**names.layers, **names.experts}.items()}
    for name, tensor in with_experts_together(tensors).items():
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        module, _, what = rest.rpartition(".")
        outer = next((short for short, theirs in GLOBAL_NAMES.items() if theirs == name), None)
        writer.add_tensor(outer or f"blk.{layer}.{ours[module]}.{what}", stored(kind, name, tensor))
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        writer.add_tensor(ROPE_FREQUENCIES, divisors(config["rope_theta"], scaling))
    write(writer)
    return folder


def logprobs(model: Path) -> torch.Tensor:
    return torch.tensor(engine_builders.logprobs_of(model, VOCABULARY, num_gpu_blocks_override=64))


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_file_computes_what_its_checkpoint_computes(tmp_path: Path, case: str) -> None:
    folder = a_gguf(tmp_path / "model.gguf", case)
    source = open_model(str(tmp_path / "model.gguf"))
    check_tensors(parse_model_config(source.config, source.generation_config, source.where), source)
    torch.testing.assert_close(logprobs(tmp_path / "model.gguf"), logprobs(folder), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_its_configuration_is_that_of_its_checkpoint(tmp_path: Path, case: str) -> None:
    folder = a_gguf(tmp_path / "model.gguf", case)
    found, expected = (
        parse_model_config(source.config, source.generation_config, source.where)
        for source in (open_model(str(tmp_path / "model.gguf")), open_model(str(folder)))
    )
    ignored = ("rope", "rms_norm_eps", "output_bias", "qkv_bias", "original_max_position_embeddings")
    for name in expected.__slots__:
        if name not in ignored:
            assert getattr(found, name) == getattr(expected, name), name
    assert found.rms_norm_eps == pytest.approx(expected.rms_norm_eps)


def test_each_expert_is_packed_by_itself(tmp_path: Path) -> None:
    config = SIZES | CHECKPOINTS["qwen3moe"][1] | {"num_experts": 3}
    writer, generator = a_writer(tmp_path / "model.gguf", "qwen3moe", config), torch.Generator().manual_seed(0)
    stack = torch.randn(3, 64, 256, generator=generator)
    data = gguf.quants.quantize(stack.numpy(), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.1.ffn_up_exps.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("token_embd.weight", numpy.zeros((VOCABULARY, 48), dtype=numpy.float32))
    write(writer)
    source = open_model(str(tmp_path / "model.gguf"))
    assert isinstance(source, GgufSource)
    names = [f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in range(3)]
    assert source.shapes() == dict.fromkeys(names, (64, 256)) | {"model.embed_tokens.weight": (VOCABULARY, 48)}
    for expert, name in enumerate(names):
        whole = torch.tensor(gguf.quants.dequantize(data[expert], gguf.GGMLQuantizationType.Q8_0))
        blocks = source.blocks(name, rows=(16, 48))
        assert blocks is not None
        assert torch.equal(blocks.restored(), whole[16:48])
        assert torch.equal(source.tensor(name, columns=(32, 96)), whole[:, 32:96])
        assert source.packing(name) == Packing("Q8_0", 34 / 32)
    assert source.stored_types == ("Q8_0", "F32")


def test_divisors_of_frequencies_are_llama_3_1s_scaling(tmp_path: Path) -> None:
    from trimtab_engine.layers.rotary import scaled_frequencies

    folder = a_gguf(tmp_path / "model.gguf", "llama 3.1")
    ropes = [
        parse_model_config(open_model(str(model)).config, {}, "config.json").rope
        for model in (tmp_path / "model.gguf", folder)
    ]
    assert len(ropes[0].divisors) == HEAD // 2
    assert {1.0, 8.0} < {*ropes[0].divisors}  # kept, slowed, and some between
    torch.testing.assert_close(*(scaled_frequencies(rope, HEAD) for rope in ropes), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("numbers", "scaling", "why"),
    [
        (numpy.ones(HEAD, dtype=numpy.float32), None, "has 16 numbers, first 1.0; 8 above 0 are needed"),
        (numpy.zeros(HEAD // 2, dtype=numpy.float32), None, "has 8 numbers, first 0.0; 8 above 0 are needed"),
        (numpy.full(HEAD // 2, numpy.nan, dtype=numpy.float32), None, "has 8 numbers, first nan"),
        (numpy.ones(HEAD // 2, dtype=numpy.float32), YARN, "with rope scaling yarn is not supported"),
    ],
)
def test_divisors_that_say_nothing_are_refused(
    tmp_path: Path, numbers: numpy.ndarray, scaling: dict[str, Any] | None, why: str
) -> None:
    writer = a_writer(tmp_path / "model.gguf", "llama", SIZES | {"rope_scaling": scaling})
    writer.add_tensor(ROPE_FREQUENCIES, numbers)
    writer.add_tensor("token_embd.weight", numpy.zeros((VOCABULARY, 48), dtype=numpy.float32))
    write(writer)
    with pytest.raises(ModelError, match=f"rope_freqs.weight .*{why}"):
        open_model(str(tmp_path / "model.gguf"))


def test_a_model_in_parts_is_that_of_one_file(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    folder = a_gguf(tmp_path / "parts/model.gguf", "qwen2", split_max_tensors=9)
    parts = sorted((tmp_path / "parts").glob("*.gguf"))
    assert len(parts) > 2
    assert parts[0].name == f"model-00001-of-{len(parts):05}.gguf"
    assert bytes_on_disk(parts[0]) == sum(part.stat().st_size for part in parts)
    for model in (parts[0], parts[0].parent):
        source = open_model(str(model))
        assert source.shapes() == open_model(str(folder)).shapes()
        for name, tensor in {name: open_model(str(folder)).tensor(name) for name in source.shapes()}.items():
            assert torch.equal(source.tensor(name), tensor), name


def test_a_part_alone_is_refused_by_name(tmp_path: Path) -> None:
    a_gguf(tmp_path / "model.gguf", "qwen2", split_max_tensors=9)
    first, second, *others = sorted(tmp_path.glob("*.gguf"))
    with pytest.raises(
        ModelError, match=rf"is one of {2 + len(others)} parts of a model; give the first, {first.name}"
    ):
        open_model(str(second))
    second.rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=f"and {second.name} is missing; all of them are needed"):
        open_model(str(first))
    whole = first.rename(tmp_path / "whole.gguf")
    with pytest.raises(ModelError, match=rf"whole.gguf: is one of {2 + len(others)} parts of a model"):
        open_model(str(whole))


def test_parts_of_two_models_are_told_by_their_tensors(tmp_path: Path) -> None:
    a_gguf(tmp_path / "model.gguf", "qwen2", split_max_tensors=9)
    first, second, *_ = sorted(tmp_path.glob("*.gguf"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match=r"its parts have \d+ tensors of 27; download them again"):
        open_model(str(first))


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("llama.expert_count", 8, "MoE models in GGUF architecture llama are not supported"),
        ("llama.rope.dimension_count", 8, "partial_rotary_factor is not supported"),
        ("llama.attention.head_count_kv", [2, 1], "differs from layer to layer"),
        ("llama.attention.head_count", 0, "attention.head_count is 0; a whole number of 1 or more is needed"),
        ("llama.feed_forward_length", "wide", "feed_forward_length is 'wide'; a whole number of 1 or more is needed"),
        ("llama.rope.scaling.type", "longrope", "rope type 'longrope' is not supported"),
    ],
)
def test_metadata_unsupported_is_rejected(tmp_path: Path, key: str, value: Any, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        parsed(a_file_that_says(tmp_path / "model.gguf", key, value))


@pytest.mark.parametrize(
    ("number", "method"), [(None, "LAST"), (0, "LAST"), (1, "MEAN"), (2, "CLS"), (3, "LAST"), (4, "RANK")]
)
def test_a_file_that_is_made_to_embed_says_how(tmp_path: Path, number: int | None, method: str) -> None:
    file = tmp_path / "model.gguf"
    key, value = ("llama.block_count", 2) if number is None else ("llama.pooling_type", number)
    said = pooling_of(file, open_model(str(a_file_that_says(file, key, value))))
    assert (said.method, said.normalize) == (method, True)
    assert said.where == (str(file) if number else None), "one that says nothing of it generates as well"


def test_an_unknown_way_to_pool_is_refused(tmp_path: Path) -> None:
    file = a_file_that_says(tmp_path / "model.gguf", "llama.pooling_type", 9)
    with pytest.raises(ModelError, match=r"llama\.pooling_type is 9; it is one of 0, 1, 2, 3, 4"):
        pooling_of(file, open_model(str(file)))


def _types_of(value: Any) -> tuple[gguf.GGUFValueType, ...]:
    if isinstance(value, list):
        return gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32
    kinds = {str: gguf.GGUFValueType.STRING, float: gguf.GGUFValueType.FLOAT32, bool: gguf.GGUFValueType.BOOL}
    return (kinds.get(type(value), gguf.GGUFValueType.UINT32),)


NUMBERS_THAT_ARE_NONE = (math.nan, math.inf, "many")
WRONG = [
    *(("split.count", value, "a whole number of 0 or more") for value in ("abc", [1, 2], 1.5, True)),
    ("split.tensors.count", "x", "a whole number of 0 or more"),
    ("general.architecture", [1], "text"),
    *(("llama.block_count", value, "a whole number of 1 or more") for value in (*NUMBERS_THAT_ARE_NONE, 2.5, True)),
    ("llama.expert_count", "none", "a whole number of 0 or more"),
    ("llama.rope.dimension_count", "x", "a whole number of 1 or more"),
    *(
        (f"llama.attention.{key}", value, "a number of 0 or more")
        for key, value in (("layer_norm_rms_epsilon", math.nan), ("layer_norm_rms_epsilon", -1.0))
    ),
    *(
        (f"llama.rope.{key}", value, "a number above 0")
        for key in ("freq_base", "scale_linear")
        for value in (*NUMBERS_THAT_ARE_NONE, 0.0)
    ),
    ("llama.rope.scaling.type", 3, "text"),
    ("llama.rope.scaling.attn_factor", "x", "a number"),
    *(
        (f"tokenizer.ggml.{key}_token_id", value, "a whole number of 0 or more")
        for key in ("eos", "eot", "eom")
        for value in ("x", [1, 2], 1.5)
    ),
]


@pytest.mark.parametrize(("key", "value", "needed"), WRONG, ids=[f"{key}={value}" for key, value, _ in WRONG])
def test_values_of_a_wrong_kind_are_told_by_file_key_and_value(
    tmp_path: Path, key: str, value: Any, needed: str
) -> None:
    told = re.escape(f"model.gguf: {key} is {value!r}; {needed} is needed")
    with pytest.raises(ModelError, match=told):
        parsed(a_file_that_says(tmp_path / "model.gguf", key, value))


@pytest.mark.parametrize(("key", "needed"), [("factor", "a number above 0"), ("yarn_beta_fast", "a number above 0")])
def test_so_are_those_of_a_scaled_rope(tmp_path: Path, key: str, needed: str) -> None:
    file = a_file_that_says(tmp_path / "model.gguf", f"llama.rope.scaling.{key}", 0.0, rope_scaling=YARN)
    with pytest.raises(ModelError, match=re.escape(f"model.gguf: llama.rope.scaling.{key} is 0.0; {needed}")):
        parsed(file)


def a_file_that_says(file: Path, key: str, value: Any, **words: Any) -> Path:
    """A llama's file without most tensors, with this value in its metadata."""
    writer = a_writer(file, "llama", SIZES | words)
    writer.kv_data[0].pop(key, None)
    writer.add_key_value(key, value, *_types_of(value))
    writer.add_tensor("token_embd.weight", numpy.zeros((VOCABULARY, 48), dtype=numpy.float32))
    write(writer)
    return file


def parsed(file: Path) -> ModelConfig:
    source = open_model(str(file))
    return parse_model_config(source.config, source.generation_config, source.where)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_file_of_the_other_byte_order_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    writer = a_writer(tmp_path / "model.gguf", "llama", SIZES, endianess=gguf.GGUFEndian.BIG)
    table = torch.randn(VOCABULARY, 64, generator=torch.Generator().manual_seed(0)).numpy()
    stored_as = gguf.GGMLQuantizationType[kind]
    writer.add_tensor("token_embd.weight", gguf.quants.quantize(table, stored_as), raw_dtype=stored_as)
    write(writer)
    with pytest.raises(ModelError, match=r"model\.gguf: is in big-endian byte order.* gguf-convert-endian \S+ little"):
        open_model(str(tmp_path / "model.gguf"))


def test_a_number_per_layer_that_is_always_the_same_is_that_number(tmp_path: Path) -> None:
    writer = a_writer(tmp_path / "model.gguf", "llama", SIZES)
    writer.kv_data[0].pop("llama.attention.head_count_kv")
    writer.add_head_count_kv([2, 2])
    writer.add_tensor("token_embd.weight", numpy.zeros((VOCABULARY, 48), dtype=numpy.float32))
    write(writer)
    assert open_model(str(tmp_path / "model.gguf")).config["num_key_value_heads"] == 2


def test_a_file_without_embeddings_is_one_clear_line(tmp_path: Path) -> None:
    writer = a_writer(tmp_path / "model.gguf", "llama", SIZES)
    writer.add_tensor("output_norm.weight", numpy.zeros(48, dtype=numpy.float32))
    write(writer)
    with pytest.raises(ModelError, match=r"model\.gguf: tensor model\.embed_tokens\.weight is missing"):
        open_model(str(tmp_path / "model.gguf"))


def test_a_turn_and_a_message_end_as_a_text_does(tmp_path: Path) -> None:
    writer = a_writer(tmp_path / "model.gguf", "llama", SIZES)
    writer.add_eot_token_id(9)
    writer.add_eom_token_id(7)
    writer.add_tensor("token_embd.weight", numpy.zeros((VOCABULARY, 48), dtype=numpy.float32))
    write(writer)
    source = open_model(str(tmp_path / "model.gguf"))
    assert parse_model_config(source.config, source.generation_config, source.where).eos_token_ids == (7, 9)


def test_the_tower_of_a_model_that_sees_images_is_no_model(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "mmproj.gguf", "clip")
    writer.add_tensor("v.patch_embd.weight", numpy.zeros((4, 4), dtype=numpy.float32))
    write(writer)
    with pytest.raises(ModelError, match=r"is a separate vision encoder.*give the file of the model itself"):
        open_model(str(tmp_path / "mmproj.gguf"))
