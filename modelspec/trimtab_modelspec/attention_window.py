"""How far back a KV group's tokens see, and so which of its blocks a request still needs. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """What a token at some position sees: itself and those before it, as far back as a window reaches, or as its chunk
    begins."""

    window: int | None = None
    """How many tokens at most, itself included; None: all."""
    is_chunked: bool = False
    """Whether positions are cut into chunks of `window` tokens, and a token sees those of its own chunk."""

    def first_seen(self, position: int) -> int:
        """The first token that the one at `position` sees; no later token sees one before it."""
        if self.window is None:
            return 0
        return position // self.window * self.window if self.is_chunked else max(0, position - self.window + 1)

    def num_blocks(self, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        """The most blocks that a request holds while it grows to so many tokens, by up to `max_step_tokens` a step.

        Of a window: what the tokens of one step see and write, wherever it begins within a block. Of a chunk no more.
        """
        blocks = -(-num_tokens // block_size)
        if self.window is None:
            return blocks
        in_sight = self.window - 1 + max_step_tokens
        return min(blocks, -(-(in_sight - 1) // block_size) + 1)


FULL_ATTENTION = AttentionWindow()
