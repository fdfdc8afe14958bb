"""Address ranges of KV cache tensors and the memory mapped in them. kv_cache.py defines their layout.

```
range    | region 0: used | released …   | region 1: used | released …   | …       a region: one layer's keys, or values
```
Three kinds: host memory (one anonymous mapping: a page becomes resident when written, and is released by madvise), one
plain allocation of a device, and a device's mapped pages (mapped_range.py).
"""

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

MAP_NORESERVE = 0x4000  # <asm/mman.h>; the mmap module names it only in later Pythons
MADV_NOHUGEPAGE = 15  # a huge page would make unwritten blocks resident

Span = tuple[int, int]
"""Bytes [first, last) of the range."""
Pin = Callable[[int, int], Callable[[], None]]
"""Makes (address, bytes) accessible to a device, and returns the function that undoes it."""


class AddressRange(Protocol):
    """A range with fixed addresses. Its regions are aligned to pages of `page_bytes`."""

    is_live: bool
    """True if keep() maps and unmaps memory. False if all of it is allocated from the start."""

    @property
    def whole(self) -> torch.Tensor:
        """uint8 [size]."""
        ...

    def keep(self, used: Sequence[int]) -> None:
        """Provide memory for the first used[i] bytes of region i, and release whole pages after them, whose content is
        lost. Either no region grows or none shrinks.

        Raises:
            MemoryError: If memory is insufficient. Nothing has changed.
        """
        ...

    def resident_bytes(self) -> int:
        """Return the bytes that actually take memory now, in whole pages."""
        ...


class AddressSpace(Protocol):
    """Source of ranges: a device, or the host's memory."""

    def page_bytes(self, num_regions: int) -> int:
        """Return the alignment of regions."""
        ...

    def reserve(self, regions: Sequence[Span], page_bytes: int) -> AddressRange:
        """Reserve a range whose regions are consecutive from 0 on."""
        ...


class HostMemory:
    """The host's memory, independent of the engine's device. With `pin` a CUDA device can access it, and all of it is
    resident from the start.
    """

    def __init__(self, pin: Pin | None = None) -> None:
        self._pin = pin

    def page_bytes(self, num_regions: int) -> int:
        return mmap.PAGESIZE

    def reserve(self, regions: Sequence[Span], page_bytes: int) -> AddressRange:
        return HostRange(regions, self._pin)


def pin_for_cuda(address: int, num_bytes: int) -> Callable[[], None]:
    """Pin these pages, at addresses that devices use as well. Return the function that unpins them.

    Raises:
        MemoryError: If pinning fails.
    """
    runtime: Any = torch.cuda.cudart  # torch types it not
    error = int(runtime().cudaHostRegister(address, num_bytes, 0))
    if error != 0:
        raise MemoryError(f"{num_bytes} bytes of host memory cannot be pinned for CUDA (error {error})")

    def unpin() -> None:
        runtime().cudaHostUnregister(address)

    return unpin


class HostRange:
    """An anonymous private mapping: growing costs nothing, shrinking is exact to a page.

    A pinned range is unpinned when its last tensor is freed, before its addresses are reused: otherwise the driver
    would refuse to pin them again, or the device would continue to read the old pages.
    """

    is_live = True

    def __init__(self, regions: Sequence[Span], pin: Pin | None = None) -> None:
        self._regions = list(regions)
        self._size = self._regions[-1][1]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._mapping = mmap.mmap(-1, self._size, flags=flags)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            # Pinned memory is resident anyway and pinned page by page: larger pages are faster.
            self._mapping.madvise(MADV_NOHUGEPAGE if pin is None else mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        memory = (ctypes.c_ubyte * self._size).from_address(address)
        # The finalizer holds the mapping; the tensors hold the finalized object.
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
    """Unpin; the mapping is freed with this call's last reference to it."""
    if unpin is not None:
        unpin()


class AllocatedRange:
    """One allocation for all regions, made at once: limits exist only in the engine's bookkeeping."""

    is_live = False

    def __init__(self, regions: Sequence[Span], device: torch.device) -> None:
        self.whole = torch.zeros(regions[-1][1], dtype=torch.uint8, device=device)

    def keep(self, used: Sequence[int]) -> None:
        """Do nothing: all memory is allocated."""

    def resident_bytes(self) -> int:
        return self.whole.numel()


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
