"""Generator of a Qwen2.5-VL folder of any size: for `--load-format dummy`, or with random weights in a file.

    python -m engine_benchmarks.vision_checkpoint FOLDER

writes a tiny one with weights. It needs only the engine and its dependencies, so that it runs in its image.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from trimtab_engine.models.checkpoint import expected_shapes
from trimtab_engine.models.qwen2_5_vl_vision import parse_vision, vision_encoder_tensors
from trimtab_engine.models.registry import parse_model_config
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.families.registry import language_model_config

NUM_BYTES = 256  # one token each, whose id is its own
END, START, IMAGE, STOP, VIDEO = "<|end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"
SPECIAL = (END, START, IMAGE, STOP, VIDEO)
TOKEN_IDS = {word: NUM_BYTES + number for number, word in enumerate(SPECIAL)}
PRINTABLE = (range(33, 127), range(161, 173), range(174, 256))
"""Bytes that byte-level tokenizers write as themselves (GPT-2's table); the others are characters from 256 on."""
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
PATCH_SIZE, MERGE_SIZE = 14, 2
HEADS, KV_HEADS, VISION_HEADS = 4, 2, 4
TINY = {
    "width": 64, "layers": 2, "vision_width": 32, "vision_layers": 2, "max_model_len": 512,
    "max_pixels": (8 * PATCH_SIZE * MERGE_SIZE) ** 2,
}  # fmt: skip
WEIGHTS = "model.safetensors"
SPREAD = 0.1  # standard deviation of random weights


def write_vision_checkpoint(
    folder: Path, *, width: int, layers: int, vision_width: int, vision_layers: int, max_model_len: int, max_pixels: int
) -> str:
    """Write config.json, the tokenizer and the image processor's configuration. `max_pixels`: of an image, after
    resizing. Returns the folder's path.
    """
    sixth = width // HEADS // 2 // 4
    config: dict[str, Any] = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "image_token_id": TOKEN_IDS[IMAGE],
        "video_token_id": TOKEN_IDS[VIDEO],
        "vision_start_token_id": TOKEN_IDS[START],
        "vision_end_token_id": TOKEN_IDS[STOP],
        "text_config": {
            "vocab_size": NUM_BYTES + len(SPECIAL),
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "max_position_embeddings": max_model_len,
            "eos_token_id": TOKEN_IDS[END],
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [2 * sixth, sixth, width // HEADS // 2 - 3 * sixth],
            },
        },
        "vision_config": {
            "hidden_size": vision_width,
            "intermediate_size": 3 * vision_width,
            "depth": vision_layers,
            "num_heads": VISION_HEADS,
            "out_hidden_size": width,
            "patch_size": PATCH_SIZE,
            "spatial_merge_size": MERGE_SIZE,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [vision_layers - 1],
        },
    }
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH_SIZE,
        "temporal_patch_size": 2,
        "merge_size": MERGE_SIZE,
        "min_pixels": (PATCH_SIZE * MERGE_SIZE) ** 2,
        "max_pixels": max_pixels,
    }
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": TEMPLATE}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    _tokenizer().save(str(folder / "tokenizer.json"))
    return str(folder)


def _tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte, then the special tokens."""
    written = {byte: chr(byte) for span in PRINTABLE for byte in span}
    others = [byte for byte in range(NUM_BYTES) if byte not in written]
    written |= {byte: chr(NUM_BYTES + number) for number, byte in enumerate(others)}
    made = Tokenizer(models.BPE(vocab={character: byte for byte, character in written.items()}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    return made


def write_weights(folder: Path) -> None:
    """Write random weights for the folder's config.json, the same each time."""
    words = json.loads((folder / "config.json").read_text())
    text = parse_model_config(words, {}, "config.json")
    tower = vision_encoder_tensors(parse_vision(ConfigReader(language_model_config(words), {}, "config.json"), text))
    shapes = expected_shapes(text) | {f"visual.{name}": tensor.shape for name, tensor in tower.items()}
    random = torch.Generator().manual_seed(0)
    tensors = {name: SPREAD * torch.randn(shape, generator=random) for name, shape in shapes.items()}
    save_file(tensors, folder / WEIGHTS)


def main(arguments: Sequence[str]) -> int:
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    write_vision_checkpoint(folder, **TINY)
    write_weights(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
