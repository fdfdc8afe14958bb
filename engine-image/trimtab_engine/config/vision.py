"""What a tower is in numbers: a checkpoint's `vision_config` as a typed value."""

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
    """None: it has none, but tiles. Its text half then counts positions over time, height and width."""
    tiles: Tiles | None = None

    @property
    def row_size(self) -> int:
        """Numbers per patch."""
        return self.num_channels * self.frames_per_patch * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        return self.merge_size**2

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def largest_item_tokens(self) -> int | None:
        """Of what is computed at once; None: as large as the picture."""
        return None if self.tiles is None else (self.tiles.size // self.patch_size // self.merge_size) ** 2


def windows_of(vision: VisionConfig) -> Windows:
    """Those of a tower that has some."""
    assert vision.windows is not None
    return vision.windows


def tokens_per_window(vision: VisionConfig) -> int:
    """Along a side of a window."""
    return windows_of(vision).size // vision.patch_size // vision.merge_size


def tiles_of(vision: VisionConfig) -> Tiles:
    """Those of a tower that looks at tiles."""
    assert vision.tiles is not None
    return vision.tiles
