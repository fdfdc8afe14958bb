"""Where the tokens of a prompt with images are, to a rope of three positions per token (Qwen2-VL, arXiv:2409.12191,
section 2.1): over time, height and width. Pure.

```
token      text  text | image of 2 x 3 tokens        | text  text | output …
time       0     1    | 2   2   2   2   2   2        | 5     6    | 7
height     0     1    | 2   2   2   3   3   3        | 5     6    | 7
width      0     1    | 2   3   4   2   3   4        | 5     6    | 7
```
Text goes on behind the longer side of an image or a video, however long it lasts: as far from the tokens' own places as
`delta` says of all that comes after the prompt. What is generated counts on as the prompt's own text does, so that a
later prompt that holds it as text finds it in the prefix cache with the positions that it would have itself.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab_engine.multimodal.items import MultiModalItem, Span

Axes = tuple[list[int], list[int], list[int]]
"""Over time, height and width: a position per token each."""


@dataclass(frozen=True, slots=True)
class RopePositions:
    """Those of one request. `delta` is what a token behind the prompt has beyond its place among the tokens."""

    prompt: Axes
    delta: int

    @classmethod
    def of(
        cls, spans: Sequence[Span], num_prompt_tokens: int, *, merge_size: int, tokens_per_second: int
    ) -> "RopePositions":
        """`merge_size`: patches along a side of a token; `tokens_per_second`: how fast time goes in videos."""
        axes: Axes = ([], [], [])
        position = 0
        for span in spans:
            position = _add_text(axes, span.offset, position)
            for axis, places in zip(axes, _places(span.item, merge_size, tokens_per_second), strict=True):
                axis.extend([position + place for place in places])
            position += max(span.item.grid[1:]) // merge_size
        behind = _add_text(axes, num_prompt_tokens, position)
        return cls(axes, behind - num_prompt_tokens)

    def between(self, start: int, end: int) -> Axes:
        """Those of tokens [start, end), of the prompt or behind it."""
        behind = range(max(start, len(self.prompt[0])) + self.delta, end + self.delta)
        time, height, width = ([*axis[start:end], *behind] for axis in self.prompt)
        return time, height, width


def _add_text(axes: Axes, end: int, position: int) -> int:
    """Go on with text up to token `end`. Returns the position behind it."""
    behind = position + end - len(axes[0])
    for axis in axes:
        axis.extend(range(position, behind))
    return behind


def _places(item: MultiModalItem, merge_size: int, tokens_per_second: int) -> Axes:
    """Where its tokens are within the item, in their order."""
    times, tall, wide = item.grid[0], item.grid[1] // merge_size, item.grid[2] // merge_size
    pace = _single(tokens_per_second * item.seconds_per_step) if item.modality == "video" else 1.0
    in_step = range(tall * wide)
    return (
        [int(_single(step * pace)) for step in range(times) for _ in in_step],
        [place // wide for _ in range(times) for place in in_step],
        [place % wide for _ in range(times) for place in in_step],
    )


def _single(number: float) -> float:
    """Rounded as float32 is, in which the reference computes: the next whole number below may hang on it."""
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded
