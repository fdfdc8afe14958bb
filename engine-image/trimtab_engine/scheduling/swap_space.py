"""Which host block holds which swapped-out KV block. Ids only: bytes and copies are the caller's.

Blocks with a hash are kept once however many requests swap them out, so what requests share moves once. Its size is
live: lowering it below what is in use takes effect as requests come back.
"""

from dataclasses import dataclass

from trimtab_engine.errors import IntegrityError


@dataclass(slots=True)
class _HostBlock:
    num_users: int
    block_hash: bytes | None


class SwapSpace:
    """Up to `num_blocks` host blocks of `cap_blocks` that were reserved."""

    def __init__(self, num_blocks: int, cap_blocks: int) -> None:
        self._cap = cap_blocks
        self._num_total = 0
        self._free = list(range(cap_blocks - 1, -1, -1))  # the last one is handed out next
        self._used: dict[int, _HostBlock] = {}
        self._by_hash: dict[bytes, int] = {}
        self.resize(num_blocks)

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
        return max(0, self._num_total - len(self._used))

    def resize(self, num_blocks: int) -> None:
        if not 0 <= num_blocks <= self._cap:
            raise ValueError(f"swap space of {num_blocks} blocks is outside 0 to the cap of {self._cap}")
        self._num_total = num_blocks

    def missing(self, hashes: list[bytes | None]) -> int:
        """How many host blocks it takes to hold blocks of these hashes (None: unshared content)."""
        return sum(1 for block_hash in hashes if block_hash is None or block_hash not in self._by_hash)

    def keep(self, block_hash: bytes | None) -> tuple[int, bool]:
        """A host block for a block with this hash, and whether the content must be copied. Ask missing() first."""
        if block_hash is not None and (known := self._by_hash.get(block_hash)) is not None:
            self._used[known].num_users += 1
            return known, False
        block = self._free.pop()
        self._used[block] = _HostBlock(1, block_hash)
        if block_hash is not None:
            self._by_hash[block_hash] = block
        return block, True

    def hash_of(self, block: int) -> bytes | None:
        return self._used[block].block_hash

    def release(self, blocks: list[int]) -> None:
        """One user less for each; the last one frees it. `blocks` is empty afterwards."""
        for block in reversed(blocks):
            entry = self._used[block]
            entry.num_users -= 1
            if entry.num_users == 0:
                del self._used[block]
                if entry.block_hash is not None:
                    del self._by_hash[entry.block_hash]
                self._free.append(block)
        blocks.clear()

    def check_integrity(self, tables: list[list[int]]) -> None:
        """Raise IntegrityError unless the tables of all swapped-out requests account for every user."""
        users: dict[int, int] = {}
        for table in tables:
            for block in table:
                users[block] = users.get(block, 0) + 1
        if users != {block: entry.num_users for block, entry in self._used.items()}:
            raise IntegrityError("the users of the swap space are not the swapped-out requests")
        if len(self._free) + len(self._used) != self._cap or any(block in self._used for block in self._free):
            raise IntegrityError(f"{len(self._free)} free and {len(self._used)} used host blocks are not {self._cap}")
