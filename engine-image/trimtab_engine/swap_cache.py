"""Swapped-out KV blocks of one rank: host memory beside the KV cache that they come from. Which block is where is
swap_space.py's business; it is the same on every rank, so each rank moves its own part of a block.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from trimtab_engine.kv_cache import KVCache, copy_across
from trimtab_engine.parallel.wire_messages import SwapBlocks

Pairs = list[tuple[int, int]]
"""(source, destination) block ids."""
Seconds = Callable[[], float]


class SwapCache:
    """`host` holds blocks like those of `kv_cache`. With several ranks `mirror` tells the others."""

    def __init__(self, kv_cache: KVCache, host: KVCache) -> None:
        self._kv_cache, self._host = kv_cache, host
        self.mirror: Callable[[SwapBlocks], None] | None = None

    def announce(self, swap_out: Pairs, swap_in: Pairs) -> None:
        """Have the other ranks copy as well: before they are sent the step that needs it, and in the order of steps."""
        if self.mirror is not None and (swap_out or swap_in):
            self.mirror(SwapBlocks(swap_out, swap_in))

    def copy(self, swap_out: Pairs, swap_in: Pairs) -> Seconds:
        """Copy blocks out (device, host), then in (host, device). Returns what waits for it and gives the seconds that
        it took.

        On CUDA it is queued on the steps' own stream: what wrote the blocks has ended before, and the step that reads,
        or writes them anew, begins after; the host waits for nothing.
        """
        if not swap_out and not swap_in:
            return _nothing
        if self._kv_cache.device.type == "cuda":
            new_event: Any = torch.cuda.Event  # torch types it not
            began, ended = new_event(enable_timing=True), new_event(enable_timing=True)
            began.record()
            self._copy(swap_out, swap_in)
            ended.record()
            return partial(_seconds_between, began, ended)
        start = time.perf_counter()
        self._copy(swap_out, swap_in)
        seconds = time.perf_counter() - start
        return lambda: seconds

    def _copy(self, swap_out: Pairs, swap_in: Pairs) -> None:
        copy_across(self._kv_cache, self._host, swap_out)
        copy_across(self._host, self._kv_cache, swap_in)

    @property
    def untouched_bytes(self) -> int:
        """What nobody has written yet, which the kernel does not count as used."""
        return max(0, self._host.mapped_bytes - self._host.resident_bytes())


def _nothing() -> float:
    return 0.0


def _seconds_between(began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000
