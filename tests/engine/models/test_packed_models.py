"""GGUF files whose blocks of 4 to 8 bits are multiplied as stored: same results as dequantised weights, in less
memory.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_builders
import gguf
import numpy
import pytest
import torch
from gguf_blocks import stored_matrix
from safetensors.torch import save_file
from trimtab_engine.layers.linear import Linear, library_for
from trimtab_engine.layers.vocabulary import LmHead, VocabularyEmbedding
from trimtab_engine.models.checkpoint import expected_shapes, expected_tensors
from trimtab_engine.models.loading import Loader, packed_source
from trimtab_engine.models.registry import open_model, parse_model_config
from trimtab_engine.models.weight_memory import weight_memory_bytes
from trimtab_engine.parallel.ranks import Layout
from trimtab_engine.parallel.shard import shard_model
from trimtab_engine.runner.loading import log_restored_weights
from trimtab_engine.weights.gguf_file import GLOBAL_NAMES, LAYER_NAMES, GgufSource
from trimtab_kernels.native.quantised import BLOCK_FORMATS, QuantisedBlocks
from trimtab_modelspec.quantization import Quantization

CPU = torch.device("cpu")
HIDDEN, WIDE, VOCABULARY, HEAD = 256, 512, 97, 64
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
QKV = {"q_proj": (0, 256), "k_proj": (0, 128), "v_proj": (0, 128)}
ATTENTION = "model.layers.0.self_attn."
pytestmark = pytest.mark.skipif(library_for(torch.float32, CPU) is None, reason="the operators are not compiled here")


def a_gguf(file: Path, kind_of: Callable[[str], str]) -> GgufSource:
    """Write a random model; `kind_of` gives the type of each matrix."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_eos_token_id(7)
    ours = {theirs: name for name, theirs in (GLOBAL_NAMES | LAYER_NAMES).items()}
    generator = torch.Generator().manual_seed(3)
    for name, shape in expected_shapes(parse_model_config(CONFIG, {}, "config.json")).items():
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        short = f"blk.{layer}.{ours[rest.removesuffix('.weight')]}.weight" if layer.isdigit() else ours[name]
        if len(shape) == 1:
            writer.add_tensor(short, numpy.ones(shape, dtype=numpy.float32))
            continue
        kind = gguf.GGMLQuantizationType[kind_of(name)]
        writer.add_tensor(short, stored_matrix(kind.name, shape, generator), raw_dtype=kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    source = open_model(str(file))
    assert isinstance(source, GgufSource)
    return source


def restored(source: GgufSource, folder: Path) -> Path:
    """Write a checkpoint with the dequantised blocks."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: source.tensor(name).contiguous() for name in source.shapes()}, folder / "model.safetensors")
    return folder


def a_loader(source: GgufSource) -> Loader:
    return Loader(source, torch.float32, CPU, lambda count: None)


def numbers(*shape: int) -> torch.Tensor:
    """Random ones, always the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def logprobs(model: Path) -> torch.Tensor:
    """Return logits of one prompt's own tokens, in chunks, and of the tokens after it."""
    return torch.tensor(engine_builders.logprobs_of(model, VOCABULARY))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_a_packed_model_computes_what_its_restored_weights_compute(tmp_path: Path, name: str) -> None:
    source = a_gguf(tmp_path / "model.gguf", lambda tensor: name)
    packed = logprobs(tmp_path / "model.gguf")
    torch.testing.assert_close(packed, logprobs(restored(source, tmp_path / "restored")), atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_ranks_parts_are_parts_of_the_whole(tmp_path: Path, name: str) -> None:
    load = a_loader(a_gguf(tmp_path / "model.gguf", lambda tensor: name))
    x = numbers(3, HIDDEN)
    whole = load.joined(ATTENTION, {"q_proj": (0, 256)})(x)
    parts = [load.joined(ATTENTION, {"q_proj": rows})(x) for rows in ((0, 64), (64, 256))]
    assert torch.equal(torch.cat(parts, dim=1), whole)
    x = numbers(3, WIDE)
    down = "model.layers.1.mlp.down_proj"
    summed = load.part_of_sum(down, (0, 256))(x[:, :256]) + load.part_of_sum(down, (256, WIDE))(x[:, 256:])
    torch.testing.assert_close(summed, load.part_of_sum(down, (0, WIDE))(x), atol=1e-4, rtol=1e-4)
    assert load.restored == []


@pytest.mark.parametrize(("name", "cut"), [("Q4_0", 48), ("Q4_K", 128)])
def test_columns_that_cut_a_block_are_multiplied_restored_and_named(tmp_path: Path, name: str, cut: int) -> None:
    source = a_gguf(tmp_path / "model.gguf", lambda tensor: name)
    load, down = a_loader(source), "model.layers.0.mlp.down_proj"
    assert source.blocks(f"{down}.weight", columns=(0, cut)) is None
    x = numbers(2, WIDE - cut)
    expected = x @ source.tensor(f"{down}.weight", columns=(cut, WIDE)).t()
    torch.testing.assert_close(load.part_of_sum(down, (cut, WIDE))(x), expected, atol=1e-4, rtol=1e-4)
    assert load.restored == [f"model.layers.*.mlp.down_proj.weight ({name})"]


def kinds_of_q4_k_m(tensor: str) -> str:
    """Types of llama.cpp's Q4_K_M in the first layer: values and down projections have more bits."""
    if tensor == "model.embed_tokens.weight" or "lm_head" in tensor:
        return "Q6_K"
    return "Q6_K" if "layers.0" in tensor and ("v_proj" in tensor or "down_proj" in tensor) else "Q4_K"


def test_rows_of_two_types_are_multiplied_together_as_they_are_stored(tmp_path: Path) -> None:
    source = a_gguf(tmp_path / "model.gguf", kinds_of_q4_k_m)
    load, x = a_loader(source), numbers(2, HIDDEN)
    expected = x @ torch.cat([source.tensor(f"{ATTENTION}{name}.weight") for name in QKV]).t()
    actual = load.joined(ATTENTION, QKV)
    assert isinstance(actual, Linear)
    assert actual.native is not None
    assert actual.native.weight.numel() * 4 == 384 * 148 + 128 * 210
    torch.testing.assert_close(actual(x), expected, atol=1e-3, rtol=1e-4)
    assert load.restored == []


def test_mixed_gguf_types_equal_dequantised_weights(tmp_path: Path) -> None:
    source = a_gguf(tmp_path / "model.gguf", kinds_of_q4_k_m)
    packed = logprobs(tmp_path / "model.gguf")
    torch.testing.assert_close(packed, logprobs(restored(source, tmp_path / "restored")), atol=2e-3, rtol=1e-4)


def test_a_type_that_changes_within_a_panel_is_multiplied_restored_and_named(tmp_path: Path) -> None:
    source = a_gguf(tmp_path / "model.gguf", lambda tensor: "Q8_0" if "up_proj" in tensor else "Q4_0")
    load, x, mlp = a_loader(source), numbers(2, HIDDEN), "model.layers.0.mlp."
    rows = {"gate_proj": (0, 16), "up_proj": (0, 16)}
    weights = [source.tensor(f"{mlp}{name}.weight", rows=span) for name, span in rows.items()]
    torch.testing.assert_close(load.joined(mlp, rows)(x), x @ torch.cat(weights).t(), atol=1e-4, rtol=1e-4)
    types = {"gate": "Q4_0", "up": "Q8_0"}
    assert load.restored == [f"model.layers.*.mlp.{name}_proj.weight ({kind})" for name, kind in types.items()]


def test_the_log_names_what_is_held_larger_than_it_is_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = a_gguf(tmp_path / "model.gguf", lambda tensor: "Q4_K" if "proj" in tensor else "BF16")
    caplog.set_level(logging.INFO)
    logprobs(tmp_path / "model.gguf")
    assert "weights: restored" not in caplog.text
    load = Loader(source, torch.bfloat16, CPU, lambda count: None)
    for layer in range(2):
        load.part_of_sum(f"model.layers.{layer}.mlp.down_proj", (0, WIDE))
    load.vocabulary("model.embed_tokens.weight", rows=None)
    log_restored_weights(load)
    assert "weights restored to bfloat16 while loading: 2 x model.layers.*.mlp.down_proj.weight (Q4_K)" in caplog.text
    assert "embed_tokens" not in caplog.text


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K"])
def test_the_vocabulary_is_looked_up_and_multiplied_as_it_is_stored(tmp_path: Path, kind: str) -> None:
    source = a_gguf(tmp_path / "model.gguf", lambda tensor: kind)
    load, name = a_loader(source), "model.embed_tokens.weight"
    table, ids = load.vocabulary(name, rows=None), torch.tensor([3, 96, 3, 0])
    assert isinstance(table, QuantisedBlocks)
    assert torch.equal(VocabularyEmbedding(table, 0, None)(ids), source.tensor(name)[ids])
    x = numbers(2, HIDDEN)
    logits = LmHead(table, VOCABULARY, None)(x)
    assert logits is not None
    torch.testing.assert_close(logits, x @ source.tensor(name).t(), atol=1e-3, rtol=1e-4)


def test_mapped_embedding_table_is_not_copied(tmp_path: Path) -> None:
    load = a_loader(a_gguf(tmp_path / "model.gguf", lambda tensor: "Q8_0"))
    first, second = (load.vocabulary("model.embed_tokens.weight", rows=(8, 16)) for _ in range(2))
    assert isinstance(first, QuantisedBlocks)
    assert isinstance(second, QuantisedBlocks)
    assert first.data.data_ptr() == second.data.data_ptr()


@pytest.mark.parametrize(("kind", "size", "numbers"), [("Q4_0", 18, 32), ("Q4_K", 148, 256), ("Q6_K", 210, 256)])
def test_the_bytes_before_loading_are_those_that_are_held(tmp_path: Path, kind: str, size: int, numbers: int) -> None:
    source = a_gguf(tmp_path / "model.gguf", lambda tensor: kind if "proj" in tensor else "F32")
    tensors = expected_tensors(parse_model_config(source.config, {}, "model.gguf"))
    projections = sum(tensor.num_elements for name, tensor in tensors.items() if "proj" in name)
    others = sum(tensor.num_elements for name, tensor in tensors.items() if "proj" not in name)
    held = weight_memory_bytes(source, tensors, None, torch.float32, CPU)
    assert held == projections * size // numbers + 4 * others
    assert weight_memory_bytes(source, tensors, None, torch.bfloat16, CPU) == 2 * (projections + others)


def test_restored_cut_of_a_rank_is_counted_as_restored(tmp_path: Path) -> None:
    """Of the down projection's 512 columns each of four ranks gets 128, of the output projection's 256 two half blocks:
    both split blocks of 256.
    """
    source = a_gguf(tmp_path / "model.gguf", lambda tensor: "Q4_K" if "proj" in tensor else "F32")
    config = parse_model_config(CONFIG | {"num_key_value_heads": 4}, {}, "model.gguf")
    tensors = expected_tensors(parse_model_config(source.config, {}, "model.gguf"))
    whole = weight_memory_bytes(source, tensors, None, torch.float32, CPU)
    columns = sum(t.num_elements for name, t in tensors.items() if "down_proj" in name or "o_proj" in name)
    for parts, cut in ((1, 0), (4, columns)):
        shard = shard_model(config, Layout(tensor=parts), parts - 1)
        held = weight_memory_bytes(source, tensors, None, torch.float32, CPU, config=config, shard=shard)
        assert held == whole + cut * 4 - cut * 148 // 256


def test_types_that_change_within_a_rank_s_panel_are_counted_restored(tmp_path: Path) -> None:
    """Up is Q8_0 and gate Q4_0; each of 32 ranks has 16 rows of both, less than a panel."""
    source = a_gguf(tmp_path / "model.gguf", lambda tensor: "Q8_0" if "up_proj" in tensor else "Q4_0")
    config = parse_model_config(CONFIG | {"num_attention_heads": 32, "num_key_value_heads": 32}, {}, "model.gguf")
    tensors = expected_tensors(parse_model_config(source.config, {}, "model.gguf"))
    whole = weight_memory_bytes(source, tensors, None, torch.float32, CPU)
    gate_and_up = sum(t.num_elements for name, t in tensors.items() if "gate_proj" in name or "up_proj" in name)
    downs = sum(t.num_elements for name, t in tensors.items() if "down_proj" in name or "o_proj" in name)
    shard = shard_model(config, Layout(tensor=32), 31)
    held = weight_memory_bytes(source, tensors, None, torch.float32, CPU, config=config, shard=shard)
    packed = gate_and_up // 2 * 34 // 32 + gate_and_up // 2 * 18 // 32 + downs * 18 // 32
    assert held == whole + 4 * (gate_and_up + downs) - packed


def test_other_backends_do_not_pack(tmp_path: Path) -> None:
    source = a_gguf(tmp_path / "model.gguf", lambda tensor: "Q4_0")
    assert packed_source(source, torch.float32, CPU, None) is source
    assert packed_source(source, torch.bfloat16, CPU, None) is None
    assert packed_source(source, torch.float32, CPU, Quantization(is_stored=False)) is None
