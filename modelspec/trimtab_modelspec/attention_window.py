"""Attention windows of KV groups and the blocks that a request needs. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """Visible range of a token: itself and preceding tokens, within a sliding window or the current chunk."""

    window: int | None = None
    """Maximum number of visible tokens, including itself. None means all."""
    is_chunked: bool = False
    """True if positions are divided into chunks of `window` tokens, and tokens attend within their own chunk."""

    def first_seen(self, position: int) -> int:
        """Return the first token that the one at `position` sees; no later token sees one before it."""
        if self.window is None:
            return 0
        return position // self.window * self.window if self.is_chunked else max(0, position - self.window + 1)

    def num_blocks(self, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        """Return the maximum blocks that a request holds while it grows to `num_tokens` tokens, by up to
        `max_step_tokens` per step. For a window: the tokens that one step reads and writes, at any offset within a
        block. A chunk never needs more.
        """
        blocks = -(-num_tokens // block_size)
        if self.window is None:
            return blocks
        in_sight = self.window - 1 + max_step_tokens
        return min(blocks, -(-(in_sight - 1) // block_size) + 1)


FULL_ATTENTION = AttentionWindow()
