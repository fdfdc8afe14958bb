"""Which KV block belongs to which requests, and what freed blocks still hold. Ids only: bytes are the caller's.

```
block ids   0 ............ num_total ............ cap
            |-- mapped: used or free ---|-- reserved, not mapped --|
used        in the table of one request, or of several that share a beginning: full blocks only, which nobody writes
free        empty:  a stack that hands out low ids first, so what is in use stays near the bottom
            cached: full blocks that nobody uses but whose content has a hash; evicted when no empty block is left,
                    the least recently used first, and of one request its last block first
```
Growing appends ids; shrinking evicts the top ones, after what is used there has moved below.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trimtab_engine.errors import IntegrityError
from trimtab_engine.scheduling.prefix_hash import extend_block_hashes
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.swap_space import SwapSpace

Copies = list[tuple[int, int]]
"""(source, destination) block ids."""


@dataclass(frozen=True, slots=True)
class ShrinkPlan:
    """How to give up the blocks from `num_blocks` on. Copy each source block's KV to its destination, then apply.

    Every source is at or above `num_blocks`, every destination is free and below it: any order of copying is right.
    """

    num_blocks: int
    moves: tuple[tuple[int, int], ...]
    """(source, destination) block ids."""


@dataclass(frozen=True, slots=True)
class BlocksShort:
    """What is in use does not fit below the new top: this many blocks must be freed first."""

    num_blocks: int


class BlockManager:
    """Hands out KV blocks of `block_size` tokens. `cap_blocks` is how far it may ever grow."""

    def __init__(self, num_blocks: int, cap_blocks: int, block_size: int, swap_space: SwapSpace | None = None) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be 1 or more")
        if not 0 < num_blocks <= cap_blocks:
            raise ValueError(f"num_blocks is {num_blocks}; it must be above 0 and at most cap_blocks {cap_blocks}")
        self.block_size = block_size
        self.swap_space = swap_space or SwapSpace(0, 0)
        self._num_evicted = 0
        self._cap = cap_blocks
        self._num_total = num_blocks
        self._num_users = [0] * cap_blocks
        self._hashes: list[bytes | None] = [None] * cap_blocks
        self._by_hash: dict[bytes, int] = {}
        self._empty = list(range(num_blocks - 1, -1, -1))  # the last one is handed out next
        self._cached: OrderedDict[int, None] = OrderedDict()  # the first one is evicted next

    @property
    def num_total(self) -> int:
        return self._num_total

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be found."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self._num_total - len(self._empty) - len(self._cached)

    @property
    def cap(self) -> int:
        return self._cap

    def take_evicted(self) -> int:
        """Cached blocks that were taken for something else since the last call."""
        evicted, self._num_evicted = self._num_evicted, 0
        return evicted

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)

    # --- tables ---------------------------------------------------------------------------------------------------

    def can_allocate(self, num_tokens: int, cached: Sequence[int] = (), *, spare: int = 0) -> bool:
        """Whether a request without blocks could be given room for that many tokens now, `cached` of them being there
        already, and `spare` blocks would still be free."""
        taken = sum(1 for block in cached if not self._num_users[block])
        return -(-num_tokens // self.block_size) - len(cached) + taken + spare <= len(self._empty) + len(self._cached)

    def allocate(self, request: Request, num_tokens_total: int) -> bool:
        """Grow the request's table until it holds `num_tokens_total` tokens. False: not enough, and nothing changed."""
        block_ids = request.block_ids
        num_new = -(-num_tokens_total // self.block_size) - len(block_ids)
        if num_new <= 0:
            return True
        if num_new > len(self._empty) + len(self._cached):
            return False
        for _ in range(num_new):
            block_ids.append(self._take())
        return True

    def _take(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            self._num_evicted += 1
        self._num_users[block] = 1
        return block

    def share(self, request: Request, cached: Sequence[int]) -> None:
        """Start the request's empty table with these cached blocks (of find_cached)."""
        for block in cached:
            self._use(block)
        request.block_ids.extend(cached)
        request.num_offered_blocks = len(cached)

    def _use(self, block: int) -> None:
        if not self._num_users[block]:
            del self._cached[block]
        self._num_users[block] += 1

    def free(self, request: Request) -> None:
        """Take back all blocks of the request; its table is empty afterwards. Its last block is evicted first."""
        self._release(reversed(request.block_ids))
        request.block_ids = []  # not cleared: a step in flight may still read the list
        request.num_offered_blocks = 0

    def truncate(self, request: Request, num_tokens: int) -> None:
        """Take back the blocks at the end of the table that `num_tokens` tokens do not need."""
        keep = -(-num_tokens // self.block_size)
        block_ids = request.block_ids
        if len(block_ids) > keep:
            self._release(reversed(block_ids[keep:]))
            del block_ids[keep:]

    def _release(self, blocks: Iterable[int]) -> None:
        num_users, hashes = self._num_users, self._hashes
        for block in blocks:
            num_users[block] -= 1
            if num_users[block]:
                continue
            if hashes[block] is None:
                self._empty.append(block)
            else:
                self._cached[block] = None

    def num_exclusive(self, request: Request) -> int:
        """Blocks that would become free with this request."""
        num_users = self._num_users
        return sum(1 for block in request.block_ids if num_users[block] == 1)

    # --- prefix cache ---------------------------------------------------------------------------------------------

    def find_cached(self, request: Request) -> list[int]:
        """The blocks that hold the longest known beginning of the request's tokens: full blocks, all but its last
        token at most, since that one must be computed to sample from."""
        num_tokens = len(request.token_ids) - 1
        self._extend_hashes(request, num_tokens)
        found: list[int] = []
        for block_hash in request.block_hashes[: num_tokens // self.block_size]:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def offer(self, request: Request, num_tokens: int) -> None:
        """Let others find the full blocks of the request's first `num_tokens` tokens, which are computed and known.

        When a block of the same content is known already, that one stays the one to be found.
        """
        last = min(num_tokens // self.block_size, len(request.block_ids))
        if last <= request.num_offered_blocks:
            return
        self._extend_hashes(request, num_tokens)
        for index in range(request.num_offered_blocks, last):
            block, block_hash = request.block_ids[index], request.block_hashes[index]
            if self._hashes[block] is None and block_hash not in self._by_hash:
                self._hashes[block] = block_hash
                self._by_hash[block_hash] = block
        request.num_offered_blocks = last

    def disown(self, request: Request) -> None:
        """Forget the content of all blocks of the request's table. Others that share them keep what they have."""
        for block in request.block_ids:
            self._forget(block)

    def _extend_hashes(self, request: Request, num_tokens: int) -> None:
        extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, num_tokens, request.cache_salt)

    def reset_cache(self) -> None:
        """Forget all content. What is in use stays in use; it is found no more."""
        self._empty.extend(sorted(self._cached, reverse=True))
        self._cached.clear()
        self._by_hash.clear()
        self._hashes = [None] * self._cap

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block] = None

    # --- swapping -------------------------------------------------------------------------------------------------

    def swap_out(self, request: Request) -> Copies | None:
        """Move the request's blocks to the swap space: what must be copied (device, host). None: there is no room.

        The device blocks are free at once: copy before the next step writes.
        """
        hashes = [self._hashes[block] for block in request.block_ids]
        if self.swap_space.missing(hashes) > self.swap_space.num_free:
            return None
        copies: Copies = []
        for block, block_hash in zip(request.block_ids, hashes, strict=True):
            host, is_new = self.swap_space.keep(block_hash)
            request.host_block_ids.append(host)
            if is_new:
                copies.append((block, host))
        self.free(request)
        return copies

    def find_swapped(self, request: Request) -> list[int]:
        """Device blocks that still hold part of a swapped-out request."""
        hashes = (self.swap_space.hash_of(host) for host in request.host_block_ids)
        return [block for h in hashes if h is not None and (block := self._by_hash.get(h)) is not None]

    def swap_in(self, request: Request) -> Copies:
        """Give a swapped-out request its table back: what must be copied (host, device). Ask can_allocate first."""
        copies: Copies = []
        hashes = [self.swap_space.hash_of(host) for host in request.host_block_ids]
        on_device = [None if block_hash is None else self._by_hash.get(block_hash) for block_hash in hashes]
        for block in on_device:
            if block is not None:
                self._use(block)  # before any eviction below
        for host, there in zip(request.host_block_ids, on_device, strict=True):
            block = self._take() if there is None else there
            if there is None:
                copies.append((host, block))
            request.block_ids.append(block)
        self.swap_space.release(request.host_block_ids)
        request.num_offered_blocks = 0  # the copies are found again once they are offered
        return copies

    # --- size -----------------------------------------------------------------------------------------------------

    def grow(self, num_blocks: int) -> None:
        """Append the ids from the present total up to `num_blocks`, which the caller has mapped already."""
        if not self._num_total <= num_blocks <= self._cap:
            raise ValueError(f"cannot grow from {self._num_total} to {num_blocks} blocks; the cap is {self._cap}")
        # New ids go under the others: they are used last and can be given up first.
        self._empty[:0] = range(num_blocks - 1, self._num_total - 1, -1)
        self._num_total = num_blocks

    def plan_shrink(self, num_blocks: int, running: Iterable[Request]) -> ShrinkPlan | BlocksShort:
        """Plan to keep only ids below `num_blocks`. `running` are all requests that hold blocks. Changes nothing."""
        if not 0 < num_blocks <= self._num_total:
            raise ValueError(f"cannot shrink from {self._num_total} to {num_blocks} blocks")
        if self.num_used > num_blocks:
            return BlocksShort(self.num_used - num_blocks)
        sources = sorted({block for request in running for block in request.block_ids if block >= num_blocks})
        empty = sorted(block for block in self._empty if block < num_blocks)
        evictable = [block for block in self._cached if block < num_blocks]
        return ShrinkPlan(num_blocks, tuple(zip(sources, empty + evictable, strict=False)))

    def apply_shrink(self, plan: ShrinkPlan, requests: Iterable[Request]) -> None:
        """Rewrite the block tables as planned. Nothing may have been allocated or freed since the plan was made."""
        moved = dict(plan.moves)
        if moved:
            for request in requests:
                request.block_ids[:] = [moved.get(block, block) for block in request.block_ids]
        for source, destination in plan.moves:
            if destination in self._cached:
                del self._cached[destination]
                self._forget(destination)
            self._num_users[destination], self._num_users[source] = self._num_users[source], 0
            block_hash = self._hashes[source]
            self._hashes[destination], self._hashes[source] = block_hash, None
            if block_hash is not None:
                self._by_hash[block_hash] = destination
        for block in [block for block in self._cached if block >= plan.num_blocks]:
            del self._cached[block]
            self._forget(block)
        taken = set(moved.values())
        kept = [block for block in self._empty if block < plan.num_blocks and block not in taken]
        kept.sort(reverse=True)
        self._empty = kept
        self._num_total = plan.num_blocks

    # --- invariants -----------------------------------------------------------------------------------------------

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Raise IntegrityError unless tables and free blocks account for all blocks, users and hashes.

        `requests` are all that live. A table is exactly as long as its computed tokens need.
        """
        owners: dict[int, list[Request]] = {block: [] for block in (*self._empty, *self._cached)}
        if len(owners) != self.num_free:
            raise IntegrityError("a block is free twice")
        for request in requests:
            for index, block in enumerate(request.block_ids):
                if owners.get(block) == []:
                    raise IntegrityError(f"block {block} belongs to request {request.request_id}, and is free")
                owners.setdefault(block, []).append(request)
                self._check_shared(block, index, owners[block][0], request)
        for block, users in owners.items():
            if not 0 <= block < self._num_total:
                owner = f"request {users[0].request_id}" if users else "the free blocks"
                raise IntegrityError(f"block {block} of {owner} is outside the {self._num_total} blocks that exist")
            if len(users) != self._num_users[block]:
                raise IntegrityError(f"block {block} counts {self._num_users[block]} users, but has {len(users)}")
        for request in requests:
            self._check_table(request)
        if len(owners) != self._num_total:
            missing = sorted(set(range(self._num_total)) - owners.keys())
            raise IntegrityError(
                f"{len(missing)} of {self._num_total} blocks have no owner, first of them {missing[0]}"
            )
        self._check_hashes()
        self.swap_space.check_integrity([request.host_block_ids for request in requests])

    def _check_shared(self, block: int, index: int, first: Request, other: Request) -> None:
        """Two requests share a block only as the same block of equal beginnings, and when it is full."""
        end = (index + 1) * self.block_size
        alike = first.token_ids[:end] == other.token_ids[:end] and len(first.token_ids) >= end
        if first is not other and not (alike and first.block_ids[index] == block and first.num_computed_tokens >= end):
            raise IntegrityError(
                f"block {block} belongs to request {first.request_id} and to request {other.request_id}, which do not "
                f"begin alike"
            )

    def _check_table(self, request: Request) -> None:
        table = request.host_block_ids or request.block_ids
        if request.host_block_ids and request.block_ids:
            raise IntegrityError(f"request {request.request_id} has blocks on the device and in the swap space")
        needed = self.blocks_for(request.num_computed_tokens)
        if len(table) != needed:
            raise IntegrityError(
                f"request {request.request_id} has {len(table)} blocks, but its {request.num_computed_tokens} "
                f"computed tokens need {needed}"
            )

    def _check_hashes(self) -> None:
        hashed = {block: h for block, h in enumerate(self._hashes) if h is not None}
        if {block: h for h, block in self._by_hash.items()} != hashed:
            raise IntegrityError("the prefix cache does not find the blocks that have a hash")
        if any(block not in hashed for block in self._cached) or any(block in hashed for block in self._empty):
            raise IntegrityError("a free block is cached without a hash, or empty with one")
