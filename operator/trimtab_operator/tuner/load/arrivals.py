"""Rows in the order of arrival, kept from look to look: requests are told when they end, a little out of that order."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Protocol, TypeVar


class Arrived(Protocol):
    """Anything that is told of one request."""

    @property
    def arrived_at(self) -> float:
        """When the request came."""


Row = TypeVar("Row", bound=Arrived)


arrival: Callable[[Arrived], float] = attrgetter("arrived_at")
"""When it came: asked for so often that a function of our own would cost more than the sorting."""


def with_new(known: tuple[Row, ...], new: Iterable[Row]) -> tuple[Row, ...]:
    """All of them in order. Only what came since the oldest of the new ones is sorted again."""
    rows = sorted(new, key=arrival)
    if not rows:
        return known
    first = bisect_right(known, rows[0].arrived_at, key=arrival)
    return (*known[:first], *sorted((*known[first:], *rows), key=arrival))


def since(known: Sequence[Row], at: float) -> Sequence[Row]:
    """Those that came at `at` or later."""
    return known[bisect_left(known, at, key=arrival) :]
