"""What a tower is in numbers: a checkpoint's `vision_config` as a typed value."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A tower of Qwen2.5-VL's kind: attention within windows, in some layers within the whole picture."""

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
    window_size: int
    """Pixels along a side of a window."""
    whole_layers: frozenset[int]
    """Layers whose patches see all of their time step."""
    output_size: int
    """The text half's hidden size."""
    tokens_per_second: int
    """How far apart positions over time are, of a video."""

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
    def tokens_per_window(self) -> int:
        """Along a side of a window."""
        return self.window_size // self.patch_size // self.merge_size
