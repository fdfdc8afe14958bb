"""Addresses that a KV cache's tensors lie at, and how much of them has memory behind it. What lies where is
kv_cache.py's.

```
range    | region 0: used | given back … | region 1: used | given back … | …       a region: one layer's keys, or values
```
Three kinds: the machine's memory (one anonymous mapping: a page becomes resident when it is written, and goes back by
madvise), one plain allocation of a device, and a device's mapped pages (mapped_range.py).
"""

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

MAP_NORESERVE = 0x4000  # <asm/mman.h>; the mmap module names it only in later Pythons
MADV_NOHUGEPAGE = 15  # likewise: a huge page would make blocks resident that nobody wrote

Span = tuple[int, int]
"""Bytes [first, last) of the range."""
Pin = Callable[[int, int], Callable[[], None]]
"""Makes (address, bytes) readable and writable for a device, and returns what ends that."""


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
    """The machine's own memory, whatever the engine's device is. With `pin` a CUDA device can read and write it, and
    all of it is resident from the beginning."""

    def __init__(self, pin: Pin | None = None) -> None:
        self._pin = pin

    def page_bytes(self, num_regions: int) -> int:
        return mmap.PAGESIZE

    def reserve(self, regions: Sequence[Span], page_bytes: int) -> AddressRange:
        return HostRange(regions, self._pin)


def pin_for_cuda(address: int, num_bytes: int) -> Callable[[], None]:
    """Lock these pages in memory, at addresses that devices use as well; returns what unlocks them. Raises MemoryError
    where that is refused."""
    runtime: Any = torch.cuda.cudart  # torch types it not
    error = int(runtime().cudaHostRegister(address, num_bytes, 0))
    if error != 0:
        raise MemoryError(f"{num_bytes} bytes of host memory cannot be pinned for CUDA (error {error})")

    def unpin() -> None:
        runtime().cudaHostUnregister(address)

    return unpin


class HostRange:
    """An anonymous private mapping: growing costs nothing, shrinking is exact to a page. Where it is pinned, it is
    unpinned when the last tensor of it has gone, before its addresses are given to somebody else: the driver would
    refuse to pin them again, or the device would go on reading the old pages."""

    is_live = True

    def __init__(self, regions: Sequence[Span], pin: Pin | None = None) -> None:
        self._regions = list(regions)
        self._size = self._regions[-1][1]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._mapping = mmap.mmap(-1, self._size, flags=flags)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            # What is pinned is resident anyway, and pinned page by page: the larger they are, the sooner it is done.
            self._mapping.madvise(MADV_NOHUGEPAGE if pin is None else mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        memory = (ctypes.c_ubyte * self._size).from_address(address)
        # The finalizer holds the mapping, the tensors hold what is finalized.
        unpin = None if pin is None else pin(address, self._size)
        weakref.finalize(memory, _release, self._mapping, unpin).atexit = False
        self.whole = torch.frombuffer(memory, dtype=torch.uint8)
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


def _release(mapping: mmap.mmap, unpin: Callable[[], None] | None) -> None:
    """The mapping goes with this call's last reference to it."""
    if unpin is not None:
        unpin()


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
