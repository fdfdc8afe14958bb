"""Images and videos of a request: their position in the prompt, number of tokens, and input for the vision encoder.
Plain values that are sent in messages; the scheduler uses their sizes and hashes.

```
chat parts      "Look: "        image          " and "      video
token ids       | 5 | 81 | pad pad pad pad | 12 | pad pad pad pad pad pad | 7 |      placeholders are expanded
spans                    |---- offset 2 ---|    |------- offset 7 --------|
embeddings      from the table |  vision encoder | table |  vision encoder   | table
```
Every token of a span is a placeholder: its embedding is a row of the encoder output, in order. Delimiters around an
item (vision start and end tokens) are text.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from trimtab_engine.errors import InvalidRequest

Modality = Literal["image", "video"]
MODALITIES: tuple[Modality, ...] = get_args(Modality)
MEANINGS_BYTES = 4 * 256  # of one channel: a float32 for each value of 8 bits


class Patches(msgspec.Struct, array_like=True, frozen=True):
    """Processor output for one item: a row per patch, in the encoder's own order (patches.py converts it to
    numbers).
    """

    row_size: int
    """Values per patch: channels, frames per patch, height and width of a patch multiplied, channels slowest."""
    values: bytes
    """8-bit values, row-major, as in images: a quarter of the size of the encoder's input."""
    meanings: bytes
    """float32 [channels, 256], little-endian: the normalised encoder input for each 8-bit value."""

    @property
    def num_rows(self) -> int:
        return len(self.values) // max(1, self.row_size)

    @property
    def num_channels(self) -> int:
        return len(self.meanings) // MEANINGS_BYTES

    @property
    def is_whole(self) -> bool:
        """Return True if rows and table are complete and have matching sizes."""
        channels = self.num_channels
        return (
            channels > 0
            and len(self.meanings) == channels * MEANINGS_BYTES
            and self.row_size > 0
            and self.row_size % channels == 0
            and len(self.values) % self.row_size == 0
        )


class MultiModalItem(msgspec.Struct, array_like=True, frozen=True):
    """One image or one video. Complete when built: patches kept elsewhere are restored before a core schedules the
    item.
    """

    modality: Modality
    content_hash: bytes
    """Key of the encoder output: a digest of the content, the model and the processing."""
    num_tokens: int
    """Placeholders in the prompt, and rows of embeddings: patches after merging."""
    grid: tuple[int, int, int]
    """Patches over time, height and width, before merging: an image has one over time."""
    patches: Patches | None
    """None if the core has them by content_hash, from an earlier item or request."""
    seconds_per_step: float = 1.0
    """Seconds per temporal patch of a video. Determines the distance of positions over time."""
    tiles: tuple[int, int] | None = None
    """Rows and columns of an image that is split into tiles, before each becomes an item (tiles.py); `grid` then counts
    tiles over time."""

    @property
    def num_patches(self) -> int:
        """Number of embeddings that the vision encoder computes."""
        time, height, width = self.grid
        return time * height * width


class Span(msgspec.Struct, array_like=True, frozen=True):
    """An item in a prompt with expanded placeholders: tokens [offset, end)."""

    offset: int
    item: MultiModalItem

    @property
    def end(self) -> int:
        return self.offset + self.item.num_tokens


def check_spans(spans: Sequence[Span], num_prompt_tokens: int) -> None:
    """Raise InvalidRequest unless the spans are inside the prompt, in order, non-empty, and have the number of patches
    of their grids.
    """
    free_from = 0
    for number, span in enumerate(spans):
        item = span.item
        which = f"multi-modal item {number} ({item.modality})"
        if item.num_tokens < 1 or min(item.grid) < 1:
            raise InvalidRequest(
                f"{which} has {item.num_tokens} tokens over a grid of {item.grid}; both must be above 0"
            )
        if item.patches is not None and not item.patches.is_whole:
            raise InvalidRequest(f"{which} brings patches that are not whole: rows of {item.patches.row_size} values")
        if item.patches is not None and item.patches.num_rows != item.num_patches:
            raise InvalidRequest(
                f"{which} brings {item.patches.num_rows} patches, but its grid {item.grid} has {item.num_patches}"
            )
        if not free_from <= span.offset or span.end > num_prompt_tokens:
            raise InvalidRequest(
                f"{which} takes tokens {span.offset} to {span.end}, which must lie between {free_from}, where the item "
                f"before it ends, and the prompt's end at {num_prompt_tokens}"
            )
        free_from = span.end
