"""Stop strings in streamed text: what can be sent now, and where the text ends. Pure.

The work per character is constant for each stop string (Knuth, Morris and Pratt 1977), whatever the text: the API
server's event loop does it for every client.

``` text so far |------- sent -------|--- held: could be the start of a stop string ---| ```
"""

from array import array
from collections.abc import Sequence
from functools import lru_cache

CACHED_TABLES = 64  # of the latest stop strings, so that the choices of a request share them


class StopStrings:
    """Stop string detector of one sequence. push() returns the text that can be sent, never beyond a stop string."""

    def __init__(self, stop: Sequence[str], *, include: bool) -> None:
        self._stop = stop
        self._matchers = [_Matcher(each) for each in stop]
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """Stop string that ended the text."""
        self.armed = True
        """False until min_tokens is reached: text passes without a search, and no stop string may start in it."""

    @property
    def is_watching(self) -> bool:
        """Return True if there are stop strings."""
        return bool(self._stop)

    def push(self, piece: str) -> str:
        """Return the text that can be sent after this piece. Once `matched` is set it is always empty."""
        if self.matched is not None:
            return ""
        if not self._stop:
            return piece
        text = self._held + piece
        if not self.armed:
            self._held = ""
            for matcher in self._matchers:
                matcher.length = 0
            return text
        before = len(self._held)
        found = [
            (before + end - len(matcher.stop), -len(matcher.stop), matcher.stop)
            for matcher in self._matchers
            if (end := matcher.push(piece)) is not None
        ]
        if found:  # the earliest match; among matches at one position the longest
            at, _, self.matched = min(found)
            self._held = ""
            return text[: at + len(self.matched) if self._include else at]
        keep = max(matcher.length for matcher in self._matchers)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the held-back text when the sequence ends for another reason."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Search for one stop string in text that arrives in pieces."""

    __slots__ = ("_table", "length", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self._table = _failure_table(stop)
        self.length = 0
        """Length of the longest suffix of the text that is a proper prefix of the stop string."""

    def push(self, piece: str) -> int | None:
        """Search in the next piece. Return the end of the first match in it, or None if there is none. Nothing may be
        pushed after a match.
        """
        stop, table, length = self.stop, self._table, self.length
        if length == 0 and stop[0] not in piece:  # by far the most frequent case
            return None
        for place, character in enumerate(piece, start=1):
            while length and stop[length] != character:
                length = table[length]
            if stop[length] == character:
                length += 1
                if length == len(stop):
                    return place
        self.length = length
        return None


@lru_cache(CACHED_TABLES)
def _failure_table(stop: str) -> "array[int]":
    """Return for each length n of a matched prefix the length of its longest proper suffix that is a prefix, too."""
    table = array("l", [0, 0])
    length = 0
    for place in range(1, len(stop) - 1):
        while length and stop[place] != stop[length]:
            length = table[length]
        if stop[place] == stop[length]:
            length += 1
        table.append(length)
    return table
