"""Images that are split into tiles: each tile is a separate item, and text tokens describe the layout. Pure.

```
written      5 [image] 7                                           written by the chat template
Llama 4
two tiles    5 [start] [patch]… [across] [patch]… [down] [image] [patch]… [end] 7
                         tile 0           tile 1                   the thumbnail
one tile     5 [start] [image] [patch]… [end] 7
Idefics3, SmolVLM
two tiles    5 [around] [1, 1] [image]… [around] [1, 2] [image]… [lines] [around] [whole] [image]… [around] 7
one tile     5 [around] [whole] [image]… [around] 7
InternVL
two tiles    5 [start] [image]… [image]… [image]… [end] 7
```
Each tile has one [patch] or [image] token, which is expanded like any placeholder (placeholders.py).
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from trimtab_engine.errors import InvalidRequest
from trimtab_engine.multimodal.items import MultiModalItem, Patches

NAME_BYTES = 16  # of a tile: an image has up to 17, whose names are part of each request


@dataclass(frozen=True, slots=True)
class TileTokens(ABC):
    """The tokens that are written for an image and around its tiles."""

    picture: int
    """The token that the chat template writes."""

    def written(
        self, token_ids: Sequence[int], pictures: Sequence[MultiModalItem]
    ) -> tuple[list[int], list[MultiModalItem]]:
        """The prompt with the tokens of each image's tiles, and the tiles. Raises InvalidRequest unless the template
        has written a token for each image.
        """
        num_written = token_ids.count(self.picture)
        if num_written != len(pictures):
            raise InvalidRequest(
                f"the prompt has places for {num_written} images, but brings {len(pictures)}; a text must not hold the "
                f"token that stands for an image, and the chat template must write one for each"
            )
        left = iter(pictures)
        rewritten: list[int] = []
        tiles: list[MultiModalItem] = []
        for token_id in token_ids:
            if token_id != self.picture:
                rewritten.append(token_id)
                continue
            picture = next(left)
            rewritten += self.around(*(picture.tiles or (1, 1)))
            tiles += tiles_of(picture)
        return rewritten, tiles

    @abstractmethod
    def around(self, rows: int, columns: int) -> Iterator[int]:
        """Return the tokens of an image with this grid of tiles."""


@dataclass(frozen=True, slots=True)
class Llama4Tokens(TileTokens):
    """Llama 4's layout: `picture` also precedes the thumbnail."""

    start: int
    end: int
    patch: int
    across: int
    """Between two tiles of a row."""
    down: int
    """Token after a row."""

    def around(self, rows: int, columns: int) -> Iterator[int]:
        """See TileTokens."""
        yield self.start
        if rows * columns > 1:
            for _ in range(rows):
                yield self.patch
                for _ in range(columns - 1):
                    yield self.across
                    yield self.patch
                yield self.down
        yield self.picture
        yield self.patch
        yield self.end


@dataclass(frozen=True, slots=True)
class InternVLTokens(TileTokens):
    """InternVL's layout, without tokens between tiles: `picture` also represents a tile."""

    start: int
    end: int

    def around(self, rows: int, columns: int) -> Iterator[int]:
        """See TileTokens."""
        count = rows * columns
        yield from (self.start, *[self.picture] * (count + (count > 1)), self.end)


@dataclass(frozen=True, slots=True)
class Idefics3Tokens(TileTokens):
    """Layout of Idefics3 and SmolVLM, with the row and column of each tile: `picture` also represents a tile."""

    fence: int
    """Token before each tile, and after the last one."""
    whole: int
    """Names the image as a whole."""
    places: Mapping[tuple[int, int], int]
    """Name a tile's row and column, both counted from 1."""
    line: Sequence[int]
    """The end of a row of tiles, as text."""
    last_lines: Sequence[int]
    """That of the last row, and an empty line."""

    def around(self, rows: int, columns: int) -> Iterator[int]:
        """See TileTokens. Raises InvalidRequest for a place that the tokenizer has no name for."""
        if rows * columns > 1:
            for row in range(1, rows + 1):
                for column in range(1, columns + 1):
                    yield self.fence
                    yield self._place(row, column)
                    yield self.picture
                yield from self.line if row < rows else self.last_lines
        yield self.fence
        yield self.whole
        yield self.picture
        yield self.fence

    def _place(self, row: int, column: int) -> int:
        token_id = self.places.get((row, column))
        if token_id is None:
            raise InvalidRequest(
                f"an image is cut into squares, of which this model's tokenizer has no name for row {row}, column "
                f"{column}; send an image with a less extreme aspect ratio"
            )
        return token_id


def tiles_of(picture: MultiModalItem) -> list[MultiModalItem]:
    """Return its tiles as items, each with its own part of the patches and its own key."""
    count, height, width = picture.grid
    return [
        msgspec.structs.replace(
            picture,
            content_hash=hashlib.sha256(picture.content_hash + number.to_bytes(2, "big")).digest()[:NAME_BYTES],
            num_tokens=picture.num_tokens // count,
            grid=(1, height, width),
            patches=None if picture.patches is None else _part(picture.patches, number, count),
            seconds_per_step=1,  # it is no video; a whole number is one byte on the wire, not nine
            tiles=None,
        )
        for number in range(count)
    ]


def _part(patches: Patches, number: int, count: int) -> Patches:
    size = len(patches.values) // count
    return Patches(patches.row_size, patches.values[number * size : (number + 1) * size], patches.meanings)
