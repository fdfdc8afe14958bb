"""Image processing for Qwen2-VL and Qwen2.5-VL (arXiv:2409.12191, section 2.1), from the checkpoint's settings.

An image is resized so that its sides are multiples of a token's side and its area is within bounds, then split into
patches, those of one token next to each other:

```
 ┌──┬──┐┌──┬──┐      rows 0 1 2 3 | 4 5 6 7 | 8 …         a row: [channels, frames, patch, patch], 8 bits each
 │0 │1 ││4 │5 │                   one token each           frames: 2; an image is both of them
 │2 │3 ││6 │7 │
 └──┴──┘└──┴──┘
```
Rows are sent as 8-bit values: a quarter of the bytes of float32. A table of 256 numbers per channel (`meanings`)
converts them to the encoder's input, equal to the rescaling and normalisation of transformers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trimtab_engine.errors import InvalidRequest, ModelError
from trimtab_engine.multimodal.patches import cut_into_rows, meanings_of
from trimtab_engine.multimodal.processor_settings import channels, number, size_of, whole

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
MAX_ASPECT_RATIO = 200
BICUBIC = 3  # Pillow's number for it, which checkpoints have
KNOWN_TYPES = (
    "Qwen2VLImageProcessor",
    "Qwen2VLImageProcessorFast",
    "Qwen2VLImageProcessorPil",
    "Qwen2_5_VLImageProcessor",
)
Grid = tuple[int, int, int]
"""Patches over time, height and width."""


@dataclass(frozen=True, slots=True)
class PatchProcessor:
    """Settings of image processing. `min_pixels` and `max_pixels`: area after resizing."""

    patch_size: int = 14
    frames_per_patch: int = 2
    merge_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    rescale_factor: float = 1 / 255

    @classmethod
    def parse(cls, words: Mapping[str, Any], where: str) -> "PatchProcessor":
        """Read preprocessor_config.json, or `image_processor` of processor_config.json.

        Raises:
            ModelError: a setting is not supported.
        """
        kind = words.get("image_processor_type", KNOWN_TYPES[0])
        if kind not in KNOWN_TYPES:
            raise ModelError(f"{where}: image_processor_type {kind!r} is not supported; supported: {KNOWN_TYPES[0]}")
        for step in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if words.get(step, True) is not True:
                raise ModelError(f"{where}: {step} is {words[step]!r}; only true is built")
        if words.get("resample", BICUBIC) != BICUBIC:
            raise ModelError(f"{where}: resample is {words['resample']!r}; only {BICUBIC} (bicubic) is built")
        plain, size = cls(), size_of(words, where)
        found = cls(
            patch_size=whole(words, "patch_size", plain.patch_size, where),
            frames_per_patch=whole(words, "temporal_patch_size", plain.frames_per_patch, where),
            merge_size=whole(words, "merge_size", plain.merge_size, where),
            min_pixels=whole(words, "min_pixels", whole(size, "shortest_edge", plain.min_pixels, where), where),
            max_pixels=whole(words, "max_pixels", whole(size, "longest_edge", plain.max_pixels, where), where),
            mean=channels(words, "image_mean", plain.mean, where),
            std=channels(words, "image_std", plain.std, where),
            rescale_factor=number(words.get("rescale_factor", plain.rescale_factor), "rescale_factor", where),
        )
        if found.min_pixels > found.max_pixels or found.side**2 > found.max_pixels:
            raise ModelError(f"{where}: min_pixels {found.min_pixels} and max_pixels {found.max_pixels} leave no size")
        return found

    @property
    def row_size(self) -> int:
        """Values per patch."""
        return len(self.mean) * self.frames_per_patch * self.patch_size**2

    @property
    def side(self) -> int:
        """Side of a token in pixels."""
        return self.patch_size * self.merge_size

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after resizing: multiples of `side` within the bounds of the area, of nearly the same shape.
        Raises InvalidRequest for an image that is too long and thin.
        """
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise InvalidRequest(
                f"it has {width} x {height} pixels; one side may be {MAX_ASPECT_RATIO} times the other"
            )
        side = self.side
        tall, wide = round(height / side) * side, round(width / side) * side
        if tall * wide > self.max_pixels:
            by = math.sqrt(height * width / self.max_pixels)
            tall, wide = (max(side, math.floor(edge / by / side) * side) for edge in (height, width))
        elif tall * wide < self.min_pixels:
            by = math.sqrt(self.min_pixels / (height * width))
            tall, wide = (math.ceil(edge * by / side) * side for edge in (height, width))
        return tall, wide

    def grid(self, num_frames: int, height: int, width: int) -> Grid:
        """Return the number of patches of this number of frames of this size, before merging."""
        tall, wide = self.size(height, width)
        return math.ceil(num_frames / self.frames_per_patch), tall // self.patch_size, wide // self.patch_size

    def tiles(self, height: int, width: int) -> None:
        """It cuts no image into tiles."""

    def num_tokens(self, grid: Grid) -> int:
        """Placeholders in the prompt."""
        return math.prod(grid) // self.merge_size**2

    def rows(self, pictures: Sequence[Image.Image]) -> NDArray[np.uint8]:
        """RGB images of one size -> [num_patches, channels * frames * patch * patch] uint8. Where the last patch over
        time is not full, the last image is repeated: an image is a video of one.
        """
        grid = self.grid(len(pictures), pictures[0].height, pictures[0].width)
        times, tall, wide = grid
        patch, frames = self.patch_size, self.frames_per_patch
        size = (wide * patch, tall * patch)
        pixels = np.stack([np.asarray(p.resize(size, resample=Image.Resampling.BICUBIC)) for p in pictures])
        missing = times * frames - len(pictures)
        if missing:
            pixels = np.concatenate([pixels, np.repeat(pixels[-1:], missing, axis=0)])
        return cut_into_rows(pixels, patch_size=patch, merge_size=self.merge_size, frames_per_patch=frames)

    def meanings(self) -> NDArray[np.float32]:
        """Return [channels, 256] float32: the encoder's input for each 8-bit value, bit-identical to transformers."""
        return meanings_of(self.mean, self.std, self.rescale_factor)
