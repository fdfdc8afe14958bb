"""Swapped-out KV blocks of one rank: host memory beside the KV cache that they come from. Which block is where is
swap_space.py's business; it is the same on every rank, so each rank moves its own part of a block.

Copies run in a lane beside the steps, one after another. What a step needs holds it up, on the device alone: blocks
that come back, and blocks that go and that it writes anew. Other blocks that go are on their way while it computes.

```
steps      … step n ─┐                       ┌─ step n+1 (writes blocks 4, 5) ── step n+2 (writes 6) …
lane                 └─ out 4, 5 ────────────┴─ out 6, 7, 8 ───────────────────┘
```
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from trimtab_engine.device.changes import SwapBlocks
from trimtab_engine.device.kv_cache import KVCache, copy_across
from trimtab_engine.device.side_lane import LaneTicket, SideLane, side_lane

Pairs = list[tuple[int, int]]
"""(source, destination) block ids."""


@dataclass(slots=True)
class Copying:
    """Blocks on their way. `read`: those of the device that no step may write before they have gone."""

    ticket: LaneTicket
    num_blocks: int
    read: frozenset[int]


@dataclass(frozen=True, slots=True)
class Swapped:
    """Copies that have ended."""

    seconds: float = 0.0
    num_blocks: int = 0


NOTHING_SWAPPED = Swapped()


class SwapCache:
    """`host` holds blocks like those of `kv_cache`. With several ranks `mirror` tells the others."""

    def __init__(self, kv_cache: KVCache, host: KVCache, lane: SideLane | None = None) -> None:
        self._kv_cache, self._host = kv_cache, host
        self._lane = lane or side_lane(kv_cache.device)
        self._copying: list[Copying] = []
        self._swapped = NOTHING_SWAPPED
        self.mirror: Callable[[SwapBlocks], None] | None = None

    def announce(self, swap_out: Pairs, swap_in: Pairs) -> None:
        """Have the other ranks copy as well: before they are sent the step that needs it, and in the order of steps."""
        if self.mirror is not None and (swap_out or swap_in):
            self.mirror(SwapBlocks(swap_out, swap_in))

    def copy(self, swap_out: Pairs, swap_in: Pairs, slots: Iterable[int] | None = None) -> None:
        """Begin to copy blocks out (device, host), then in (host, device), before a step that writes these slots of the
        KV cache (None: any). Called before every step, with nothing to copy too. The host waits for nothing."""
        self._note_ended()
        if not (swap_out or swap_in or any(copying.read for copying in self._copying)):
            return
        written = None if slots is None else {slot // self._kv_cache.block_size for slot in slots}
        for copying in self._copying:
            if copying.read and (written is None or not written.isdisjoint(copying.read)):
                self._lane.hold_steps(copying.ticket)
                copying.read = frozenset()
        # What comes back may come from where something has just gone: then all of that goes first.
        is_free = [written is not None and not swap_in and block not in written for block, _ in swap_out]
        first = [pair for pair, free in zip(swap_out, is_free, strict=True) if not free]
        later = [pair for pair, free in zip(swap_out, is_free, strict=True) if free]
        if first or swap_in:
            self._lane.hold_steps(self._begin(first, swap_in).ticket)
        if later:
            self._begin(later, []).read = frozenset(block for block, _ in later)

    def take_swapped(self) -> Swapped:
        """What has ended since the last call."""
        self._note_ended()
        swapped, self._swapped = self._swapped, NOTHING_SWAPPED
        return swapped

    def _begin(self, swap_out: Pairs, swap_in: Pairs) -> Copying:
        def work() -> None:
            copy_across(self._kv_cache, self._host, swap_out)
            copy_across(self._host, self._kv_cache, swap_in)

        copying = Copying(self._lane.begin(work), len(swap_out) + len(swap_in), frozenset())
        self._copying.append(copying)
        return copying

    def _note_ended(self) -> None:
        """They end in the order in which they were begun."""
        while self._copying and (seconds := self._copying[0].ticket.seconds()) is not None:
            ended = self._copying.pop(0)
            self._swapped = Swapped(self._swapped.seconds + seconds, self._swapped.num_blocks + ended.num_blocks)

    @property
    def untouched_bytes(self) -> int:
        """What nobody has written yet, which the kernel does not count as used."""
        return max(0, self._host.mapped_bytes - self._host.resident_bytes())
