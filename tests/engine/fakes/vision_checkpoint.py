"""A tiny Qwen2.5-VL checkpoint with a byte tokenizer and processor configuration, and transformers' outputs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from media_files import animated
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from trimtab_engine.multimodal.decoding import DecodeLimits, decode_video
from trimtab_engine.multimodal.items import Patches
from trimtab_engine.multimodal.patches import as_float32
from trimtab_engine.multimodal.qwen2_5_vl import PatchProcessor
from vision_model import CONFIG

NUM_TOKENS = 12
START, IMAGE, END, VIDEO = 258, 259, 260, 261
SPECIAL = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
PROCESSOR: dict[str, Any] = {
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 8 * 8,
    "max_pixels": 24 * 24,
}
Part = str | Image.Image | list[Image.Image]
"""Text, an image, or a video's frames."""


@dataclass(frozen=True, slots=True)
class Seeing:
    """A checkpoint, and transformers' model of it."""

    folder: Path
    model: Any

    def says(self, *parts: Part) -> list[int]:
        """The greedy tokens of transformers."""
        ids: list[int] = []
        kinds: list[int] = []
        images: list[tuple[list[int], Any]] = []
        videos: list[tuple[list[int], Any]] = []
        for part in parts:
            if isinstance(part, str):
                ids += list(part.encode())
                kinds += [0] * len(part.encode())
                continue
            grid, pixels = _image(part) if isinstance(part, Image.Image) else _video(part)
            (images if isinstance(part, Image.Image) else videos).append((grid, pixels))
            num_tokens = grid[0] * grid[1] * grid[2] // 4
            placeholder, kind = (IMAGE, 1) if isinstance(part, Image.Image) else (VIDEO, 2)
            ids += [START, *[placeholder] * num_tokens, END]
            kinds += [0, *[kind] * num_tokens, 0]
        given: dict[str, torch.Tensor] = {"mm_token_type_ids": torch.tensor([kinds])}
        if images:
            given["image_grid_thw"] = torch.tensor([grid for grid, _ in images])
            given["pixel_values"] = torch.cat([torch.from_numpy(pixels) for _, pixels in images])
        if videos:
            given["video_grid_thw"] = torch.tensor([grid for grid, _ in videos])
            given["pixel_values_videos"] = torch.cat([torch.from_numpy(pixels) for _, pixels in videos])
            given["second_per_grid_ts"] = torch.tensor([2 / 4.0] * len(videos))
        prompt = torch.tensor([ids])
        output = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=257,
            **given,
        )
        tokens: list[int] = output[0, len(ids) :].tolist()
        return tokens


def _image(picture: Image.Image) -> tuple[list[int], Any]:
    made = Qwen2VLImageProcessorPil(**PROCESSOR)(images=[picture], return_tensors="np")
    return made["image_grid_thw"][0].tolist(), made["pixel_values"]


def _video(frames: list[Image.Image]) -> tuple[list[int], Any]:
    """Process a video with our processor, which is tested on images; transformers' own needs torchvision."""
    processor = PatchProcessor.parse(PROCESSOR, "here")
    kept = decode_video(a_video(frames), "image/png", DecodeLimits()).pictures
    rows = processor.rows(kept)
    patches = Patches(processor.row_size, rows.tobytes(), processor.meanings().tobytes())
    return list(processor.grid(len(kept), kept[0].height, kept[0].width)), as_float32(patches)


def a_video(frames: Sequence[Image.Image]) -> bytes:
    """Four frames a second, without loss."""
    return animated(frames, "PNG", milliseconds=250)


def make_vision_checkpoint(folder: Path, tokenizer_folder: Path) -> Seeing:
    """Write the checkpoint with that tokenizer and additional image tokens."""
    said = {
        **CONFIG,
        "text_config": {
            **CONFIG["text_config"],
            "vocab_size": 262,
            "eos_token_id": 256,
            "max_position_embeddings": 512,
        },
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
    }
    torch.manual_seed(0)
    model: Any = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**said))
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name or "ln_q" in name else 0.0
            parameter.normal_(centre, 0.3 if parameter.dim() > 1 else 0.1)
    model.save_pretrained(folder)
    words = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    words["added_tokens"] += [{"id": START + i, "content": text, **token} for i, text in enumerate(SPECIAL)]
    (folder / "tokenizer.json").write_text(json.dumps(words))
    config = json.loads((tokenizer_folder / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    kind = {"image_processor_type": "Qwen2VLImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | kind))
    return Seeing(folder, model)
