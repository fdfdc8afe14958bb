"""KV block allocation: block tables of requests and the cached content of free blocks. Works on ids, not on bytes.

A model's layers form one or more KV groups, each with its own block table (trimtab_modelspec/kv_groups.py). Any block
can serve any group. All tables of a request cover the same blocks of tokens; a group with an attention window frees the
leading ones.

```
block ids   0 ............ num_total ............ cap
            |-- mapped: used or free ---|-- reserved, not mapped --|
used        in the table of one request, or of several that share a prefix: full, read-only blocks only
free        empty:  a stack that returns low ids first, so that used blocks stay near the bottom
            cached: full unused blocks whose content has a hash; evicted when no empty block is left, the least
                    recently used first, and the last block of a request first
```
Growing appends ids; shrinking evicts the top ones, after their used content has moved below. Evicted content goes to
the host cache, if there is one (swap_space.py), and is restored when a request starts with it.

A table's list is append-only: any other change creates a new list. A step in flight may therefore still read its list,
and a receiver of a list needs only the appended part (runner/block_table_slots.py).

A cached prefix counts only if every group can continue from it: groups with full attention need all of its blocks,
groups with a window need the blocks inside the window of the next token.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from trimtab_modelspec.attention_window import FULL_ATTENTION, AttentionWindow

from trimtab_engine.errors import IntegrityError
from trimtab_engine.scheduling.prefix_hash import extend_block_hashes
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.swap_space import SwapSpace

Copies = list[tuple[int, int]]
"""(source, destination) block ids."""


@dataclass(frozen=True, slots=True)
class ShrinkPlan:
    """Plan for removing the blocks from `num_blocks` on. Copy each source block's KV to its destination, then apply.
    Every source is at or above `num_blocks`, every destination is free and below it, so copies may run in any order.
    """

    num_blocks: int
    moves: tuple[tuple[int, int], ...]
    """(source, destination) block ids."""


@dataclass(frozen=True, slots=True)
class InsufficientBlocks:
    """The blocks in use do not fit below the new limit: this many blocks must be freed first."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Cached blocks that hold the first `num_blocks` blocks of a request's tokens: per group the keys of the blocks
    inside its attention window, after `num_out_of_window` blocks before it.
    """

    num_blocks: int
    keys: list[list[bytes]]
    num_out_of_window: list[int]
    blocks: list[int]
    """Device blocks by key; the other keys are in the host cache."""
    num_host_blocks: int
    """Number of the `num_blocks` for which the host cache provides some content."""


class BlockManager:
    """Allocates KV blocks of `block_size` tokens. `cap_blocks` is the maximum pool size. `attention_windows` has one
    entry per KV group. `max_num_batched_tokens` bounds the tokens that a step adds to a window; with None a window is
    counted as if no block ever leaves it.
    """

    def __init__(
        self,
        num_blocks: int,
        cap_blocks: int,
        block_size: int,
        swap_space: SwapSpace | None = None,
        *,
        attention_windows: Sequence[AttentionWindow] = (FULL_ATTENTION,),
        max_num_batched_tokens: int | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be 1 or more")
        if not 0 < num_blocks <= cap_blocks:
            raise ValueError(f"num_blocks is {num_blocks}; it must be above 0 and at most cap_blocks {cap_blocks}")
        self.block_size = block_size
        self.attention_windows = tuple(attention_windows)
        self.swap_space = swap_space or SwapSpace(0, 0)
        self._max_num_batched_tokens = max_num_batched_tokens
        groups = tuple(enumerate(self.attention_windows))
        self._full = tuple(group for group, attention_window in groups if attention_window.window is None)
        self._windowed = tuple(
            (group, attention_window) for group, attention_window in groups if attention_window.window is not None
        )
        self.has_windows = bool(self._windowed)
        self._is_one_group = len(groups) == 1 and not self._windowed
        """All layers see all: nearly every model."""
        self._widest = self._full[0] if self._full else 0
        self._suffixes = tuple(group.to_bytes(2, "big") if group else b"" for group, _ in groups)
        """Per group: the suffix that makes a content hash the group's lookup key."""
        self._num_evicted = 0
        self._cap = cap_blocks
        self._num_total = num_blocks
        self._num_users = [0] * cap_blocks
        self._hashes: list[bytes | None] = [None] * cap_blocks
        self._by_hash: dict[bytes, int] = {}
        self._empty = list(range(num_blocks - 1, -1, -1))  # the last one is handed out next
        self._cached: OrderedDict[int, None] = OrderedDict()  # the first one is evicted next
        self._offloaded: Copies = []
        self._changes: list[bytes] | None = None
        """Lookup keys whose content appeared or was forgotten, while they are recorded; shared with the swap space."""

    @property
    def num_total(self) -> int:
        return self._num_total

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Number of free blocks whose content can still be found."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self._num_total - len(self._empty) - len(self._cached)

    @property
    def cap(self) -> int:
        return self._cap

    def take_evicted(self) -> int:
        """Return the number of cached blocks reused for other content since the last call."""
        evicted, self._num_evicted = self._num_evicted, 0
        return evicted

    def record_changes(self, *, enabled: bool) -> None:
        """Record from now on which cached content appears and is forgotten, or stop recording."""
        self._changes = [] if enabled else None
        self.swap_space.record_changes(self._changes)

    def take_changes(self) -> list[bytes]:
        """Return the lookup keys of the prefix cache's changes since the last call, oldest first, with repetitions.
        is_cached() returns the present state. Empty unless changes are recorded.
        """
        if not self._changes:
            return []
        changes = list(self._changes)
        self._changes.clear()
        return changes

    def is_cached(self, key: bytes) -> bool:
        """Return True if content with this lookup key can be found, on the device or in the host cache."""
        return key in self._by_hash or key in self.swap_space.findable

    def lookup_keys(self, request: Request, num_blocks: int) -> list[bytes]:
        """Return the lookup keys of the request's first blocks, in the widest group."""
        self._extend_hashes(request, num_blocks * self.block_size)
        suffix, hashes = self._suffixes[self._widest], request.block_hashes[:num_blocks]
        return [block_hash + suffix for block_hash in hashes] if suffix else hashes

    def take_offloaded(self) -> Copies:
        """Return copies (device, host) of blocks evicted since the last call. Run them before any other write."""
        offloaded, self._offloaded = self._offloaded, []
        return offloaded

    def blocks_for(self, num_tokens: int, num_requests: int = 1) -> int:
        """Return the maximum number of blocks in all groups that `num_requests` requests hold while they grow to
        `num_tokens` tokens in total.
        """
        spans = -(-num_tokens // self.block_size) + num_requests - 1  # upper bound: a new block each
        blocks = spans * len(self._full)
        for _, attention_window in self._windowed:
            each = spans
            if self._max_num_batched_tokens is not None:
                each = attention_window.num_blocks(num_tokens, self.block_size, self._max_num_batched_tokens)
            blocks += min(spans, num_requests * each)
        return blocks

    # --- tables ---------------------------------------------------------------------------------------------------

    def new_tables(self) -> list[list[int]]:
        """Return the tables of a request without blocks."""
        return [[] for _ in self.attention_windows]

    def can_allocate(self, num_tokens: int, cached: Sequence[int] = (), *, spare: int = 0) -> bool:
        """Return True if a request without blocks can get room for `num_tokens` tokens now, of which `cached` are
        already present, while `spare` blocks stay free.
        """
        taken = sum(1 for block in cached if not self._num_users[block])
        return self.blocks_for(num_tokens) - len(cached) + taken + spare <= len(self._empty) + len(self._cached)

    def allocate(self, request: Request, num_tokens_total: int) -> bool:
        """Grow the request's tables until they hold `num_tokens_total` tokens. False: not enough, and nothing
        changed.
        """
        num_blocks = -(-num_tokens_total // self.block_size)
        num_new = num_blocks - request.num_blocks
        if num_new <= 0:
            return True
        if num_new == 1 and self._is_one_group and self._empty:  # nearly always: a decode needs its next block
            block = self._empty.pop()
            self._num_users[block] = 1
            request.block_tables[0].append(block)
            request.num_blocks = num_blocks
            return True
        if num_new * len(request.block_tables) > len(self._empty) + len(self._cached):
            return False
        for table in request.block_tables:
            for _ in range(num_new):
                table.append(self._take())
        request.num_blocks = num_blocks
        return True

    def free_out_of_window(self, request: Request, position: int) -> None:
        """Take back the blocks that no token from `position` on sees: where all groups see all, none."""
        for group, attention_window in self._windowed:
            num_out_of_window = attention_window.first_seen(position) // self.block_size
            count = num_out_of_window - request.num_out_of_window[group]
            if count > 0:
                table = request.block_tables[group]
                self._release(table[:count])
                request.block_tables[group] = table[count:]
                request.num_out_of_window[group] = num_out_of_window

    def _take(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._evict(block)
            self._num_evicted += 1
        self._num_users[block] = 1
        return block

    def share(self, request: Request, cached: CachedPrefix) -> Copies:
        """Start the request's empty tables with the result of find_cached(). Return the copies (host, device) to run.
        Call can_allocate() first.
        """
        for block in cached.blocks:
            self._use(block)  # before any eviction below
        missing = [key for keys in cached.keys for key in keys if key not in self._by_hash]
        hosts = [self.swap_space.read(key) for key in missing]
        copies = [(host, self._restored(key)) for host, key in zip(hosts, missing, strict=True)]
        for keys, own in zip(cached.keys, request.block_tables, strict=True):
            own.extend([self._by_hash[key] for key in keys])
        request.num_out_of_window = list(cached.num_out_of_window)
        request.num_blocks = request.num_prefix_cached_blocks = cached.num_blocks
        return copies

    def _restored(self, key: bytes) -> int:
        """Return a block registered under this key, as the destination of a copy from the host cache."""
        block = self._take()
        self._hashes[block] = key
        self._by_hash[key] = block
        if self._changes is not None:
            self._changes.append(key)
        return block

    def _use(self, block: int) -> None:
        if not self._num_users[block]:
            del self._cached[block]
        self._num_users[block] += 1

    def free(self, request: Request) -> None:
        """Take back all blocks of the request; its tables are empty afterwards. Its last block is evicted first."""
        for table in request.block_tables:
            self._release(reversed(table))
        request.block_tables = self.new_tables()
        request.num_out_of_window = [0] * len(self.attention_windows)
        request.num_blocks = request.num_prefix_cached_blocks = 0

    def truncate(self, request: Request, num_tokens: int) -> None:
        """Take back the blocks at the end of the tables that `num_tokens` tokens do not need."""
        keep = -(-num_tokens // self.block_size)
        if request.num_blocks <= keep:
            return
        for group, (table, num_out_of_window) in enumerate(
            zip(request.block_tables, request.num_out_of_window, strict=True)
        ):
            self._release(reversed(table[keep - num_out_of_window :]))
            request.block_tables[group] = table[: keep - num_out_of_window]
        request.num_blocks = keep

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
        """Return the number of blocks that would become free with this request."""
        num_users = self._num_users
        return sum(1 for table in request.block_tables for block in table if num_users[block] == 1)

    def num_shared_tokens(self, request: Request) -> int:
        """Return the number of the request's tokens that other requests hold as well."""
        num_users = self._num_users
        shared = sum(1 for block in request.block_tables[self._widest] if num_users[block] > 1)
        return shared * self.block_size

    # --- prefix cache ---------------------------------------------------------------------------------------------

    def find_cached(self, request: Request) -> CachedPrefix:
        """Return the longest cached prefix of the request's tokens. It has full blocks only and excludes at least the
        last token, which must be computed for sampling.
        """
        num_tokens = len(request.token_ids) - 1
        self._extend_hashes(request, num_tokens)
        hashes = request.block_hashes[: num_tokens // self.block_size]
        num_blocks = len(hashes)
        for group in self._full:
            num_blocks = self._length_of_run(hashes[:num_blocks], group)
        if self._windowed:
            num_blocks = self._longest_in_window(hashes[:num_blocks])
        num_out_of_window = [0] * len(self.attention_windows)
        for group, attention_window in self._windowed:
            num_out_of_window[group] = attention_window.first_seen(num_blocks * self.block_size) // self.block_size
        keys = [
            [block_hash + suffix for block_hash in hashes[first:num_blocks]]
            for first, suffix in zip(num_out_of_window, self._suffixes, strict=True)
        ]
        blocks = [block for run in keys for key in run if (block := self._by_hash.get(key)) is not None]
        num_host = 0 if len(blocks) == sum(map(len, keys)) else self._num_host_blocks(keys, num_out_of_window)
        return CachedPrefix(num_blocks, keys, num_out_of_window, blocks, num_host)

    def _num_host_blocks(self, keys: list[list[bytes]], num_out_of_window: list[int]) -> int:
        """Return the number of token blocks for which some group has its content only in the host cache."""
        runs = zip(keys, num_out_of_window, strict=True)
        return len({i for run, first in runs for i, key in enumerate(run, first) if key not in self._by_hash})

    def _length_of_run(self, hashes: Sequence[bytes], group: int) -> int:
        """Return how many leading hashes the group has cached blocks for."""
        suffix, on_device, on_host = self._suffixes[group], self._by_hash, self.swap_space.findable
        for number, block_hash in enumerate(hashes):
            key = block_hash + suffix
            if key not in on_device and key not in on_host:
                return number
        return len(hashes)

    def _longest_in_window(self, hashes: Sequence[bytes]) -> int:
        """Return the largest of these block counts after which every windowed group has all blocks that the next token
        needs.
        """
        num_blocks, agreed = len(hashes), 0
        on_device, on_host = self._by_hash, self.swap_space.findable
        while num_blocks and agreed < len(self._windowed):
            agreed = 0
            for group, attention_window in self._windowed:
                first = attention_window.first_seen(num_blocks * self.block_size) // self.block_size
                suffix = self._suffixes[group]
                keys = ((i, hashes[i] + suffix) for i in range(num_blocks - 1, first - 1, -1))
                missing = (i for i, key in keys if key not in on_device and key not in on_host)
                shorter = next(missing, None)  # it is in sight from each of the numbers of blocks between, too
                if shorter is None:
                    agreed += 1
                else:
                    num_blocks = shorter
        return num_blocks

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Let others find the full blocks of the request's first `num_tokens` tokens, which are computed and known.

        When a block of the same content is known already, that one stays the one to be found.
        """
        last = min(num_tokens // self.block_size, request.num_blocks)
        first = request.num_prefix_cached_blocks
        if last <= first:
            return
        self._extend_hashes(request, num_tokens)
        if last == first + 1 and self._is_one_group:  # nearly always: a decode has filled a block
            self._cache_blocks(request.block_tables[0][first], request.block_hashes[first])
            request.num_prefix_cached_blocks = last
            return
        for table, num_out_of_window, suffix in zip(
            request.block_tables, request.num_out_of_window, self._suffixes, strict=True
        ):
            for index in range(max(first, num_out_of_window), last):
                self._cache_blocks(table[index - num_out_of_window], request.block_hashes[index] + suffix)
        request.num_prefix_cached_blocks = last

    def _cache_blocks(self, block: int, key: bytes) -> None:
        if self._hashes[block] is None and key not in self._by_hash:
            self._hashes[block] = key
            self._by_hash[key] = block
            if self._changes is not None:
                self._changes.append(key)

    def invalidate_blocks(self, request: Request) -> None:
        """Forget the content of all blocks of the request's tables, wherever it is. Others that share them keep what
        they have.
        """
        for table in request.block_tables:
            for block in table:
                block_hash = self._hashes[block]
                if block_hash is not None:
                    self.swap_space.forget(block_hash)
                self._forget(block)

    def _extend_hashes(self, request: Request, num_tokens: int) -> None:
        extend_block_hashes(
            request.block_hashes,
            request.token_ids,
            self.block_size,
            num_tokens,
            request.cache_salt,
            request.spans,
            request.adapter,
        )

    def reset_cache(self) -> None:
        """Forget all cached content, including the host cache. Blocks in use stay in use but are no longer found."""
        self.swap_space.forget_all()
        self._offloaded = []
        self._empty.extend(sorted(self._cached, reverse=True))
        self._cached.clear()
        if self._changes is not None:
            self._changes += self._by_hash
        self._by_hash.clear()
        self._hashes = [None] * self._cap

    def _evict(self, block: int) -> None:
        """Remove the block's content from the index; the host cache keeps it if there is one."""
        block_hash = self._hashes[block]
        if block_hash is not None and (host := self.swap_space.offload(block_hash)) is not None:
            self._offloaded.append((block, host))
        self._forget(block)

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block] = None
            if self._changes is not None:
                self._changes.append(block_hash)

    # --- swapping -------------------------------------------------------------------------------------------------

    def swap_out(self, request: Request) -> Copies | None:
        """Move the request's blocks to the swap space. Return the copies (device, host), or None if there is no room.
        The device blocks are free immediately: copy before the next step writes.
        """
        blocks = [block for table in request.block_tables for block in table]
        hashes = [self._hashes[block] for block in blocks]
        if self.swap_space.missing(hashes) > self.swap_space.num_free:
            return None
        copies: Copies = []
        for block, block_hash in zip(blocks, hashes, strict=True):
            host, is_new = self.swap_space.keep(block_hash)
            request.host_block_ids.append(host)
            if is_new:
                copies.append((block, host))
        num_out_of_window = request.num_out_of_window
        self.free(request)
        request.num_out_of_window = num_out_of_window
        return copies

    def find_swapped(self, request: Request) -> list[int]:
        """Return device blocks that still hold part of the swapped-out request's attention window."""
        hashes = (self.swap_space.hash_of(host) for _, host in self._window_blocks_of_swapped(request))
        return [block for h in hashes if h is not None and (block := self._by_hash.get(h)) is not None]

    def swap_in(self, request: Request) -> Copies:
        """Restore a swapped-out request's tables. Return the copies (host, device). Call can_allocate() first. Blocks
        outside the window of the next token are not restored: a block freed in the step that copies into it could be
        reallocated before the copy.
        """
        copies: Copies = []
        seen = self._window_blocks_of_swapped(request)
        hashes = [self.swap_space.hash_of(host) for _, host in seen]
        on_device = [None if block_hash is None else self._by_hash.get(block_hash) for block_hash in hashes]
        for block in on_device:
            if block is not None:
                self._use(block)  # before any eviction below
        for (group, host), there in zip(seen, on_device, strict=True):
            block = self._take() if there is None else there
            if there is None:
                copies.append((host, block))
            request.block_tables[group].append(block)
        request.num_blocks = self._num_blocks_of_swapped(request)
        request.num_out_of_window = self._num_out_of_window_of_swapped(request)
        self.swap_space.release(request.host_block_ids)
        request.num_prefix_cached_blocks = 0  # the copies are found again once they are offered
        return copies

    def _window_blocks_of_swapped(self, request: Request) -> list[tuple[int, int]]:
        """Return the (group, host block) pairs of a swapped-out request inside the window of its next token."""
        hosts, num_blocks = iter(request.host_block_ids), self._num_blocks_of_swapped(request)
        num_out_of_window = self._num_out_of_window_of_swapped(request)
        return [
            (group, host)
            for group, first in enumerate(request.num_out_of_window)
            for index, host in zip(range(first, num_blocks), hosts, strict=False)
            if index >= num_out_of_window[group]
        ]

    def _num_blocks_of_swapped(self, request: Request) -> int:
        return (len(request.host_block_ids) + sum(request.num_out_of_window)) // len(self.attention_windows)

    def _num_out_of_window_of_swapped(self, request: Request) -> list[int]:
        """Return per group the number of leading blocks that a swapped-out request no longer sees."""
        num_out_of_window = list(request.num_out_of_window)
        for group, attention_window in self._windowed:
            first_seen = attention_window.first_seen(request.num_computed_tokens) // self.block_size
            num_out_of_window[group] = max(num_out_of_window[group], first_seen)
        return num_out_of_window

    # --- size -----------------------------------------------------------------------------------------------------

    def grow(self, num_blocks: int) -> None:
        """Append the ids from the present total up to `num_blocks`, which the caller has mapped already."""
        if not self._num_total <= num_blocks <= self._cap:
            raise ValueError(f"cannot grow from {self._num_total} to {num_blocks} blocks; the cap is {self._cap}")
        # New ids go under the others: they are used last and can be given up first.
        self._empty[:0] = range(num_blocks - 1, self._num_total - 1, -1)
        self._num_total = num_blocks

    def plan_shrink(self, num_blocks: int, running: Iterable[Request]) -> ShrinkPlan | InsufficientBlocks:
        """Plan to keep only ids below `num_blocks`. `running` are all requests that hold blocks. Changes nothing."""
        if not 0 < num_blocks <= self._num_total:
            raise ValueError(f"cannot shrink from {self._num_total} to {num_blocks} blocks")
        if self.num_used > num_blocks:
            return InsufficientBlocks(self.num_used - num_blocks)
        used = {block for request in running for table in request.block_tables for block in table}
        sources = sorted(block for block in used if block >= num_blocks)
        empty = sorted(block for block in self._empty if block < num_blocks)
        evictable = [block for block in self._cached if block < num_blocks]
        return ShrinkPlan(num_blocks, tuple(zip(sources, empty + evictable, strict=False)))

    def apply_shrink(self, plan: ShrinkPlan, requests: Iterable[Request]) -> None:
        """Rewrite the block tables as planned. Nothing may have been allocated or freed since the plan was made."""
        moved = dict(plan.moves)
        if moved:
            for request in requests:
                request.block_tables = [[moved.get(block, block) for block in table] for table in request.block_tables]
        for source, destination in plan.moves:
            if destination in self._cached:
                del self._cached[destination]
                self._evict(destination)
            self._num_users[destination], self._num_users[source] = self._num_users[source], 0
            block_hash = self._hashes[source]
            self._hashes[destination], self._hashes[source] = block_hash, None
            if block_hash is not None:
                self._by_hash[block_hash] = destination
        for block in [block for block in self._cached if block >= plan.num_blocks]:
            del self._cached[block]
            self._evict(block)
        taken = set(moved.values())
        kept = [block for block in self._empty if block < plan.num_blocks and block not in taken]
        kept.sort(reverse=True)
        self._empty = kept
        self._num_total = plan.num_blocks

    # --- invariants -----------------------------------------------------------------------------------------------

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Check that tables and free blocks account for all blocks, users and hashes, and that tables reach exactly as
        far as computed tokens need.

        Args:
            requests: All live requests.

        Raises:
            IntegrityError: If an invariant is violated.
        """
        owners: dict[int, list[_Holder]] = {block: [] for block in (*self._empty, *self._cached)}
        if len(owners) != self.num_free:
            raise IntegrityError("a block is free twice")
        for request in requests:
            for holder, block in _holders(request):
                if owners.get(block) == []:
                    raise IntegrityError(f"block {block} belongs to request {request.request_id}, and is free")
                owners.setdefault(block, []).append(holder)
                self._check_shared(block, owners[block][0], holder)
        for block, users in owners.items():
            if not 0 <= block < self._num_total:
                owner = f"request {users[0].request.request_id}" if users else "the free blocks"
                raise IntegrityError(f"block {block} of {owner} is outside the {self._num_total} blocks that exist")
            if len(users) != self._num_users[block]:
                raise IntegrityError(f"block {block} counts {self._num_users[block]} users, but has {len(users)}")
        for request in requests:
            self._check_tables(request)
        if len(owners) != self._num_total:
            missing = sorted(set(range(self._num_total)) - owners.keys())
            raise IntegrityError(
                f"{len(missing)} of {self._num_total} blocks have no owner, first of them {missing[0]}"
            )
        self._check_hashes()
        self.swap_space.check_integrity([request.host_block_ids for request in requests])

    def _check_shared(self, block: int, first: "_Holder", other: "_Holder") -> None:
        """Check that requests share a block only as the same full block of equal prefixes in one group."""
        if first == other:
            return
        end = (other.index + 1) * self.block_size
        one, two = first.request, other.request
        alike = one.token_ids[:end] == two.token_ids[:end] and len(one.token_ids) >= end
        alike = alike and _contents_before(end, one) == _contents_before(end, two)
        same_place = (first.group, first.index) == (other.group, other.index)
        if one is two or not (alike and same_place and one.num_computed_tokens >= end):
            raise IntegrityError(
                f"block {block} belongs to request {one.request_id} and to request {two.request_id}, which do not "
                f"begin alike"
            )

    def _check_tables(self, request: Request) -> None:
        if request.host_block_ids and any(request.block_tables):
            raise IntegrityError(f"request {request.request_id} has blocks on the device and in the swap space")
        needed = -(-request.num_computed_tokens // self.block_size)
        in_sight = [needed - num_out_of_window for num_out_of_window in request.num_out_of_window]
        held = [len(table) for table in request.block_tables]
        if request.host_block_ids:
            held, in_sight = [len(request.host_block_ids)], [sum(in_sight)]
        elif request.num_blocks != needed:
            held = [request.num_blocks - num_out_of_window for num_out_of_window in request.num_out_of_window]
        for own, least, attention_window, num_out_of_window in zip(
            held, in_sight, self.attention_windows, request.num_out_of_window, strict=False
        ):
            if own != least:
                raise IntegrityError(
                    f"request {request.request_id} has {own} blocks, but its {request.num_computed_tokens} computed "
                    f"tokens need {least}"
                )
            if num_out_of_window > attention_window.first_seen(request.num_computed_tokens) // self.block_size:
                raise IntegrityError(
                    f"request {request.request_id} freed {num_out_of_window} blocks inside its attention window"
                )

    def _check_hashes(self) -> None:
        hashed = {block: h for block, h in enumerate(self._hashes) if h is not None}
        if {block: h for h, block in self._by_hash.items()} != hashed:
            raise IntegrityError("the prefix cache does not find the blocks that have a hash")
        if any(block not in hashed for block in self._cached) or any(block in hashed for block in self._empty):
            raise IntegrityError("a free block is cached without a hash, or empty with one")


@dataclass(frozen=True, slots=True)
class _Holder:
    """A request that has a block at `index` of the table of `group`, counted from its first token on."""

    request: Request
    group: int
    index: int


def _contents_before(end: int, request: Request) -> list[tuple[int, bytes]]:
    """Return the start and content hash of each item of the request that has tokens before `end`."""
    return [(span.offset, span.item.content_hash) for span in request.spans if span.offset < end]


def _holders(request: Request) -> Iterator[tuple[_Holder, int]]:
    """Yield every position in the request's tables with its block."""
    for group, (table, num_out_of_window) in enumerate(
        zip(request.block_tables, request.num_out_of_window, strict=True)
    ):
        for index, block in enumerate(table, num_out_of_window):
            yield _Holder(request, group, index), block
