"""Stop strings in streamed text: what may be sent now, and where the text ends. Pure.

```
text so far   |------- sent -------|--- held: could be the start of a stop string ---|
```
"""

from collections.abc import Sequence


class StopStrings:
    """Watches one sequence's text. Feed it pieces; it returns what may be sent, never text past a stop string."""

    def __init__(self, stop: Sequence[str], *, include: bool) -> None:
        self._stop = stop
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""
        self.armed = True
        """False while min_tokens is not reached: text passes unsearched, and no stop string begins in it."""

    @property
    def is_watching(self) -> bool:
        """Whether there are any to look for."""
        return bool(self._stop)

    def push(self, piece: str) -> str:
        """The text that is safe to send after this piece. Once `matched` is set there is no more."""
        if self.matched is not None:
            return ""
        if not self._stop:
            return piece
        text = self._held + piece
        if not self.armed:
            self._held = ""
            return text
        found = [(at, -len(stop), stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:  # the first to begin; of those that begin together, the longest
            at, _, self.matched = min(found)
            self._held = ""
            return text[: at + len(self.matched) if self._include else at]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when the text ends for another reason."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
