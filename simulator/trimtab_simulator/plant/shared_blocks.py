"""KV blocks with shared prefixes: which requests share blocks, and which freed blocks are still cached.

As in the engine's block manager, block by block for the named prefixes of prompts; blocks after a prefix belong to one
request and are counted (see trimtab_operator.tuner.engine_model.blocks). Ids of a trace cover `key_tokens` tokens each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from trimtab_operator.tuner.engine_model import Blocks, Sequence

from trimtab_simulator.trace.arrivals import KEY_TOKENS

ROOT = -1  # the empty prefix
DUPLICATE = -1  # a block whose content another cached block already has


class CacheChange(NamedTuple):
    """A prefix id that has become cached as a whole, or is no longer."""

    key: int
    is_cached: bool


class ChangeLog:
    """Changes of a prefix cache for a router that follows it; nothing is recorded before `start`."""

    def __init__(self) -> None:
        self._changes: list[CacheChange] | None = None

    def start(self, cached: Iterable[int] = ()) -> None:
        """Begin to record, with the ids that are cached already."""
        if self._changes is None:
            self._changes = [CacheChange(key, True) for key in cached]

    def add(self, key: int, *, is_cached: bool) -> None:
        """Record one change."""
        if self._changes is not None:
            self._changes.append(CacheChange(key, is_cached))

    def take(self) -> list[CacheChange]:
        """Return the changes since the last call."""
        changes, self._changes = self._changes or [], []
        return changes


class SharedBlocks:
    """KV cache with a prefix cache. Equal ids are equal prefixes only after equal ids."""

    def __init__(self, total: int, block_size: int = 16, *, key_tokens: int = KEY_TOKENS) -> None:
        if key_tokens % block_size:
            raise ValueError(
                f"a prefix id covers {key_tokens} tokens, which is not a multiple of the block size {block_size}"
            )
        self.total = total
        self.block_size = block_size
        self.free = total
        self.num_evicted = 0
        self.changes = ChangeLog()
        self._blocks_per_key = key_tokens // block_size
        self._empty = total
        self._chains: dict[tuple[int, int], int] = {}
        """(id of the previous prefix, key) → id of the prefix."""
        self._keys: list[int] = []
        """Last key of each prefix."""
        self._users: dict[int, int] = {}
        """Number of requests that hold a cached block."""
        self._lru: OrderedDict[int, list[int] | None] = OrderedDict()
        """Freed cached blocks, next to evict first; unshared blocks of a request as [count]."""
        self._num_own = 0
        self._names: dict[Sequence, list[int]] = {}
        """Ids of the full blocks of each request's named prefix."""
        self._held: dict[Sequence, list[int]] = {}
        """Ids of the blocks that it has computed or found; DUPLICATE if another block already has the id."""

    # --- lookup ----------------------------------------------------------------------------------------------------

    def find_cached(self, sequence: Sequence) -> tuple[int, int]:
        """Return the number of cached leading blocks, and how many of those are unused."""
        most = (sequence.num_tokens - 1) // self.block_size  # the last token must be computed
        names = self._names_of(sequence)
        count = unused = 0
        for name in names[:most]:
            if name in self._lru:
                unused += 1
            elif name not in self._users:
                return count, unused
            count += 1
        if count < len(names) or sequence.kept is None:
            return count, unused
        own = min(sequence.kept[0], most - count)
        return count + own, unused + own

    def share(self, sequence: Sequence, num_found: int) -> None:
        """Start the sequence's table with its cached blocks."""
        held = self._names_of(sequence)[:num_found]
        for name in held:
            if name in self._users:
                self._users[name] += 1
            else:
                del self._lru[name]
                self._users[name] = 1
                self.free -= 1
        own = num_found - len(held)
        if own:
            sequence.kept[0] -= own
            self.free -= own
        sequence.kept = None
        self._held[sequence] = list(held)

    def mark_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Make the full blocks of its prefix available to others, as far as computed."""
        held, names = self._held[sequence], self._names_of(sequence)
        for name in names[len(held) : num_tokens // self.block_size]:
            if name in self._users or name in self._lru:
                held.append(DUPLICATE)
            else:
                self._users[name] = 1
                held.append(name)
                if (name + 1) % self._blocks_per_key == 0:
                    self.changes.add(self._keys[name // self._blocks_per_key], is_cached=True)

    def _names_of(self, sequence: Sequence) -> list[int]:
        names = self._names.get(sequence)
        if names is None:
            names = []
            chain = ROOT
            for key in sequence.keys:
                chain = self._chains.setdefault((chain, key), len(self._chains))
                if chain == len(self._keys):
                    self._keys.append(key)
                names += range(chain * self._blocks_per_key, (chain + 1) * self._blocks_per_key)
            del names[sequence.num_prompt // self.block_size :]
            self._names[sequence] = names
        return names

    # --- allocation ----------------------------------------------------------------------------------------------

    def allocate(self, num_blocks: int) -> None:
        """Allocate empty blocks, then the least recently freed."""
        self.free -= num_blocks
        self._empty -= num_blocks
        if self._empty < 0:
            self._evict(-self._empty)
            self._empty = 0

    def _evict(self, num_blocks: int) -> None:
        self.num_evicted += num_blocks
        while num_blocks:
            name, own = next(iter(self._lru.items()))
            if own is None:
                del self._lru[name]
                num_blocks -= 1
                if (name + 1) % self._blocks_per_key == 0:
                    self.changes.add(self._keys[name // self._blocks_per_key], is_cached=False)
            elif own[0] > num_blocks:
                own[0] -= num_blocks
                return
            else:
                num_blocks -= own[0]
                own[0] = 0
                del self._lru[name]

    def count_exclusive(self, sequence: Sequence, num_blocks: int) -> int:
        """Return the number of blocks that only this request uses."""
        shared = sum(1 for name in self._held[sequence] if name != DUPLICATE and self._users[name] > 1)
        return num_blocks - shared

    def release(self, sequence: Sequence, num_tokens: int, *, is_requeued: bool) -> None:
        """Free its blocks, the last one first."""
        held = self._held.pop(sequence)
        num_full, rest = divmod(num_tokens, self.block_size)
        own = num_full - len(held)
        self._empty += rest > 0
        self.free += own + (rest > 0)
        if own:
            self._num_own += 1
            kept = [own]
            self._lru[-1 - self._num_own] = kept
            if is_requeued:
                sequence.kept = kept
        for name in reversed(held):
            if name == DUPLICATE:
                self._empty += 1
                self.free += 1
                continue
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                self._lru[name] = None
                self.free += 1
        if not is_requeued:
            del self._names[sequence]

    def resize(self, num_blocks: int) -> None:
        """Grow by empty blocks; shrink by empty ones first, then by the least recently freed."""
        change = num_blocks - self.total
        self.total = num_blocks
        self.free += change
        self._empty += change
        if self._empty < 0:
            self._evict(-self._empty)
            self._empty = 0


def shared_blocks(num_blocks: int, block_size: int) -> Blocks:
    """Return a KV cache for a trace with named prefixes."""
    return SharedBlocks(num_blocks, block_size)
