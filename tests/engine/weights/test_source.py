"""Opening of checkpoints: supported ones, and a one-line error for others."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from trimtab_engine.errors import ModelError
from trimtab_engine.models.checkpoint import check_tensors
from trimtab_engine.models.registry import open_model, parse_model_config
from trimtab_engine.weights.open import check_is_there
from trimtab_engine.weights.safetensors_files import SafetensorsSource

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def a_folder(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(tensors or {"a": torch.arange(6.0).view(2, 3)}, folder / "model.safetensors")
    return folder


def refusal(path: Path | str, load_format: str = "auto") -> str:
    with pytest.raises(ModelError) as caught:
        open_model(str(path), load_format)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_tensors_are_read_from_a_folder_and_from_a_file_uri(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    for model in (str(folder), folder.as_uri()):
        source = open_model(model)
        assert source.shapes() == {"a": (2, 3)}
        assert torch.equal(source.tensor("a"), torch.arange(6.0).view(2, 3))


def test_an_index_names_the_files(tmp_path: Path) -> None:
    a_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(1)}, tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert set(open_model(str(tmp_path)).shapes()) == {"a", "b"}
    index.write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    assert "which is not in" in refusal(tmp_path)


def test_single_file_has_priority_over_stale_index(tmp_path: Path) -> None:
    """Tools that merge shards leave the index behind; transformers loads the single file."""
    a_folder(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "model-00001-of-00002.safetensors"}}))
    assert set(open_model(str(tmp_path)).shapes()) == {"a"}


def tied_config(tmp_path: Path, output_layer: torch.Tensor, **changes: Any) -> bool:
    """Return tie_word_embeddings of an opened checkpoint that stores an output layer."""
    embeddings = torch.arange(6.0).view(3, 2)
    tensors = {"model.embed_tokens.weight": embeddings, "lm_head.weight": output_layer, "a": torch.ones(1)}
    source = open_model(str(a_folder(tmp_path, tensors, **{"tie_word_embeddings": True, **changes})))
    return parse_model_config(source.config, {}, source.where).tie_word_embeddings


def test_stored_output_layer_unties_embeddings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = torch.arange(6.0).view(3, 2)
    assert tied_config(tmp_path, other.clone())
    assert not caplog.records
    other[2, 1] = 7.0
    assert not tied_config(tmp_path, other)
    (record,) = caplog.records
    assert "the stored lm_head.weight differs from model.embed_tokens.weight" in record.getMessage()
    assert not tied_config(tmp_path, torch.ones(3, 2, dtype=torch.bfloat16))
    caplog.clear()
    assert not tied_config(tmp_path, other, tie_word_embeddings=None)
    assert not caplog.records


def test_output_layer_is_compared_beyond_the_first_read(tmp_path: Path) -> None:
    large = torch.zeros(600_000)
    changed = large.clone()
    changed[-1] = 1.0
    source = SafetensorsSource(a_folder(tmp_path, {"a": large, "b": large.clone(), "c": changed}))
    assert source.has_equal_bytes("a", "b")
    assert not source.has_equal_bytes("a", "c")


def test_missing_checkpoint_is_reported(tmp_path: Path) -> None:
    assert "there is no model at" in refusal(tmp_path / "missing")
    assert "neither config.json with safetensors nor a .gguf file" in refusal(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "give a folder with safetensors files, or a .gguf file" in refusal(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").unlink()
    assert "trimtab-engine fetch hf://org/model, then give the folder" in refusal("hf://org/model")
    a_folder(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "no config.json" in refusal(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 8, 40, -1])
def test_a_truncated_file_is_one_clear_line(size: int, tmp_path: Path) -> None:
    file = a_folder(tmp_path) / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:size])
    assert "truncated" in refusal(tmp_path)


@pytest.mark.parametrize(
    "header", [b"{}x", b"[1]", b'{"a": 3}', b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}']
)
def test_a_damaged_header_is_one_clear_line(header: bytes, tmp_path: Path) -> None:
    file = a_folder(tmp_path) / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    assert "damaged" in refusal(tmp_path)


def test_pickle_formats_and_other_dtypes_are_refused_by_name(tmp_path: Path) -> None:
    pickle = tmp_path / "pytorch_model.bin"
    pickle.write_bytes(b"x")
    assert "pickle" in refusal(tmp_path)
    assert "pickle" in refusal(pickle)
    a_folder(tmp_path, {"a": torch.ones(3, dtype=torch.int8)})
    assert "tensor a is I8" in refusal(tmp_path)


def test_a_file_that_is_no_gguf_is_one_clear_line(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    for content in (b"", b"GGUF", b"something else entirely"):
        file.write_bytes(content)
        assert "no GGUF file" in refusal(file)


def test_a_config_that_is_no_json_is_one_clear_line(tmp_path: Path) -> None:
    (a_folder(tmp_path) / "config.json").write_text("{")
    assert "is not JSON" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["OursForCausalLM"]}, "OursForCausalLM is not supported: transformers"),
        ({"architectures": None}, "no architectures"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "quant_method 'hqq' is not supported; supported: fp8, awq, gptq, compressed-tensors",
        ),
        ({"quantization_config": {"quant_method": "awq", "bits": 8}}, "bits 8 is not supported, only 4"),
        ({"quantization_config": {"quant_method": "awq", "zero_point": False}}, "zero_point False is not supported"),
        ({"quantization_config": {"quant_method": "awq", "group_size": "all"}}, "group_size is 'all'; a whole number"),
        ({"quantization_config": {"quant_method": "gptq", "is_marlin_format": True}}, "is_marlin_format True is not"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            "fp8 with weight_block_size [64, 64] is not supported",
        ),
        ({"quantization_config": FP8 | {"activation_scheme": "static"}}, "activation_scheme 'static' is not supported"),
        ({"quantization_config": "fp8"}, "an object is needed"),
        ({"hidden_size": "8"}, "hidden_size is '8'"),
        ({"num_key_value_heads": 3}, "must be a multiple"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
    ],
)
def test_configurations_that_are_not_built_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=r".*") as caught:
        parse_model_config({**CONFIG, **changes}, {}, "config.json")
    assert words in str(caught.value)


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    from trimtab_engine.models.checkpoint import expected_shapes

    config = parse_model_config(CONFIG, {}, "config.json")
    good = {name: torch.zeros(shape) for name, shape in expected_shapes(config).items()}
    name = "model.layers.0.self_attn.q_proj.weight"

    def check(tensors: dict[str, torch.Tensor]) -> None:
        check_tensors(config, open_model(str(a_folder(tmp_path, tensors))))

    check({**good, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)})
    with pytest.raises(ModelError, match=f"lack 1 tensors, first {name}"):
        check({key: value for key, value in good.items() if key != name})
    with pytest.raises(ModelError, match=r"q_norm.* not supported"):
        check({**good, "model.layers.0.self_attn.q_norm.weight": torch.zeros(4)})
    with pytest.raises(ModelError, match=r"is \[3, 8\], config.json implies \[8, 8\]"):
        check({**good, name: torch.zeros(3, 8)})


LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 12345\n"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_git_lfs_pointer_is_named_with_the_remedy(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text(LFS)
    if name == "config.json":
        (tmp_path / "model.safetensors").write_text(LFS)
    with pytest.raises(
        ModelError, match=f"{name}: is a Git LFS pointer, not the file; run `git lfs pull` in {tmp_path}"
    ):
        SafetensorsSource(tmp_path)


def test_adapter_folder_as_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_text("")
    with pytest.raises(
        ModelError, match=r"is an adapter \(LoRA\), not a model; give its base model, and --enable-lora"
    ):
        check_is_there(tmp_path)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("hf:/Qwen/Qwen3-0.6B", "write hf://Qwen/Qwen3-0.6B"),
        ("hf:Qwen/Qwen3-0.6B", "write hf://Qwen/Qwen3-0.6B"),
        ("s3:/bucket/prefix", "write s3://bucket/prefix"),
        ("llama3:8b", "names with a tag are Ollama's"),
    ],
)
def test_mistyped_model_name_has_its_remedy(name: str, remedy: str) -> None:
    with pytest.raises(ModelError, match=remedy):
        check_is_there(Path(name))
