"""Generator of a Llama with random weights in llama.cpp's Q4_K_M mix of types, and the same weights as safetensors in
float32, for packed_bench.

    python -m engine_benchmarks.random_gguf FOLDER --layers 8
"""

import json
from pathlib import Path
from typing import Annotated

import gguf
import numpy
import torch
import typer
from safetensors.torch import save_file
from trimtab_engine.models.checkpoint import expected_shapes
from trimtab_engine.models.registry import open_model, parse_model_config
from trimtab_engine.weights.gguf_file import GLOBAL_NAMES, LAYER_NAMES

HEADS, KV_HEADS, VOCABULARY, CONTEXT = 16, 4, 8192, 1024
FACTORS = {"Q4_K": ((0, 1e-4), (2, 7.5e-4)), "Q6_K": ((208, 7e-5),)}
"""Offsets of a block's float16 numbers, and values that turn random bits into small weights around 0."""


def type_of(name: str, layer: int, layers: int) -> str:
    """Return Q4_K_M's type: Q6_K for the output layer, and for values and down projections of the outer and every third
    layer.
    """
    is_outer = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    is_wide = name in ("token_embd.weight", "output.weight")
    return "Q6_K" if is_wide or (is_outer and ("attn_v" in name or "ffn_down" in name)) else "Q4_K"


def blocks_of(kind: gguf.GGMLQuantizationType, shape: tuple[int, ...], generator: torch.Generator) -> numpy.ndarray:
    """Return random bits with these factors."""
    numbers, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = torch.randint(256, (shape[0] * shape[1] // numbers, block_bytes), dtype=torch.uint8, generator=generator)
    for place, factor in FACTORS[kind.name]:
        factors = (torch.rand(len(blocks), 1, generator=generator) + 0.5) * factor
        blocks[:, place : place + 2] = factors.half().view(torch.uint8)
    return blocks.view(shape[0], -1).numpy()


def main(
    folder: Annotated[Path, typer.Argument(help="gets model.gguf and plain/")],
    layers: int = 8,
    hidden: int = 1024,
    intermediate: int = 2816,
) -> None:
    """Write both formats of one model."""
    plain = folder / "plain"
    plain.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": hidden // HEADS, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_block_count(layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(intermediate)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_eos_token_id(2)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("none")  # llama.cpp requires one
    ours = {theirs: name for name, theirs in (GLOBAL_NAMES | LAYER_NAMES).items()}
    generator = torch.Generator().manual_seed(0)
    for name, shape in expected_shapes(parse_model_config(config, {}, "config.json")).items():
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        is_global = name in GLOBAL_NAMES.values()
        short = ours[name] if is_global else f"blk.{layer}.{ours[rest.removesuffix('.weight')]}.weight"
        if len(shape) == 1:
            writer.add_tensor(short, numpy.ones(shape, dtype=numpy.float32))
            continue
        kind = gguf.GGMLQuantizationType[type_of(short, 0 if is_global else int(layer), layers)]
        writer.add_tensor(short, blocks_of(kind, shape, generator), raw_dtype=kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    source = open_model(str(folder / "model.gguf"))
    (plain / "config.json").write_text(json.dumps(config))
    save_file({name: source.tensor(name).contiguous() for name in source.shapes()}, plain / "model.safetensors")


if __name__ == "__main__":
    typer.run(main)
