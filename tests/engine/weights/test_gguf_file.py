"""GGUF files written here with the gguf library: the same tensors and configuration as the transformers checkpoint."""

import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from trimtab_engine.cli import main
from trimtab_engine.errors import ModelError
from trimtab_engine.model_files.gguf_reader import open_gguf
from trimtab_engine.models.checkpoint import check_tensors, expected_shapes
from trimtab_engine.models.registry import open_model, parse_model_config
from trimtab_engine.weights.gguf_file import GLOBAL_NAMES, LAYER_NAMES, halves_from_pairs
from trimtab_modelspec.config import ModelConfig

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}


def gguf_name(name: str) -> str:
    """The inverse of the reader's names."""
    for ours, theirs in GLOBAL_NAMES.items():
        if theirs == name:
            return ours
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    short = next(key for key, value in LAYER_NAMES.items() if rest.rpartition(".")[0] == value)
    return f"blk.{layer}.{short}.{rest.rpartition('.')[2]}"


def pairs_from_halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's permutation of q and k, as its converter does it."""
    return rows.view(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def a_gguf(
    file: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32, architecture: str = "llama"
) -> dict[str, torch.Tensor]:
    """Write a random model; returns its tensors by their transformers names."""
    config = parse_model_config(CONFIG, {}, "config.json")
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(s, generator=generator) for n, s in expected_shapes(config).items()}
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_eos_token_id(7)
    for name, tensor in tensors.items():
        heads = 4 if "q_proj" in name else 2 if "k_proj" in name else None
        stored = (tensor if heads is None else pairs_from_halves(tensor, heads)).contiguous().numpy()
        if tensor.dim() == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_tensors_and_configuration_equal_the_transformers_checkpoint(tmp_path: Path) -> None:
    tensors = a_gguf(tmp_path / "model.gguf")
    source = open_model(str(tmp_path))
    config: ModelConfig = parse_model_config(source.config, source.generation_config, source.where)
    expected = parse_model_config(CONFIG, {"eos_token_id": 7}, "config.json")
    assert config.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    assert (config.rope, config.num_kv_heads, config.head_size, config.vocab_size) == (expected.rope, 2, 8, 40)
    assert (config.eos_token_ids, config.tie_word_embeddings) == ((7,), False)
    check_tensors(config, source)
    for name, tensor in tensors.items():
        assert torch.equal(source.tensor(name), tensor), name


def test_quantised_tensors_are_dequantised(tmp_path: Path) -> None:
    tensors = a_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0)
    source = open_model(str(tmp_path / "model.gguf"))
    for name, tensor in tensors.items():
        torch.testing.assert_close(source.tensor(name), tensor, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "BF16"])
def test_inspect_names_the_types_that_are_in_the_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType[name])
    assert main(["inspect", str(tmp_path / "model.gguf")]) == 0
    assert f"on disk (gguf, {name}, F32)" in capsys.readouterr().out


def test_the_permutation_is_undone() -> None:
    rows = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(halves_from_pairs(pairs_from_halves(rows, 3), 3), rows)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    a_gguf(tmp_path / "model.gguf", architecture="mamba")
    with pytest.raises(ModelError, match="GGUF architecture mamba is not supported; supported: llama"):
        open_model(str(tmp_path))


def test_truncated_files_are_one_clear_line(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    a_gguf(file)
    data = file.read_bytes()
    for size in (len(data) - 100, len(data) // 2, 300, 10):
        file.write_bytes(data[:size])
        with pytest.raises(ModelError, match=r"truncated"):
            open_model(str(file))


def test_a_part_of_a_tensor_is_that_part_of_the_whole(tmp_path: Path) -> None:
    for kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0):
        a_gguf(tmp_path / "model.gguf", kind)
        source = open_model(str(tmp_path / "model.gguf"))
        query = "model.layers.0.self_attn.q_proj.weight"  # rows are cut between heads of 8
        assert torch.equal(source.tensor(query, rows=(8, 24)), source.tensor(query)[8:24])
        down = "model.layers.0.mlp.down_proj.weight"
        assert torch.equal(source.tensor(down, columns=(3, 9)), source.tensor(down)[:, 3:9])


def test_only_llamas_query_and_key_rows_are_permuted(tmp_path: Path) -> None:
    tensors = a_gguf(tmp_path / "model.gguf", architecture="qwen2")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(open_model(str(tmp_path)).tensor(name), pairs_from_halves(tensors[name], 4))


def gguf_with(kind: int, value: bytes) -> bytes:
    """Return a GGUF file of version 3 with one field and no tensors."""
    name = b"general.architecture"
    return b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(name)) + name + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (9, struct.pack("<IQ", 0, 1 << 40) + bytes(64)),
        (9, struct.pack("<IQ", 9, 8) + struct.pack("<IQ", 9, 8) * 40),
        (9, struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 0, 1) + b"x"),
        (8, struct.pack("<Q", 1 << 60) + b"llama"),
    ],
    ids=["long array", "nested arrays", "deep arrays", "long text"],
)
def test_lengths_beyond_the_file_are_rejected_at_once(tmp_path: Path, kind: int, value: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf_with(kind, value))
    with pytest.raises(ModelError, match="truncated"):
        open_gguf(tmp_path / "model.gguf")
