"""Which KV block belongs to which request. It knows ids and tables only: bytes and copies are the caller's.

```
block ids   0 ............ num_total ............ cap
            |-- mapped: free or in a table --|-- reserved, not mapped --|
```
Free blocks form a stack that hands out low ids first and takes freed ones back on top, so what is in use stays near
the bottom and a shrink has little to move. Growing appends ids; shrinking retires the top ones, after what is used
there has moved below. A block has one owner as long as there is no prefix cache.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trimtab_engine.errors import IntegrityError
from trimtab_engine.request import Request


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

    def __init__(self, num_blocks: int, cap_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be 1 or more")
        if not 0 < num_blocks <= cap_blocks:
            raise ValueError(f"num_blocks is {num_blocks}; it must be above 0 and at most cap_blocks {cap_blocks}")
        self.block_size = block_size
        self._cap = cap_blocks
        self._num_total = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # the last one is handed out next

    @property
    def num_total(self) -> int:
        return self._num_total

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self._num_total - len(self._free)

    @property
    def cap(self) -> int:
        return self._cap

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether a request without blocks could be given room for that many tokens now."""
        return -(-num_tokens // self.block_size) <= len(self._free)

    def allocate(self, request: Request, num_tokens_total: int) -> bool:
        """Grow the request's table until it holds `num_tokens_total` tokens. False: not enough, and nothing changed."""
        block_ids = request.block_ids
        num_new = -(-num_tokens_total // self.block_size) - len(block_ids)
        if num_new <= 0:
            return True
        free = self._free
        if num_new > len(free):
            return False
        if num_new == 1:
            block_ids.append(free.pop())
        else:
            block_ids.extend(reversed(free[-num_new:]))
            del free[-num_new:]
        return True

    def free(self, request: Request) -> None:
        """Take back all blocks of the request; its table is empty afterwards."""
        block_ids = request.block_ids
        block_ids.reverse()  # so that its first blocks are handed out first
        self._free.extend(block_ids)
        block_ids.clear()

    def grow(self, num_blocks: int) -> None:
        """Append the ids from the present total up to `num_blocks`, which the caller has mapped already."""
        if not self._num_total <= num_blocks <= self._cap:
            raise ValueError(f"cannot grow from {self._num_total} to {num_blocks} blocks; the cap is {self._cap}")
        # New ids go under the others: they are used last and can be given up first.
        self._free[:0] = range(num_blocks - 1, self._num_total - 1, -1)
        self._num_total = num_blocks

    def plan_shrink(self, num_blocks: int, running: Iterable[Request]) -> ShrinkPlan | BlocksShort:
        """Plan to keep only ids below `num_blocks`. `running` are all requests that hold blocks. Changes nothing."""
        if not 0 < num_blocks <= self._num_total:
            raise ValueError(f"cannot shrink from {self._num_total} to {num_blocks} blocks")
        if self.num_used > num_blocks:
            return BlocksShort(self.num_used - num_blocks)
        sources = sorted(block for request in running for block in request.block_ids if block >= num_blocks)
        destinations = sorted(block for block in self._free if block < num_blocks)
        return ShrinkPlan(num_blocks, tuple(zip(sources, destinations, strict=False)))

    def apply_shrink(self, plan: ShrinkPlan, requests: Iterable[Request]) -> None:
        """Rewrite the block tables as planned. Nothing may have been allocated or freed since the plan was made."""
        moved = dict(plan.moves)
        if moved:
            for request in requests:
                request.block_ids[:] = [moved.get(block, block) for block in request.block_ids]
        taken = set(moved.values())
        kept = [block for block in self._free if block < plan.num_blocks and block not in taken]
        kept.sort(reverse=True)
        self._free = kept
        self._num_total = plan.num_blocks

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Raise IntegrityError unless tables and free blocks divide all blocks among them.

        `requests` are all that live. A table is exactly as long as its computed tokens need.
        """
        owners: dict[int, str] = {}
        for block in self._free:
            _own(owners, block, "the free list", self._num_total)
        for request in requests:
            for block in request.block_ids:
                _own(owners, block, f"request {request.request_id}", self._num_total)
            needed = self.blocks_for(request.num_computed_tokens)
            if len(request.block_ids) != needed:
                raise IntegrityError(
                    f"request {request.request_id} has {len(request.block_ids)} blocks, but its "
                    f"{request.num_computed_tokens} computed tokens need {needed}"
                )
        if len(owners) != self._num_total:
            missing = sorted(set(range(self._num_total)) - owners.keys())
            raise IntegrityError(
                f"{len(missing)} of {self._num_total} blocks have no owner, first of them {missing[0]}"
            )


def _own(owners: dict[int, str], block: int, owner: str, num_total: int) -> None:
    if not 0 <= block < num_total:
        raise IntegrityError(f"block {block} of {owner} is outside the {num_total} blocks that exist")
    if block in owners:
        raise IntegrityError(f"block {block} belongs to {owners[block]} and to {owner}")
    owners[block] = owner
