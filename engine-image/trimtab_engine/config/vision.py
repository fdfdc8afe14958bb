"""Configuration of a vision encoder: a checkpoint's `vision_config` as a typed value."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionWindows:
    """Windowed attention of Qwen2.5-VL's encoder: patches attend within their window, in some layers to the whole
    image.
    """

    size: int
    """Pixels along a side of a window."""
    whole_layers: frozenset[int]
    """Layers with full attention within a time step."""
    tokens_per_second: int
    """Distance of time positions in a video."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileLayout:
    """Tiling of Llama 4's encoder: an image is split into tiles of one size, each encoded separately."""

    size: int
    """Pixels along a side of a tile."""
    projector_size: int
    """Width of the adapter's output, before it becomes an embedding of the language model."""
    rope_theta: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedResolution:
    """Fixed-resolution input of an encoder that runs on transformers' code: images of one size, each encoded
    separately.
    """

    size: int
    """Pixels along a side of a square."""
    num_tokens: int
    """Tokens per fixed-resolution image."""
    transformers_config: str
    """config.json as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Configuration of the encoder of images and videos."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_channels: int
    patch_size: int
    """Pixels along a side of a patch."""
    frames_per_patch: int
    merge_size: int
    """Side of the square of patches merged into one token."""
    output_size: int
    """The text half's hidden size."""
    windows: VisionWindows | None = None
    """None for encoders with tiles or fixed resolution. With windows, the language model counts positions over time,
    height and width.
    """
    tiles: TileLayout | None = None
    fixed_resolution: FixedResolution | None = None
    """Input of such an encoder: one image as one row of pixels."""

    @property
    def row_size(self) -> int:
        """Numbers per input row: a patch or a fixed-resolution image."""
        side = self.patch_size if self.fixed_resolution is None else self.fixed_resolution.size
        return self.num_channels * self.frames_per_patch * side**2

    def num_tokens(self, grid: tuple[int, int, int]) -> int | None:
        """Return the tokens of an item with this grid. None if the grid is invalid for this encoder."""
        if self.fixed_resolution is not None:
            return self.fixed_resolution.num_tokens if grid == (1, 1, 1) else None
        time, height, width = grid
        if height % self.merge_size or width % self.merge_size:
            return None
        return time * height * width // self.patches_per_token

    def extreme_grids(self, most_tokens: int) -> list[tuple[int, int, int]]:
        """Return the grids of the smallest and the largest item of at most `most_tokens` tokens. Empty if even the
        smallest has more.
        """
        if self.fixed_resolution is not None:
            grids = [(1, 1, 1)]
        elif self.tiles is not None:
            side = self.tiles.size // self.patch_size
            grids = [(1, side, side)]
        else:
            tall = math.isqrt(most_tokens)
            sides = [(1, 1), (tall, most_tokens // tall)]
            grids = [(1, height * self.merge_size, width * self.merge_size) for height, width in sides]
        return [grid for grid in grids if (self.num_tokens(grid) or 0) <= most_tokens]

    @property
    def num_axes(self) -> int:
        """Positions of each of the text half's tokens: one, or over time, height and width."""
        return 1 if self.windows is None else 3

    @property
    def patches_per_token(self) -> int:
        return self.merge_size**2

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def largest_item_tokens(self) -> int | None:
        """Maximum tokens computed at once. None if it depends on the image."""
        if self.fixed_resolution is not None:
            return self.fixed_resolution.num_tokens
        return None if self.tiles is None else (self.tiles.size // self.patch_size // self.merge_size) ** 2


def windows_of(vision: VisionConfig) -> VisionWindows:
    """Return the windows of an encoder that has some."""
    assert vision.windows is not None
    return vision.windows


def tokens_per_window(vision: VisionConfig) -> int:
    """Along a side of a window."""
    return windows_of(vision).size // vision.patch_size // vision.merge_size


def fixed_resolution_of(vision: VisionConfig) -> FixedResolution:
    """Return the fixed-resolution input of an encoder that runs on transformers' code."""
    assert vision.fixed_resolution is not None
    return vision.fixed_resolution


def tiles_of(vision: VisionConfig) -> TileLayout:
    """Return the tiling of an encoder that uses tiles."""
    assert vision.tiles is not None
    return vision.tiles
