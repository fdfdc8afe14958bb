"""How far back a KV group's tokens see, and so which of its blocks a request still needs. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sight:
    """What a token at some position sees: itself and those before it, as far back as a window reaches."""

    window: int | None = None
    """How many tokens, itself included; None: all."""

    def first_seen(self, position: int) -> int:
        """The first token that the one at `position` sees; no later token sees one before it."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def num_blocks(self, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        """The most blocks that a request holds while it grows to so many tokens, by up to `max_step_tokens` a step.

        Of a window: what the tokens of one step see and write, wherever it begins within a block.
        """
        blocks = -(-num_tokens // block_size)
        if self.window is None:
            return blocks
        in_sight = self.window - 1 + max_step_tokens
        return min(blocks, -(-(in_sight - 1) // block_size) + 1)


SEES_ALL = Sight()
