"""What an image or a video is to a request: where in the prompt it stands, how many tokens it takes, what a tower reads
of it. Plain values that travel in messages; sizes and hashes are what a scheduler needs of them.

```
chat parts      "Look: "        image          " and "      video
token ids       | 5 | 81 | pad pad pad pad | 12 | pad pad pad pad pad pad | 7 |      placeholders are expanded
spans                    |---- offset 2 ---|    |------- offset 7 --------|
embeddings      from the table | from the tower | table |   from the tower  | table
```
Every token of a span is a placeholder: its embedding is a row of what the tower makes of the item, in order. What
stands around an item (a token that begins vision, one that ends it) is text.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from trimtab_engine.errors import InvalidRequest

Modality = Literal["image", "video"]
MODALITIES: tuple[Modality, ...] = get_args(Modality)
MEANINGS_BYTES = 4 * 256  # of one channel: a float32 for each value of 8 bits


class Patches(msgspec.Struct, array_like=True, frozen=True):
    """What a processor made of one item: a row per patch, in the tower's own order (patches.py makes numbers of it)."""

    row_size: int
    """Values per patch: channels, frames per patch, height and width of a patch multiplied, channels slowest."""
    values: bytes
    """8 bits each, row after row, as pictures have them: a quarter of what the tower reads."""
    meanings: bytes
    """float32 [channels, 256], little-endian: what a value of a channel is to the tower, normalised."""

    @property
    def num_rows(self) -> int:
        return len(self.values) // max(1, self.row_size)

    @property
    def num_channels(self) -> int:
        return len(self.meanings) // MEANINGS_BYTES

    @property
    def is_whole(self) -> bool:
        """Whether rows and table are whole, and fit each other."""
        channels = self.num_channels
        return (
            channels > 0
            and len(self.meanings) == channels * MEANINGS_BYTES
            and self.row_size > 0
            and self.row_size % channels == 0
            and len(self.values) % self.row_size == 0
        )


class MultiModalItem(msgspec.Struct, array_like=True, frozen=True):
    """One image or one video. Complete when built: whoever has the patches elsewhere puts them in before a core
    schedules it."""

    modality: Modality
    content_hash: bytes
    """Names what the tower makes of it: a digest over the content, the model and how it was processed."""
    num_tokens: int
    """Placeholders in the prompt, and rows of embeddings: patches after merging."""
    grid: tuple[int, int, int]
    """Patches over time, height and width, before merging: an image has one over time."""
    patches: Patches | None
    """None: the core has them by content_hash, from an item before it in the prompt or from a request before."""
    seconds_per_step: float = 1.0
    """Of a video: how long one patch over time lasts. It sets how far apart positions over time are."""
    tiles: tuple[int, int] | None = None
    """Rows and columns of a picture that is cut into tiles, before each becomes an item of its own (tiles.py); `grid`
    then counts tiles over time."""

    @property
    def num_patches(self) -> int:
        """What the tower computes for it."""
        time, height, width = self.grid
        return time * height * width


class Span(msgspec.Struct, array_like=True, frozen=True):
    """An item in a prompt whose placeholders have been expanded: tokens [offset, end)."""

    offset: int
    item: MultiModalItem

    @property
    def end(self) -> int:
        return self.offset + self.item.num_tokens


def check_spans(spans: Sequence[Span], num_prompt_tokens: int) -> None:
    """Raise InvalidRequest unless the spans lie in the prompt, one after the other, each of one token or more and with
    as many patches as its grid says."""
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
