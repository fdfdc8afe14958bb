"""A tiny Qwen2.5-VL with every branch of its vision encoder, in transformers and as a checkpoint; inputs and reference
outputs.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from engine_benchmarks.parity import Reference
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from trimtab_engine.messages.requests import AddRequest
from trimtab_engine.multimodal.items import MultiModalItem, Patches, Span
from trimtab_engine.multimodal.patches import as_float32
from trimtab_engine.scheduling.sampling import Sampling

IMAGE, VIDEO = 90, 91  # placeholders
CONFIG: dict[str, Any] = {
    "text_config": {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 2, "pad_token_id": 0,
        "bos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [1, 1, 2]},
    },
    "vision_config": {
        "hidden_size": 24, "intermediate_size": 36, "depth": 3, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16, "fullatt_block_indexes": [1],
        "tokens_per_second": 3,
    },
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 92, "vision_end_token_id": 93,
}  # fmt: skip
MERGE_SIZE, TOKENS_PER_SECOND = 2, 3
ROW_SIZE = 3 * 2 * 4 * 4
MEANINGS = struct.pack("<768f", *((level / 255 - 0.5 + channel / 10) for channel in range(3) for level in range(256)))


def the_reference(config: dict[str, Any] = CONFIG) -> Any:
    """Random weights that leave no branch without effect."""
    torch.manual_seed(0)
    model: Any = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**config))
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name or "ln_q" in name else 0.0
            parameter.normal_(centre, 0.3 if parameter.dim() > 1 else 0.1)
    return model


def an_item(
    grid: tuple[int, int, int],
    *,
    kind: Literal["image", "video"] = "image",
    seed: int = 0,
    seconds: float = 1.0,
) -> MultiModalItem:
    """Random pictures: equal arguments make equal ones."""
    num_patches = grid[0] * grid[1] * grid[2]
    name = f"{grid} {kind} {seed} {seconds}"
    values = random.Random(name).randbytes(num_patches * ROW_SIZE)
    patches = Patches(ROW_SIZE, values, MEANINGS)
    return MultiModalItem(kind, name.encode(), num_patches // MERGE_SIZE**2, grid, patches, seconds)


@dataclass(frozen=True, slots=True)
class VisionPrompt:
    """Token ids with placeholders, and where the items are."""

    token_ids: list[int]
    spans: tuple[Span, ...]

    def items(self, kind: str) -> list[MultiModalItem]:
        return [span.item for span in self.spans if span.item.modality == kind]

    def request(self, request_id: str, num_tokens: int, *, salt: str = "") -> AddRequest:
        """Greedy, through end-of-sequence tokens."""
        sampling = Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        return AddRequest(
            request_id, list(self.token_ids), sampling, arrival_time=0.0, cache_salt=salt, spans=self.spans
        )


def a_prompt(*parts: int | MultiModalItem, first: int = 5) -> VisionPrompt:
    """Return items between runs of text tokens, which increase from `first`."""
    token_ids: list[int] = []
    spans: list[Span] = []
    for part in parts:
        if isinstance(part, int):
            token_ids += [first + (len(token_ids) + step) % 70 for step in range(part)]
        else:
            spans.append(Span(len(token_ids), part))
            token_ids += [IMAGE if part.modality == "image" else VIDEO] * part.num_tokens
    return VisionPrompt(token_ids, tuple(spans))


def what_transformers_gets(prompt: VisionPrompt) -> dict[str, torch.Tensor]:
    """Return the arguments of its forward pass besides token ids."""
    kinds = {IMAGE: 1, VIDEO: 2}
    given = {"mm_token_type_ids": torch.tensor([[kinds.get(token, 0) for token in prompt.token_ids]])}
    images, videos = prompt.items("image"), prompt.items("video")
    if images:
        given |= {"pixel_values": _pixels(images), "image_grid_thw": torch.tensor([item.grid for item in images])}
    if videos:
        given |= {"pixel_values_videos": _pixels(videos), "video_grid_thw": torch.tensor([v.grid for v in videos])}
        given["second_per_grid_ts"] = torch.tensor([item.seconds_per_step for item in videos])
    return given


def _pixels(items: list[MultiModalItem]) -> torch.Tensor:
    return torch.cat([torch.from_numpy(as_float32(item.patches)) for item in items if item.patches is not None])


def reference_of(
    model: Any,
    prompt: VisionPrompt,
    num_tokens: int,
    given: Callable[[VisionPrompt], dict[str, torch.Tensor]] = what_transformers_gets,
) -> Reference:
    """Return its greedy tokens. `given`: image arguments besides token ids."""
    output = model.generate(
        torch.tensor([prompt.token_ids]),
        attention_mask=torch.ones(1, len(prompt.token_ids), dtype=torch.int64),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **given(prompt),
    )
    best = [logits[0].topk(2).values for logits in output.logits]
    ranges = [float(logits.max() - logits.min()) for logits in output.logits]
    gaps = [float(two[0] - two[1]) / size for two, size in zip(best, ranges, strict=True)]
    return Reference(prompt.token_ids, output.sequences[0, len(prompt.token_ids) :].tolist(), gaps)


def save(model: Any, folder: Path) -> str:
    """The checkpoint's path."""
    model.save_pretrained(folder)
    return str(folder)
