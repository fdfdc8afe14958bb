"""What a parser of reasoning makes of a piece of text."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class Split:
    """What has become certain: thoughts, and what is for the user."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser(Protocol):
    """Reads one answer. What is not certain yet is held back."""

    def push(self, text: str) -> Split:
        """More of the answer."""

    def flush(self) -> Split:
        """The answer has ended: what was held back belongs to what it stands in."""
