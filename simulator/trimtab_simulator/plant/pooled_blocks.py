"""KV caches whose prefixes are one common pool, for the bound of what any router can reach.

A prefix that some replica has computed is at once available to all. Memory stays that of each replica: a request takes
all its blocks there, without sharing them with other requests.
"""

from __future__ import annotations

from collections import OrderedDict

from trimtab_operator.tuner.engine_model import Blocks, KvBlocks, Sequence

from trimtab_simulator.plant.shared_blocks import ChangeLog
from trimtab_simulator.trace.arrivals import KEY_TOKENS


class PrefixPool:
    """The common prefixes, least recently used first. It holds as many tokens as the caches of all replicas."""

    def __init__(self) -> None:
        self._members: list[PooledBlocks] = []
        self._keys: OrderedDict[int, None] = OrderedDict()

    def make_blocks(self, num_blocks: int, block_size: int) -> Blocks:
        """Return the KV cache of one more replica."""
        member = PooledBlocks(num_blocks, block_size, self)
        member.changes.start(self._keys)
        self._members.append(member)
        return member

    def count_leading(self, keys: tuple[int, ...]) -> int:
        """Return how many leading keys are in the pool."""
        for index, key in enumerate(keys):
            if key not in self._keys:
                return index
        return len(keys)

    def add(self, keys: tuple[int, ...]) -> None:
        """Add computed prefixes, and make them the most recently used ones, the longest first."""
        for key in reversed(keys):
            if key not in self._keys:
                self._record(key, is_cached=True)
            self._keys[key] = None
            self._keys.move_to_end(key)
        capacity = sum(member.total * member.block_size for member in self._members) // KEY_TOKENS
        while len(self._keys) > capacity:
            key, _ = self._keys.popitem(last=False)
            self._record(key, is_cached=False)

    def _record(self, key: int, *, is_cached: bool) -> None:
        for member in self._members:
            member.changes.add(key, is_cached=is_cached)


class PooledBlocks(KvBlocks):
    """Blocks of one replica."""

    __slots__ = ("_pool", "changes")

    def __init__(self, total: int, block_size: int, pool: PrefixPool) -> None:
        super().__init__(total, block_size)
        self.changes = ChangeLog()
        self._pool = pool

    def find_cached(self, sequence: Sequence) -> tuple[int, int]:
        """Return its leading blocks in the pool, which all take memory here; after a preemption the remaining ones."""
        if not sequence.num_preemptions:
            tokens = min(sequence.num_prompt - 1, KEY_TOKENS * self._pool.count_leading(sequence.keys))
            sequence.num_hit = tokens
        return super().find_cached(sequence)

    def mark_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Add the computed part of its prefix to the pool."""
        self._pool.add(sequence.keys[: min(num_tokens, sequence.num_prompt) // KEY_TOKENS])

    def release(self, sequence: Sequence, num_tokens: int, *, is_requeued: bool) -> None:
        """Free its blocks."""
        self._pool.add(sequence.keys[: min(num_tokens, sequence.num_prompt) // KEY_TOKENS])
        super().release(sequence, num_tokens, is_requeued=is_requeued)
