"""What a tower is in numbers: a checkpoint's `vision_config` as a typed value."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """How a tower of Qwen2.5-VL's kind looks at a picture: patches see their window, in some layers the whole."""

    size: int
    """Pixels along a side of a window."""
    whole_layers: frozenset[int]
    """Layers whose patches see all of their time step."""
    tokens_per_second: int
    """How far apart positions over time are, of a video."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How a tower of Llama 4's kind looks at a picture: as tiles of one size, each for itself."""

    size: int
    """Pixels along a side of a tile."""
    projector_size: int
    """Width of what the adapter makes of a token, before it becomes an embedding of the text half."""
    rope_theta: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Squares:
    """How a tower that transformers' code computes looks at a picture: as squares of one size, each for itself."""

    size: int
    """Pixels along a side of a square."""
    num_tokens: int
    """What becomes of each."""
    transformers_config: str
    """config.json as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """What computes images and videos."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_channels: int
    patch_size: int
    """Pixels along a side of a patch."""
    frames_per_patch: int
    merge_size: int
    """Patches along a side of what becomes one token."""
    output_size: int
    """The text half's hidden size."""
    windows: Windows | None = None
    """None: it has none, but tiles or squares. Its text half then counts positions over time, height and width."""
    tiles: Tiles | None = None
    squares: Squares | None = None
    """What comes to such a tower is a square as one row of pixels."""

    @property
    def row_size(self) -> int:
        """Numbers per row of what comes: a patch, or a square."""
        side = self.patch_size if self.squares is None else self.squares.size
        return self.num_channels * self.frames_per_patch * side**2

    def num_tokens(self, grid: tuple[int, int, int]) -> int | None:
        """What becomes of an item with this grid; None: it is none of this tower's."""
        if self.squares is not None:
            return self.squares.num_tokens if grid == (1, 1, 1) else None
        time, height, width = grid
        if height % self.merge_size or width % self.merge_size:
            return None
        return time * height * width // self.patches_per_token

    def extreme_grids(self, most_tokens: int) -> list[tuple[int, int, int]]:
        """Those of the smallest and the largest item of at most so many tokens; nothing where even the smallest has
        more."""
        if self.squares is not None:
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
        """Of what is computed at once; None: as large as the picture."""
        if self.squares is not None:
            return self.squares.num_tokens
        return None if self.tiles is None else (self.tiles.size // self.patch_size // self.merge_size) ** 2


def windows_of(vision: VisionConfig) -> Windows:
    """Those of a tower that has some."""
    assert vision.windows is not None
    return vision.windows


def tokens_per_window(vision: VisionConfig) -> int:
    """Along a side of a window."""
    return windows_of(vision).size // vision.patch_size // vision.merge_size


def squares_of(vision: VisionConfig) -> Squares:
    """Those of a tower that transformers' code computes."""
    assert vision.squares is not None
    return vision.squares


def tiles_of(vision: VisionConfig) -> Tiles:
    """Those of a tower that looks at tiles."""
    assert vision.tiles is not None
    return vision.tiles
