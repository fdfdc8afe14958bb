"""Common form of every trace: requests with their times and lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Arrival(NamedTuple):
    """One request. `at` is in seconds from the start of the replay; lengths are in tokens.

    `prefix` has ids of the leading blocks of the prompt, KEY_TOKENS tokens each: prompts share their prefix as far as
    the ids are equal. Empty: no known prefix.
    """

    at: float
    prompt: int
    output: int
    prefix: tuple[int, ...] = ()


KEY_TOKENS = 512  # of a Mooncake trace


@dataclass(frozen=True, slots=True)
class Trace:
    """Arrivals in order of time, and the seconds that they cover, including time before the first and after the last
    one.
    """

    name: str
    arrivals: list[Arrival]
    seconds: float
    notes: tuple[str, ...] = ()
    """Remarks about how the trace was read."""

    @property
    def has_prefixes(self) -> bool:
        """True if it has prefix ids."""
        return any(arrival.prefix for arrival in self.arrivals)


class PrefixIds:
    """Ids of prefixes from ids of blocks: equal only if all blocks before are equal too, as routers hash prompts."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int], int] = {}

    def ids_of(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the id of the prefix up to each block."""
        ids, last = [], -1
        for block in blocks:
            last = self._ids.setdefault((last, block), len(self._ids))
            ids.append(last)
        return tuple(ids)
