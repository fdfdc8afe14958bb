"""Tiny fixed-resolution image models with a byte tokenizer and processor configuration, and transformers' outputs."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fixed_resolution_models import SQUARE, the_reference
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

NUM_TOKENS = 12
FENCE, WHOLE, IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"
START, END, CONTEXT = "<img>", "</img>", "<IMG_CONTEXT>"
PLACES = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
IDS = {word: 258 + number for number, word in enumerate([IMAGE, FENCE, WHOLE, START, END, CONTEXT, *PLACES])}
VOCAB_SIZE = 258 + len(IDS)
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}PICTURE{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
WORDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llava": (
        CLIPImageProcessorPil,
        {"size": {"shortest_edge": SQUARE}, "crop_size": {"height": SQUARE, "width": SQUARE}},
    ),
    "smolvlm": (
        SmolVLMImageProcessorPil,
        {"size": {"longest_edge": 2 * SQUARE}, "max_image_size": {"longest_edge": SQUARE}},
    ),
    "internvl": (
        GotOcr2ImageProcessorPil,
        {"crop_to_patches": True, "max_patches": 4, "size": {"height": SQUARE, "width": SQUARE}},
    ),
}
TYPES = {"llava": "CLIPImageProcessor", "smolvlm": "SmolVLMImageProcessor", "internvl": "GotOcr2ImageProcessor"}
Part = str | Image.Image


@dataclass(frozen=True, slots=True)
class FixedResolutionCheckpoint:
    """A checkpoint, and transformers' model of it."""

    kind: str
    folder: Path
    model: Any

    @property
    def picture(self) -> str:
        """Template text of one image."""
        return picture_of(self.kind)

    def says(self, *parts: Part) -> list[int]:
        """The greedy tokens of transformers."""
        theirs, words = WORDS[self.kind]
        pictures = [part for part in parts if isinstance(part, Image.Image)]
        ids: list[int] = []
        for part in parts:
            ids += list(part.encode()) if isinstance(part, str) else self._stands_for(theirs(**words), part)
        given: dict[str, torch.Tensor] = {}
        if pictures:
            several = [pictures] if self.kind == "smolvlm" else pictures
            made = theirs(**words)(images=several, return_tensors="pt")
            given = {name: made[name] for name in made if name in ("pixel_values", "pixel_attention_mask")}
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

    def _stands_for(self, processor: Any, picture: Image.Image) -> list[int]:
        if self.kind == "llava":
            return [IDS[IMAGE]] * 16
        if self.kind == "internvl":
            count = len(processor(images=[picture], return_tensors="np")["pixel_values"])
            return [IDS[START], *[IDS[CONTEXT]] * 4 * count, IDS[END]]
        made = processor(images=[picture], return_tensors="np", return_row_col_info=True)
        written: Any = get_image_prompt_string
        said = written(made["rows"][0][0], made["cols"][0][0], 4, FENCE, IMAGE, WHOLE)
        said = said.replace("\n", "10 ")
        for word, number in IDS.items():
            said = said.replace(word, f"{number} ")
        return list(map(int, said.split()))


def picture_of(kind: str) -> str:
    return CONTEXT if kind == "internvl" else IMAGE


def make_fixed_resolution_checkpoint(kind: str, folder: Path, tokenizer_folder: Path) -> FixedResolutionCheckpoint:
    """Write the checkpoint with that tokenizer and additional image tokens."""
    text = {"vocab_size": VOCAB_SIZE, "eos_token_id": 256, "max_position_embeddings": 512}
    model = the_reference(kind, text=text, image_token_id=IDS[picture_of(kind)])
    model.save_pretrained(folder)
    words = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    words["added_tokens"] += [{"id": number, "content": word, **token} for word, number in IDS.items()]
    (folder / "tokenizer.json").write_text(json.dumps(words))
    config = json.loads((tokenizer_folder / "tokenizer_config.json").read_text()) | {
        "chat_template": TEMPLATE.replace("PICTURE", picture_of(kind))
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    processor = WORDS[kind][1] | {"image_processor_type": TYPES[kind]}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return FixedResolutionCheckpoint(kind, folder, model)
