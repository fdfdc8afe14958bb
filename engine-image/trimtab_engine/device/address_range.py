"""Addresses that a KV cache's tensors lie at, and how much of them has memory behind it. What lies where is
kv_cache.py's.

```
range    | region 0: used | given back … | region 1: used | given back … | …       a region: one layer's keys, or values
```
Three kinds: the machine's memory (one anonymous mapping: a page becomes resident when it is written, and goes back by
madvise), one plain allocation of a device, and a device's mapped pages (mapped_range.py).
"""

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

MAP_NORESERVE = 0x4000  # <asm/mman.h>; the mmap module names it only in later Pythons
MADV_NOHUGEPAGE = 15  # likewise: a huge page would make blocks resident that nobody wrote

Span = tuple[int, int]
"""Bytes [first, last) of the range."""


class AddressRange(Protocol):
    """A range whose addresses never change. Its regions begin and end on pages of `page_bytes`."""

    is_live: bool
    """Whether memory comes and goes with keep(); else it is all taken from the beginning."""

    @property
    def whole(self) -> torch.Tensor:
        """uint8 [size]."""
        ...

    def keep(self, used: Sequence[int]) -> None:
        """Have memory for the first used[i] bytes of region i, and give back the whole pages behind them, whose
        content is lost. Either no region grows or none shrinks. Raises MemoryError, and then nothing has changed."""
        ...

    def resident_bytes(self) -> int:
        """What really takes memory now, in whole pages."""
        ...


class AddressSpace(Protocol):
    """Where ranges come from: a device, or the machine's own memory."""

    def page_bytes(self, num_regions: int) -> int:
        """What the regions of a range are multiples of."""
        ...

    def reserve(self, regions: Sequence[Span], page_bytes: int) -> AddressRange:
        """Regions one after another from 0 on."""
        ...


class HostMemory:
    """The machine's own memory, whatever the engine's device is. `pin`: makes a CUDA device able to read and write it
    (address, bytes); then all of it is resident from the beginning."""

    def __init__(self, pin: Callable[[int, int], None] | None = None) -> None:
        self._pin = pin

    def page_bytes(self, num_regions: int) -> int:
        return mmap.PAGESIZE

    def reserve(self, regions: Sequence[Span], page_bytes: int) -> AddressRange:
        reserved = HostRange(regions)
        if self._pin is not None:
            self._pin(reserved.whole.data_ptr(), reserved.whole.numel())
        return reserved


def pin_for_cuda(address: int, num_bytes: int) -> None:
    """Lock these pages in memory, at addresses that devices use as well. Raises MemoryError where that is refused."""
    runtime: Any = torch.cuda.cudart  # torch types it not
    error = int(runtime().cudaHostRegister(address, num_bytes, 0))
    if error != 0:
        raise MemoryError(f"{num_bytes} bytes of host memory cannot be pinned for CUDA (error {error})")


class HostRange:
    """An anonymous private mapping: growing costs nothing, shrinking is exact to a page."""

    is_live = True

    def __init__(self, regions: Sequence[Span]) -> None:
        self._regions = list(regions)
        self._size = self._regions[-1][1]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._mapping = mmap.mmap(-1, self._size, flags=flags)
        self._mapping.madvise(MADV_NOHUGEPAGE)
        self.whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._used = [0] * len(self._regions)

    def keep(self, used: Sequence[int]) -> None:
        for (start, end), before, now in zip(self._regions, self._used, used, strict=True):
            first = start + round_up(now, mmap.PAGESIZE)
            if now < before and first < end:
                self._mapping.madvise(mmap.MADV_DONTNEED, first, end - first)
        self._used = list(used)

    def resident_bytes(self) -> int:
        pages = (ctypes.c_ubyte * (self._size // mmap.PAGESIZE))()
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        if mincore(ctypes.c_void_p(self.whole.data_ptr()), ctypes.c_size_t(self._size), pages) != 0:
            raise OSError(ctypes.get_errno(), "mincore failed on the KV cache's range")
        return int(torch.frombuffer(pages, dtype=torch.uint8).bitwise_and(1).sum().item()) * mmap.PAGESIZE


class AllocatedRange:
    """One allocation for all regions, taken at once: what is used of it is a limit in the engine's books only."""

    is_live = False

    def __init__(self, regions: Sequence[Span], device: torch.device) -> None:
        self.whole = torch.zeros(regions[-1][1], dtype=torch.uint8, device=device)

    def keep(self, used: Sequence[int]) -> None:
        """Nothing comes or goes."""

    def resident_bytes(self) -> int:
        return self.whole.numel()


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
