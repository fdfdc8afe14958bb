"""KV blocks as counts: free blocks, and the content that freed blocks still hold.

As in the engine's block manager, empty blocks are taken first, then cached ones, least recently freed first and the
last block of a request first. A preempted request finds its own blocks again, so a count per freed request suffices.
Which prompts have a common prefix is not known here: a request has the cached part of its prompt (`num_hit`).
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from trimtab_operator.tuner.engine_model.sequence import Sequence


class Blocks(Protocol):
    """KV cache as used by the engine model."""

    block_size: int
    total: int
    free: int
    """Unused blocks, with or without cached content."""

    def find_cached(self, sequence: Sequence) -> tuple[int, int]:
        """Return the number of leading blocks of a waiting sequence that are cached, and how many of them are
        unused.
        """

    def share(self, sequence: Sequence, num_found: int) -> None:
        """Start the sequence's table with its cached blocks."""

    def allocate(self, num_blocks: int) -> None:
        """Allocate blocks; that many must be free."""

    def mark_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Make the full blocks of its first `num_tokens` tokens available to others while its prompt is computed."""

    def count_exclusive(self, sequence: Sequence, num_blocks: int) -> int:
        """Return how many of its `num_blocks` blocks would become free with it."""

    def release(self, sequence: Sequence, num_tokens: int, *, is_requeued: bool) -> None:
        """Free the blocks of its `num_tokens` computed tokens. `is_requeued`: it will look for them again."""

    def resize(self, num_blocks: int) -> None:
        """Set the total number of blocks; at least those in use."""


class KvBlocks:
    """KV blocks of requests whose cached prompt tokens are given.

    `caches`: freed blocks keep their content. `sharing`: share of a request's cached blocks that other running requests
    hold too, so that they take no further blocks.
    """

    __slots__ = ("_empty", "_lru", "block_size", "caches", "free", "num_evicted", "sharing", "total")

    def __init__(self, total: int, block_size: int = 16, *, caches: bool = True, sharing: float = 0.0) -> None:
        self.total = total
        self.block_size = block_size
        self.caches = caches
        self.sharing = sharing
        self.free = total
        self.num_evicted = 0
        self._empty = total
        self._lru: deque[list[int]] = deque()  # [blocks, 1 if their sequence is requeued]

    def find_cached(self, sequence: Sequence) -> tuple[int, int]:
        """Return the blocks of its cached prompt; after a preemption the remaining ones."""
        if sequence.kept is not None:
            own = sequence.kept[0]
            return sequence.num_shared + own, own
        if not sequence.num_hit or sequence.num_preemptions:
            return sequence.num_shared, 0
        found = sequence.num_hit // self.block_size
        return found, found - int(self.sharing * found)

    def share(self, sequence: Sequence, num_found: int) -> None:
        """Take its cached blocks; blocks that no running request holds were unused."""
        if sequence.kept is not None:
            self.free -= num_found - sequence.num_shared
            sequence.kept[0] = 0
            sequence.kept = None
        elif num_found and not sequence.num_preemptions:
            sequence.num_shared = int(self.sharing * num_found)
            self.allocate(num_found - sequence.num_shared)

    def allocate(self, num_blocks: int) -> None:
        """Allocate empty blocks, then evict."""
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

    def mark_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Do nothing: prefixes are not shared."""

    def count_exclusive(self, sequence: Sequence, num_blocks: int) -> int:
        """Return all blocks that no other request holds."""
        return num_blocks - sequence.num_shared

    def release(self, sequence: Sequence, num_tokens: int, *, is_requeued: bool) -> None:
        """Free its blocks; full ones keep their content."""
        num_full, rest = divmod(num_tokens, self.block_size)
        num_full -= sequence.num_shared
        num_blocks = num_full + (rest > 0)
        self.free += num_blocks
        if not self.caches:
            self._empty += num_blocks
            return
        self._empty += num_blocks - num_full
        if is_requeued:
            sequence.kept = [num_full, 1]
            self._lru.append(sequence.kept)
        elif self._lru and not self._lru[-1][1]:
            self._lru[-1][0] += num_full
        else:
            self._lru.append([num_full, 0])

    def resize(self, num_blocks: int) -> None:
        """Grow by empty blocks; shrink by empty ones first, then by the least recently freed."""
        change = num_blocks - self.total
        self.total = num_blocks
        self.free += change
        self._empty += change
        if self._empty < 0:
            self._evict(-self._empty)
            self._empty = 0
