"""Tiny models with fixed-resolution vision encoders, in transformers and as checkpoints; inputs and
reference outputs.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from trimtab_engine.multimodal.items import MultiModalItem, Patches
from trimtab_engine.multimodal.patches import as_float32
from vision_model import IMAGE, MEANINGS, VisionPrompt

PATCH, SQUARE = 4, 16  # pixels
ROW_SIZE = 3 * SQUARE**2
TEXT: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 2,
    "pad_token_id": 0, "bos_token_id": 1,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": SQUARE,
    "patch_size": PATCH,
}  # fmt: skip
TOKENS = {"llava": 16, "llava of others": 16, "idefics3": 4, "smolvlm": 4, "internvl": 4}
"""Tokens per fixed-resolution image."""


def the_reference(kind: str, *, text: Mapping[str, Any] = MappingProxyType({}), image_token_id: int = IMAGE) -> Any:
    """Return a model with random weights in which every branch has an effect: LLaVA with CLIP and a built-in language
    model, LLaVA with SigLIP and one on transformers' code, Idefics3, SmolVLM and InternVL. `text`: further keys of
    text_config.
    """
    words = TEXT | dict(text)
    torch.manual_seed(0)
    model: Any
    if kind == "llava":
        clip = {"model_type": "clip_vision_model", **VISION}
        model = LlavaForConditionalGeneration(
            LlavaConfig(text_config=words, vision_config=clip, image_token_index=image_token_id)
        )
    elif kind == "llava of others":
        siglip = {"model_type": "siglip_vision_model", **VISION}
        model = LlavaForConditionalGeneration(
            LlavaConfig(
                text_config=words | {"model_type": "olmo2"},
                vision_config=siglip,
                image_token_index=image_token_id,
                vision_feature_select_strategy="full",
                vision_feature_layer=[-2, -1],
            )
        )
    elif kind == "idefics3":
        model = Idefics3ForConditionalGeneration(
            Idefics3Config(text_config=words, vision_config=VISION, image_token_id=image_token_id, scale_factor=2)
        )
    elif kind == "internvl":
        model = InternVLForConditionalGeneration(
            InternVLConfig(
                text_config=words | {"model_type": "qwen2"},
                vision_config=VISION | {"use_qk_norm": True, "attention_bias": True},
                image_token_id=image_token_id,
                tie_word_embeddings=False,
            )
        )
    else:
        model = SmolVLMForConditionalGeneration(
            SmolVLMConfig(text_config=words, vision_config=VISION, image_token_id=image_token_id, scale_factor=2)
        )
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.normal_(centre, 0.3 if parameter.dim() > 1 and "bias" not in name else 0.1)
    return model


def a_square(kind: str, seed: int) -> MultiModalItem:
    """Random pixels: equal seeds make equal ones."""
    name = f"square {seed}"
    patches = Patches(ROW_SIZE, random.Random(name).randbytes(ROW_SIZE), MEANINGS)
    return MultiModalItem("image", name.encode(), TOKENS[kind], (1, 1, 1), patches)


def pixels(square: MultiModalItem) -> torch.Tensor:
    """[channels, height, width] float32, as pictures have them."""
    assert square.patches is not None
    return torch.from_numpy(as_float32(square.patches)).view(3, SQUARE, SQUARE)


def what_llava_gets(prompt: VisionPrompt) -> dict[str, torch.Tensor]:
    """Return the arguments of its forward pass besides token ids."""
    squares = prompt.items("image")
    return {"pixel_values": torch.stack([pixels(square) for square in squares])} if squares else {}


def what_idefics3_gets(prompt: VisionPrompt) -> dict[str, torch.Tensor]:
    """Idefics3, and SmolVLM: as LLaVA, in one more dimension: pictures of several squares."""
    return {name: values.unsqueeze(0) for name, values in what_llava_gets(prompt).items()}


GIVEN = {kind: what_idefics3_gets if kind in ("idefics3", "smolvlm") else what_llava_gets for kind in TOKENS}
