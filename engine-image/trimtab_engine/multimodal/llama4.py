"""Image processing for Llama 4 (Meta 2025), from the checkpoint's settings: tiles of one size.

An image is resized to fit one of the canvases made of tiles, keeping its aspect ratio, and padded with black; an image
of several tiles also has a thumbnail, resized to one tile:

```
┌────┬────┐          rows of the tiles, row by row, then of the thumbnail; within a tile as drawn in qwen2_5_vl.py:
│ 0  │ 1 ▒│          patches of one token are next to each other
├────┼────┤
│ 2  │ 3 ▒│  and 4: the thumbnail
└────┴────┘
```
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trimtab_engine.errors import ModelError
from trimtab_engine.multimodal.patches import cut_into_rows
from trimtab_engine.multimodal.processor_settings import NUM_LEVELS, channels, number, size_of, whole

BILINEAR = 2  # Pillow's number for it, which checkpoints have
KNOWN_TYPES = ("Llama4ImageProcessor", "Llama4ImageProcessorFast")
MAX_TILES = 64  # of an image: four times the published number
MERGE_SIZE = 2  # patches along a side of a token: the vision encoder's pixel shuffle by 0.5
Grid = tuple[int, int, int]
Size = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True, slots=True)
class TileProcessor:
    """Settings of image processing: images to rows of patches, tile after tile."""

    patch_size: int
    tile_size: int = 336
    max_tiles: int = 16
    fills_canvas: bool = False
    """True if images are enlarged to the largest canvas that fits their aspect ratio."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    rescale_factor: float = 1 / 255
    frames_per_patch: int = 1

    @classmethod
    def parse(cls, words: Mapping[str, Any], where: str, *, patch_size: int) -> "TileProcessor":
        """Read preprocessor_config.json. `patch_size`: of the vision encoder.

        Raises:
            ModelError: a setting is not supported.
        """
        for step in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if words.get(step, True) is not True:
                raise ModelError(f"{where}: {step} is {words[step]!r}; only true is built")
        if words.get("resample", BILINEAR) != BILINEAR:
            raise ModelError(f"{where}: resample is {words['resample']!r}; only {BILINEAR} (bilinear) is built")
        plain = cls(patch_size)
        size = size_of(words, where)
        height = whole(size, "height", plain.tile_size, where)
        found = cls(
            patch_size,
            tile_size=height,
            max_tiles=whole(words, "max_patches", plain.max_tiles, where),
            fills_canvas=words.get("resize_to_max_canvas", False) is True,
            mean=channels(words, "image_mean", plain.mean, where),
            std=channels(words, "image_std", plain.std, where),
            rescale_factor=number(words.get("rescale_factor", plain.rescale_factor), "rescale_factor", where),
        )
        if whole(size, "width", height, where) != height or height % (patch_size * MERGE_SIZE):
            raise ModelError(
                f"{where}: size is {dict(size)}; tiles must be square, a multiple of {patch_size * MERGE_SIZE} pixels"
            )
        if found.max_tiles > MAX_TILES:
            raise ModelError(f"{where}: max_patches is {found.max_tiles}; at most {MAX_TILES} are built")
        return found

    @property
    def row_size(self) -> int:
        """Values per patch."""
        return len(self.mean) * self.patch_size**2

    def tiles(self, height: int, width: int) -> Size:
        """Rows and columns of the canvas for an image of this size: that which shrinks it least, and enlarges it least
        where none shrinks it; of equal ones the smallest.
        """
        scales = {
            canvas: min(
                np.float32(canvas[0] * self.tile_size) / np.float32(height),
                np.float32(canvas[1] * self.tile_size) / np.float32(width),
            )
            for canvas in self._canvases()
        }
        enlarging = [scale for scale in scales.values() if scale >= 1]
        best = (max if self.fills_canvas else min)(enlarging) if enlarging else max(scales.values())
        return min(
            (canvas for canvas, scale in scales.items() if scale == best), key=lambda canvas: canvas[0] * canvas[1]
        )

    def _canvases(self) -> list[Size]:
        """Return the canvases in transformers' order, which takes the first of equals: by shape, larger ones first."""
        by_shape: dict[float, list[Size]] = {}
        for count in range(self.max_tiles, 0, -1):
            for rows in range(1, count + 1):
                if count % rows == 0:
                    by_shape.setdefault(rows * rows / count, []).append((rows, count // rows))
        return [canvas for canvases in by_shape.values() for canvas in canvases]

    def size(self, height: int, width: int) -> Size:
        """Height and width after resizing, within the canvas: nearly the same shape."""
        rows, columns = self.tiles(height, width)
        tall, wide = rows * self.tile_size, columns * self.tile_size
        if not self.fills_canvas:
            tall, wide = min(max(height, self.tile_size), tall), min(max(width, self.tile_size), wide)
        by_height, by_width = tall / height, wide / width
        if by_width < by_height:
            tall = min(floor(height * by_width), tall)
        else:
            wide = min(floor(width * by_height), wide)
        return max(1, tall), max(1, wide)

    def grid(self, num_frames: int, height: int, width: int) -> Grid:
        """Tiles of an image of this size, the whole image among them, and patches along a tile's sides."""
        rows, columns = self.tiles(height, width)
        side = self.tile_size // self.patch_size
        return num_frames * (rows * columns + (rows * columns > 1)), side, side

    def num_tokens(self, grid: Grid) -> int:
        """Rows of embeddings of all tiles."""
        return grid[0] * grid[1] * grid[2] // MERGE_SIZE**2

    def rows(self, pictures: Sequence[Image.Image]) -> NDArray[np.uint8]:
        """One RGB image -> [num_patches, channels * patch * patch] uint8."""
        (picture,) = pictures
        rows, columns = self.tiles(picture.height, picture.width)
        tall, wide = self.size(picture.height, picture.width)
        tile = self.tile_size
        canvas = np.zeros((rows * tile, columns * tile, 3), dtype=np.uint8)
        canvas[:tall, :wide] = np.asarray(picture.resize((wide, tall), resample=Image.Resampling.BILINEAR))
        cut = canvas.reshape(rows, tile, columns, tile, 3).swapaxes(1, 2).reshape(-1, tile, tile, 3)
        if len(cut) > 1:
            squeezed = np.asarray(picture.resize((tile, tile), resample=Image.Resampling.BILINEAR))
            cut = np.concatenate([cut, squeezed[None]])
        return cut_into_rows(cut, patch_size=self.patch_size, merge_size=MERGE_SIZE, frames_per_patch=1)

    def meanings(self) -> NDArray[np.float32]:
        """Return [channels, 256] float32: the encoder's input for each 8-bit value; rounded to bfloat16 after each
        step, as in transformers.
        """
        levels = _bfloat16(np.arange(NUM_LEVELS, dtype=np.float32) * np.float32(self.rescale_factor))
        mean, std = (_bfloat16(np.array(each, dtype=np.float32))[:, None] for each in (self.mean, self.std))
        return _bfloat16(_bfloat16(levels[None, :] - mean) / std)


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounded to the nearest of bfloat16, to the even one of two."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)
