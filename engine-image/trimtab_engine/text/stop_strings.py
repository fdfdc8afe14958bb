"""Stop strings in streamed text: what can be sent now, and where the text ends. Pure.

``` text so far |------- sent -------|--- held: could be the start of a stop string ---| ```
"""

from collections.abc import Sequence


class StopStrings:
    """Stop string detector of one sequence. push() returns the text that can be sent, never beyond a stop string."""

    def __init__(self, stop: Sequence[str], *, include: bool) -> None:
        self._stop = stop
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
            return text
        found = [(at, -len(stop), stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:  # the earliest match; among matches at one position the longest
            at, _, self.matched = min(found)
            self._held = ""
            return text[: at + len(self.matched) if self._include else at]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the held-back text when the sequence ends for another reason."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
