"""Token positions of a prompt with images, for a rope with three positions per token (Qwen2-VL, arXiv:2409.12191,
section 2.1): time, height and width. Pure.

```
token      text  text | image of 2 x 3 tokens        | text  text | output …
time       0     1    | 2   2   2   2   2   2        | 5     6    | 7
height     0     1    | 2   2   2   3   3   3        | 5     6    | 7
width      0     1    | 2   3   4   2   3   4        | 5     6    | 7
```
Text continues after the longer side of an image or a video, however long it lasts: `delta` is the difference between
position and token index for all tokens after the prompt. Generated tokens continue like text of the prompt, so that a
later prompt with the same text finds it in the prefix cache with the same positions.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab_engine.multimodal.items import MultiModalItem, Span

Axes = tuple[list[int], list[int], list[int]]
"""Over time, height and width: a position per token each."""


@dataclass(frozen=True, slots=True)
class RopePositions:
    """Positions of one request. `delta`: difference between the position and the index of tokens after the prompt."""

    prompt: Axes
    delta: int

    @classmethod
    def of(
        cls, spans: Sequence[Span], num_prompt_tokens: int, *, merge_size: int, tokens_per_second: int
    ) -> "RopePositions":
        """Position settings. `merge_size`: patches along a side of a token; `tokens_per_second`: temporal positions per
        second of video.
        """
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
        """Return positions of tokens [start, end), in or after the prompt."""
        behind = range(max(start, len(self.prompt[0])) + self.delta, end + self.delta)
        time, height, width = ([*axis[start:end], *behind] for axis in self.prompt)
        return time, height, width


def _add_text(axes: Axes, end: int, position: int) -> int:
    """Append text positions up to token `end`. Return the next position."""
    behind = position + end - len(axes[0])
    for axis in axes:
        axis.extend(range(position, behind))
    return behind


def _places(item: MultiModalItem, merge_size: int, tokens_per_second: int) -> Axes:
    """Return positions of an item's tokens relative to its start, in order."""
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
