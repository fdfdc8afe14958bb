"""KV blocks as numbers: how many are free, and what freed ones still hold.

As the engine's block manager: empty blocks are taken first, then cached ones, the least recently freed first and of one
request its last block first. Where no two requests begin alike, only a preempted request ever finds blocks again: its
own. So a count of each freed request is enough.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from trimtab_operator.tuner.engine_model.sequence import Sequence


class Blocks(Protocol):
    """What the engine asks of its KV cache."""

    block_size: int
    total: int
    free: int
    """Blocks that nobody uses, whether or not they still hold something."""

    def found(self, sequence: Sequence) -> tuple[int, int]:
        """How many leading blocks of a waiting sequence are there already, and how many of those nobody uses."""

    def share(self, sequence: Sequence, num_found: int) -> None:
        """Start the sequence's table with what was found."""

    def take(self, num_blocks: int) -> None:
        """Give out blocks; there must be as many free."""

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Let others find the full blocks of its first `num_tokens` tokens, while its prompt is being computed."""

    def exclusive(self, sequence: Sequence, num_blocks: int) -> int:
        """How many of its `num_blocks` blocks would become free with it."""

    def release(self, sequence: Sequence, num_tokens: int, *, returns: bool) -> None:
        """Take back the blocks of its `num_tokens` computed tokens. `returns`: it will look for them again."""

    def resize(self, num_blocks: int) -> None:
        """Have so many blocks from now on; no fewer than are in use."""


class KvBlocks:
    """Blocks of requests that share no beginning. `caches`: whether freed blocks keep their content."""

    __slots__ = ("_empty", "_lru", "block_size", "caches", "free", "num_evicted", "total")

    def __init__(self, total: int, block_size: int = 16, *, caches: bool = True) -> None:
        self.total = total
        self.block_size = block_size
        self.caches = caches
        self.free = total
        self.num_evicted = 0
        self._empty = total
        self._lru: deque[list[int]] = deque()  # [blocks, 1 if somebody may look for them]

    def found(self, sequence: Sequence) -> tuple[int, int]:
        """What is left of its own blocks from before its preemption."""
        kept = sequence.kept
        count = kept[0] if kept is not None else 0
        return count, count

    def share(self, sequence: Sequence, num_found: int) -> None:
        """Use again what was found of its own."""
        if num_found:
            self.free -= num_found
            sequence.kept[0] = 0
        sequence.kept = None

    def take(self, num_blocks: int) -> None:
        """Take empty blocks, then evict."""
        self.free -= num_blocks
        self._empty -= num_blocks
        if self._empty < 0:
            self._evict(-self._empty)
            self._empty = 0

    def _evict(self, num_blocks: int) -> None:
        self.num_evicted += num_blocks
        lru = self._lru
        while num_blocks:
            entry = lru[0]
            if entry[0] > num_blocks:
                entry[0] -= num_blocks
                return
            num_blocks -= entry[0]
            entry[0] = 0
            lru.popleft()

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Nobody else begins like it."""

    def exclusive(self, sequence: Sequence, num_blocks: int) -> int:
        """All are its own."""
        return num_blocks

    def release(self, sequence: Sequence, num_tokens: int, *, returns: bool) -> None:
        """Its full blocks keep their content; a partly filled one does not."""
        num_full, rest = divmod(num_tokens, self.block_size)
        num_blocks = num_full + (rest > 0)
        self.free += num_blocks
        if not self.caches:
            self._empty += num_blocks
            return
        self._empty += num_blocks - num_full
        if returns:
            sequence.kept = [num_full, 1]
            self._lru.append(sequence.kept)
        elif self._lru and not self._lru[-1][1]:
            self._lru[-1][0] += num_full
        else:
            self._lru.append([num_full, 0])

    def resize(self, num_blocks: int) -> None:
        """Grow by empty blocks; shrink by empty ones first, then by what was freed longest ago."""
        change = num_blocks - self.total
        self.total = num_blocks
        self.free += change
        self._empty += change
        if self._empty < 0:
            self._evict(-self._empty)
            self._empty = 0
