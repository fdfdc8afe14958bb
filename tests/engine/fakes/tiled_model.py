"""A tiny Llama 4 with every branch of both halves, in transformers and as a checkpoint; tiles for it, and what
transformers makes of them.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import Llama4Config, Llama4ForConditionalGeneration
from trimtab_engine.multimodal.items import MultiModalItem, Patches
from trimtab_engine.multimodal.patches import as_float32
from vision_model import IMAGE, MEANINGS, VisionPrompt

PATCH, MERGE, TILE = 4, 2, 16  # pixels, patches, pixels
PATCHES = (TILE // PATCH) ** 2
ROW_SIZE = 3 * PATCH**2
CONFIG: dict[str, Any] = {
    "text_config": {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 24, "intermediate_size_mlp": 40, "head_dim": 8,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1, "attention_chunk_size": 13,
        "no_rope_layers": [1, 0, 1, 1], "interleave_moe_layer_step": 2, "num_local_experts": 4,
        "num_experts_per_tok": 2, "attn_temperature_tuning": True, "floor_scale": 16, "attn_scale": 0.5,
    },
    "vision_config": {
        "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": TILE, "patch_size": PATCH, "vision_output_dim": 20, "projector_input_dim": 20,
        "projector_output_dim": 20, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "image_token_index": IMAGE, "boi_token_index": 92, "eoi_token_index": 93,
}  # fmt: skip


def the_reference(config: dict[str, Any] = CONFIG) -> Any:
    """Random weights that leave no branch without effect."""
    torch.manual_seed(0)
    model: Any = Llama4ForConditionalGeneration(Llama4Config(**config))
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.normal_(centre, 0.3 if parameter.dim() > 1 and "bias" not in name else 0.1)
    return model


def a_tile(seed: int) -> MultiModalItem:
    """Random pixels: equal seeds make equal ones."""
    name = f"tile {seed}"
    patches = Patches(ROW_SIZE, random.Random(name).randbytes(PATCHES * ROW_SIZE), MEANINGS)
    side = TILE // PATCH
    return MultiModalItem("image", name.encode(), PATCHES // MERGE**2, (1, side, side), patches)


def pixels(tile: MultiModalItem) -> torch.Tensor:
    """[channels, height, width] float32, as pictures have them."""
    assert tile.patches is not None
    tokens = TILE // PATCH // MERGE
    rows = torch.from_numpy(as_float32(tile.patches)).view(tokens, tokens, MERGE, MERGE, 3, PATCH, PATCH)
    return rows.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, TILE, TILE)


def what_transformers_gets(prompt: VisionPrompt) -> dict[str, torch.Tensor]:
    """Return the arguments of its forward pass besides token ids."""
    tiles = prompt.items("image")
    return {"pixel_values": torch.stack([pixels(tile) for tile in tiles])} if tiles else {}
