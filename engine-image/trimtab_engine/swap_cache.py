"""Swapped-out KV blocks of one rank: host memory beside the KV cache that they come from. Which block is where is
swap_space.py's business; it is the same on every rank, so each rank moves its own part of a block.
"""

import time
from collections.abc import Callable

from trimtab_engine.kv_cache import KVCache, copy_across
from trimtab_engine.parallel.wire_messages import SwapBlocks

Pairs = list[tuple[int, int]]
"""(source, destination) block ids."""


class SwapCache:
    """`host` holds blocks like those of `kv_cache`. With several ranks `mirror` tells the others."""

    def __init__(self, kv_cache: KVCache, host: KVCache) -> None:
        self._kv_cache, self._host = kv_cache, host
        self.mirror: Callable[[SwapBlocks], None] | None = None

    def announce(self, swap_out: Pairs, swap_in: Pairs) -> None:
        """Have the other ranks copy as well: before they are sent the step that needs it, and in the order of steps."""
        if self.mirror is not None and (swap_out or swap_in):
            self.mirror(SwapBlocks(swap_out, swap_in))

    def copy(self, swap_out: Pairs, swap_in: Pairs) -> float:
        """Copy blocks out (device, host), then in (host, device). Returns the seconds that it took."""
        if not swap_out and not swap_in:
            return 0.0
        began = time.perf_counter()
        copy_across(self._kv_cache, self._host, swap_out)
        copy_across(self._host, self._kv_cache, swap_in)
        return time.perf_counter() - began

    @property
    def untouched_bytes(self) -> int:
        """What nobody has written yet, which the kernel does not count as used."""
        return max(0, self._host.mapped_bytes - self._host.resident_bytes())
