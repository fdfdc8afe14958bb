"""Swapped-out KV blocks of one rank in host memory. The location of each block is
managed by swap_space.py and equal on every rank; each rank moves its own part of a block.

Copies run sequentially on a side stream, concurrently with steps. A step waits, on the device only, for blocks swapped
in, and for swapped-out blocks that it overwrites. Other blocks are copied out while it computes.

```
steps      … step n ─┐                       ┌─ step n+1 (writes blocks 4, 5) ── step n+2 (writes 6) …
side stream          └─ out 4, 5 ────────────┴─ out 6, 7, 8 ───────────────────┘
```
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from trimtab_engine.device.kv_cache import KVCache, copy_across
from trimtab_engine.device.kv_commands import SwapBlocks
from trimtab_engine.device.side_stream import SideStream, StreamTicket, side_stream_of

Pairs = list[tuple[int, int]]
"""(source, destination) block ids."""


@dataclass(slots=True)
class Copying:
    """Blocks being copied. `read`: device blocks that no step may write until they are copied."""

    ticket: StreamTicket
    num_blocks: int
    read: frozenset[int]


@dataclass(frozen=True, slots=True)
class Swapped:
    """Copies that have ended."""

    seconds: float = 0.0
    num_blocks: int = 0


NOTHING_SWAPPED = Swapped()


class SwapCache:
    """Copies blocks between `kv_cache` and `host`. With several ranks `mirror` sends the copies to the others."""

    def __init__(self, kv_cache: KVCache, host: KVCache, side_stream: SideStream | None = None) -> None:
        self._kv_cache, self._host = kv_cache, host
        self._side_stream = side_stream or side_stream_of(kv_cache.device)
        self._copying: list[Copying] = []
        self._swapped = NOTHING_SWAPPED
        self.mirror: Callable[[SwapBlocks], None] | None = None

    def announce(self, swap_out: Pairs, swap_in: Pairs) -> None:
        """Send the copies to other ranks, in step order, before the step that needs them."""
        if self.mirror is not None and (swap_out or swap_in):
            self.mirror(SwapBlocks(swap_out, swap_in))

    def copy(self, swap_out: Pairs, swap_in: Pairs, slots: Iterable[int] | None = None) -> None:
        """Start copying blocks out (device, host), then in (host, device), before a step that writes these KV slots
        (None means any). Called before every step, even without copies. The host never waits.
        """
        self._note_ended()
        if not (swap_out or swap_in or any(copying.read for copying in self._copying)):
            return
        written = None if slots is None else {slot // self._kv_cache.block_size for slot in slots}
        for copying in self._copying:
            if copying.read and (written is None or not written.isdisjoint(copying.read)):
                self._side_stream.block_steps_until(copying.ticket)
                copying.read = frozenset()
        # A block swapped in may come from a host block that is being swapped out: copy those out first.
        is_free = [written is not None and not swap_in and block not in written for block, _ in swap_out]
        first = [pair for pair, free in zip(swap_out, is_free, strict=True) if not free]
        later = [pair for pair, free in zip(swap_out, is_free, strict=True) if free]
        if first or swap_in:
            self._side_stream.block_steps_until(self._begin(first, swap_in).ticket)
        if later:
            self._begin(later, []).read = frozenset(block for block, _ in later)

    def take_swapped(self) -> Swapped:
        """Return the copies that ended since the last call."""
        self._note_ended()
        swapped, self._swapped = self._swapped, NOTHING_SWAPPED
        return swapped

    def _begin(self, swap_out: Pairs, swap_in: Pairs) -> Copying:
        def work() -> None:
            copy_across(self._kv_cache, self._host, swap_out)
            copy_across(self._host, self._kv_cache, swap_in)

        copying = Copying(self._side_stream.begin(work), len(swap_out) + len(swap_in), frozenset())
        self._copying.append(copying)
        return copying

    def _note_ended(self) -> None:
        """Record ended copies; they end in start order."""
        while self._copying and (seconds := self._copying[0].ticket.seconds()) is not None:
            ended = self._copying.pop(0)
            self._swapped = Swapped(self._swapped.seconds + seconds, self._swapped.num_blocks + ended.num_blocks)

    @property
    def untouched_bytes(self) -> int:
        """Bytes never written, which the kernel does not count as used."""
        return max(0, self._host.mapped_bytes - self._host.resident_bytes())
