"""Result of a reasoning parser for a piece of text, and the parser's interface."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class Split:
    """Text that is certain so far: reasoning, and content for the user."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser(Protocol):
    """Incremental parser of one response. Ambiguous text is held back."""

    def push(self, text: str) -> Split:
        """Parse more text of the response."""

    def flush(self) -> Split:
        """Parse the end of the response: text held back belongs to the current section."""
