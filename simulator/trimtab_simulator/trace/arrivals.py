"""What every trace becomes: requests with their times and lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Arrival(NamedTuple):
    """One request. `at` is in seconds from the start of the replay; lengths are in tokens.

    `prefix` names the leading blocks of the prompt, KEY_TOKENS tokens each: prompts begin alike as far as their names
    are equal. Empty: nothing is known to be shared.
    """

    at: float
    prompt: int
    output: int
    prefix: tuple[int, ...] = ()


KEY_TOKENS = 512  # of a Mooncake trace


@dataclass(frozen=True, slots=True)
class Trace:
    """Arrivals in the order of time, and how many seconds they cover: also before the first one and after the last."""

    name: str
    arrivals: list[Arrival]
    seconds: float
    notes: tuple[str, ...] = ()
    """What a reader of the results should know about how it was read."""

    @property
    def has_prefixes(self) -> bool:
        """Whether it says which prompts begin alike."""
        return any(arrival.prefix for arrival in self.arrivals)
