"""Rows in order of arrival. Requests are reported when they end, slightly out of that order."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Protocol, TypeVar


class Arrived(Protocol):
    """A row about one request."""

    @property
    def arrived_at(self) -> float:
        """Arrival time of the request."""


Row = TypeVar("Row", bound=Arrived)


arrival: Callable[[Arrived], float] = attrgetter("arrived_at")
"""Arrival time of a row. Called so often that a Python function would cost more than the sorting."""


def merge_by_arrival(known: tuple[Row, ...], new: Iterable[Row]) -> tuple[Row, ...]:
    """Return all rows in order. Only rows since the oldest new one are sorted again."""
    rows = sorted(new, key=arrival)
    if not rows:
        return known
    first = bisect_right(known, rows[0].arrived_at, key=arrival)
    return (*known[:first], *sorted((*known[first:], *rows), key=arrival))


def since(known: Sequence[Row], at: float) -> Sequence[Row]:
    """Return the rows that arrived at `at` or later."""
    return known[bisect_left(known, at, key=arrival) :]
