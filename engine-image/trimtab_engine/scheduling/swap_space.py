"""Host blocks for swapped-out and evicted KV blocks. Works on ids; the caller copies the bytes.

```
host blocks 0 ......................................... cap
            swapped   held for preempted requests: at most `num_total`, the swap space
            kept      content evicted from the KV cache: at most `num_kept_total`, the host cache; evicted in LRU order
            free
```
Blocks with a hash are stored once, however many requests swap them out: shared blocks are copied once, and kept content
becomes swapped without a copy and is kept again when its last request leaves. Each part has its own size, so neither
evicts the other. Both are live parameters: lowering the swap space below its use takes effect as requests return,
lowering the host cache takes effect immediately.

A block that one schedule() has read or written is not reused until its copies are submitted (`settle`): copies in one
direction within a step are unordered.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from trimtab_engine.errors import IntegrityError

NOTHING: Mapping[bytes, int] = {}


@dataclass(slots=True)
class _HostBlock:
    num_users: int
    block_hash: bytes | None


class SwapSpace:
    """`num_blocks` host blocks for preempted requests, of `cap_blocks` that were reserved; and `num_kept` for evicted
    content, of `cap_kept`.
    """

    def __init__(self, num_blocks: int, cap_blocks: int, num_kept: int = 0, cap_kept: int = 0) -> None:
        self._cap, self._cap_kept = cap_blocks, cap_kept
        self._num_total = self._num_kept_total = 0
        self._free = list(range(cap_blocks + cap_kept - 1, -1, -1))  # the last one is handed out next
        self._used: dict[int, _HostBlock] = {}
        self._kept: OrderedDict[int, bytes] = OrderedDict()  # evicted in this order
        self._by_hash: dict[bytes, int] = {}
        self._busy: set[int] = set()
        self._resting: list[int] = []
        """Free from settle() on."""
        self._changes: list[bytes] | None = None
        """Hashes that became or ceased to be findable, while the block manager records them."""
        self.resize(num_blocks)
        self.resize_kept(num_kept)

    @property
    def num_total(self) -> int:
        return self._num_total

    @property
    def cap(self) -> int:
        return self._cap

    @property
    def num_used(self) -> int:
        return len(self._used)

    @property
    def num_free(self) -> int:
        return max(0, min(self._num_total - len(self._used), len(self._free)))

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_kept_total(self) -> int:
        return self._num_kept_total

    def resize(self, num_blocks: int) -> None:
        if not 0 <= num_blocks <= self._cap:
            raise ValueError(f"swap space of {num_blocks} blocks is outside 0 to the cap of {self._cap}")
        self._num_total = num_blocks

    def record_changes(self, changes: list[bytes] | None) -> None:
        """Append to this list from now on the hash of content that may have become or ceased to be findable."""
        self._changes = changes

    def _note(self, block_hash: bytes) -> None:
        if self._changes is not None and self._num_kept_total:
            self._changes.append(block_hash)

    # --- preempted requests ---------------------------------------------------------------------------------------

    def missing(self, hashes: list[bytes | None]) -> int:
        """Return how many host blocks are needed to hold blocks of these hashes (None means unshared content)."""
        return sum(1 for block_hash in hashes if block_hash is None or self._by_hash.get(block_hash) not in self._used)

    def keep(self, block_hash: bytes | None) -> tuple[int, bool]:
        """Return a host block for a block with this hash, and whether the content must be copied. Call
        missing() first.
        """
        if block_hash is not None and (known := self._by_hash.get(block_hash)) is not None:
            if known in self._kept:
                del self._kept[known]
                self._used[known] = _HostBlock(0, block_hash)
            self._used[known].num_users += 1
            return known, False
        block = self._free.pop()
        self._used[block] = _HostBlock(1, block_hash)
        self._busy.add(block)
        if block_hash is not None:
            self._by_hash[block_hash] = block
            self._note(block_hash)
        return block, True

    def hash_of(self, block: int) -> bytes | None:
        return self._used[block].block_hash

    def release(self, blocks: list[int]) -> None:
        """Drop one user of each block. The last one frees the block or leaves its content to the host cache. `blocks`
        is empty afterwards.
        """
        for block in reversed(blocks):
            entry = self._used[block]
            entry.num_users -= 1
            if entry.num_users == 0:
                del self._used[block]
                self._busy.add(block)  # read by the request that swaps it in
                if entry.block_hash is None:
                    self._resting.append(block)
                elif self._num_kept_total and self._has_room_to_keep():
                    self._kept[block] = entry.block_hash
                else:
                    del self._by_hash[entry.block_hash]
                    self._note(entry.block_hash)
                    self._resting.append(block)
        blocks.clear()

    # --- evicted content ------------------------------------------------------------------------------------------

    @property
    def findable(self) -> Mapping[bytes, int]:
        """Host blocks by the hash of their content: all that are here, where there is a host cache."""
        return self._by_hash if self._num_kept_total else NOTHING

    def offload(self, block_hash: bytes) -> int | None:
        """Return a host block to copy evicted content with this hash to. None if the content is already present or has
        no room.
        """
        if not self._num_kept_total:
            return None
        known = self._by_hash.get(block_hash)
        if known is not None:
            if known in self._kept:
                self._kept.move_to_end(known)
            return None
        if not self._has_room_to_keep() or not self._free:
            return None
        block = self._free.pop()
        self._kept[block] = block_hash
        self._by_hash[block_hash] = block
        self._note(block_hash)
        self._busy.add(block)
        return block

    def read(self, block_hash: bytes) -> int:
        """Return the host block with this findable content, which stays until its copy is submitted."""
        block = self._by_hash[block_hash]
        if block in self._kept:
            self._kept.move_to_end(block)
        self._busy.add(block)
        return block

    def forget(self, block_hash: bytes) -> None:
        """Remove this content from the index. Requests that have swapped it out keep it."""
        block = self._by_hash.pop(block_hash, None)
        if block is None:
            return
        self._note(block_hash)
        if block in self._kept:
            del self._kept[block]
            (self._resting if block in self._busy else self._free).append(block)
        else:
            self._used[block].block_hash = None

    def forget_all(self) -> None:
        for block_hash in list(self._by_hash):
            self.forget(block_hash)

    def resize_kept(self, num_blocks: int) -> None:
        """Set how many blocks of evicted content are kept. Call between two steps."""
        if not 0 <= num_blocks <= self._cap_kept:
            raise ValueError(f"a host cache of {num_blocks} blocks is outside 0 to the cap of {self._cap_kept}")
        if self._changes is not None and bool(num_blocks) != bool(self._num_kept_total):
            self._changes += self._by_hash
        self._num_kept_total = num_blocks
        while len(self._kept) > num_blocks:
            self.forget(next(iter(self._kept.values())))

    def settle(self) -> None:
        """Mark all reads and writes so far as submitted: later copies are ordered after them."""
        self._busy.clear()
        self._free += self._resting
        self._resting.clear()

    def _has_room_to_keep(self) -> bool:
        """Make room for one more block by evicting the least recently used one. Return False if all kept blocks still
        wait for their copies.
        """
        if len(self._kept) < self._num_kept_total:
            return True
        oldest, block_hash = next(iter(self._kept.items()))
        if oldest in self._busy:
            return False
        self.forget(block_hash)
        return True

    # --- invariants -----------------------------------------------------------------------------------------------

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Raise IntegrityError unless the tables of all swapped-out requests account for every user."""
        users: dict[int, int] = {}
        for table in tables:
            for block in table:
                users[block] = users.get(block, 0) + 1
        if users != {block: entry.num_users for block, entry in self._used.items()}:
            raise IntegrityError("the users of the swap space are not the swapped-out requests")
        blocks = [*self._free, *self._resting, *self._used, *self._kept]
        if sorted(blocks) != list(range(self._cap + self._cap_kept)):
            raise IntegrityError(
                f"{len(self._free) + len(self._resting)} free, {len(self._used)} swapped and {len(self._kept)} kept "
                f"host blocks are not the {self._cap + self._cap_kept} that there are"
            )
        if len(self._kept) > self._num_kept_total:
            raise IntegrityError(f"the host cache keeps {len(self._kept)} blocks of {self._num_kept_total}")
        hashed = {entry.block_hash: block for block, entry in self._used.items() if entry.block_hash is not None}
        if hashed | {block_hash: block for block, block_hash in self._kept.items()} != self._by_hash:
            raise IntegrityError("the host blocks with a hash differ from the indexed blocks")
