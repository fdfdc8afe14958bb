"""An address range on a CUDA device whose regions grow and shrink page by page: addresses are reserved once, memory is
mapped behind the first bytes of each region.

```
region   |-- page 0 --|-- page 1 --|-- page 2 --|............ reserved only ............|
used     |---------------------------..^                       the last page also covers unused blocks
```
A page here is one mapping of the driver, a multiple of 2 MiB. A mapping can only be removed as a whole; pages are as
large as rounding allows, so that a resize takes few calls (`page_bytes_for`). Growing costs three calls per page
(create, map, release) and one per region (access), shrinking one per page.
"""

import logging
import weakref
from collections.abc import Callable, Sequence

import torch

from trimtab_engine.device.address_range import AddressRange, AllocatedRange, Span, round_up
from trimtab_engine.device.cuda_driver import CudaDriver, load_bindings

ROUNDING_SHARE = 256  # of a device's memory, the part that the last pages of all regions may waste: 0.4%
LARGEST_PAGE_BYTES = 64 << 20  # beyond, fewer calls do not pay: making a page takes longer than calling for it

logger = logging.getLogger("trimtab_engine.core")


def page_bytes_for(device_bytes: int, num_regions: int, granularity: int) -> int:
    """Return the largest power of two of `granularity` at which a page per region is 1/ROUNDING_SHARE of the device or
    less; one granule at least. H200 with 2 x 32 regions: 8 MiB, so 10 GiB are 1,280 pages.
    """
    page = granularity
    while 2 * page <= min(LARGEST_PAGE_BYTES, device_bytes // ROUNDING_SHARE // num_regions):
        page *= 2
    return page


class Owner:
    """Object kept alive by every tensor over a range; the range is freed with the last one."""


class _ArrayAt:
    """Memory at an address, as torch takes it without a copy (numba's CUDA array interface, version 3)."""

    def __init__(self, address: int, num_bytes: int, owner: Owner) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


class _Pages:
    """Mapped pages of the regions of one reservation."""

    def __init__(
        self, regions: Sequence[Span], page_bytes: int, driver: CudaDriver, synchronize: Callable[[], None]
    ) -> None:
        self._driver, self._page, self._synchronize = driver, page_bytes, synchronize
        self._regions = list(regions)
        self.size = self._regions[-1][1]
        self.address = driver.reserve(self.size, page_bytes)
        self.mapped = [0] * len(self._regions)

    def keep(self, used: Sequence[int]) -> None:
        wanted = [round_up(num_bytes, self._page) for num_bytes in used]
        before = list(self.mapped)
        try:
            for region, size in enumerate(wanted):
                self._grow(region, size)
        except (MemoryError, RuntimeError):
            self._shrink(before)
            raise
        self._shrink(wanted)

    def close(self) -> None:
        self._shrink([0] * len(self._regions))
        self._driver.free_range(self.address, self.size)

    def _grow(self, region: int, size: int) -> None:
        first = self.address + self._regions[region][0] + self.mapped[region]
        added = size - self.mapped[region]
        for offset in range(0, added, self._page):
            self._driver.map(first + offset, self._page)
            self.mapped[region] += self._page
        if added > 0:
            self._driver.allow_access(first, added)

    def _shrink(self, sizes: Sequence[int]) -> None:
        """Unmap pages after the first sizes[i] bytes. Waits for kernels in flight, which may still read them."""
        ends = [min(size, mapped) for size, mapped in zip(sizes, self.mapped, strict=True)]
        if ends == self.mapped:
            return
        self._synchronize()
        for region, end in enumerate(ends):
            start = self.address + self._regions[region][0]
            while self.mapped[region] > end:
                self.mapped[region] -= self._page
                self._driver.unmap(start + self.mapped[region], self._page)


class MappedRange:
    """Regions of one reservation, freed with the last tensor over it. `tensor_at` makes a tensor of an address and a
    size that keeps its third argument alive; `synchronize` waits until the device has finished all work.
    """

    is_live = True

    def __init__(
        self,
        regions: Sequence[Span],
        page_bytes: int,
        driver: CudaDriver,
        *,
        tensor_at: Callable[[int, int, Owner], torch.Tensor],
        synchronize: Callable[[], None],
    ) -> None:
        self._pages = pages = _Pages(regions, page_bytes, driver, synchronize)
        owner = Owner()
        self._close = weakref.finalize(owner, pages.close)
        self._close.atexit = False  # then the driver takes everything back, perhaps before
        # torch queries the driver for the first address's device, and the driver knows only mapped addresses.
        self.keep([1] + [0] * (len(regions) - 1))
        self.whole = tensor_at(pages.address, pages.size, owner)

    def keep(self, used: Sequence[int]) -> None:
        self._pages.keep(used)

    def resident_bytes(self) -> int:
        return sum(self._pages.mapped)

    def close(self) -> None:
        """Release memory and addresses now. The tensors must not be used any more."""
        self._close()


class CudaMemory:
    """A CUDA device's memory for KV caches. `driver` None means it cannot be mapped page by page."""

    def __init__(self, device: torch.device, device_bytes: int, driver: CudaDriver | None) -> None:
        self._device, self._device_bytes, self._driver = device, device_bytes, driver

    @property
    def is_mapped(self) -> bool:
        """True if addresses can be reserved without memory."""
        return self._driver is not None

    def page_bytes(self, num_regions: int) -> int:
        if self._driver is None:
            return 512  # torch's own rounding
        return page_bytes_for(self._device_bytes, num_regions, self._driver.granularity())

    def reserve(self, regions: Sequence[Span], page_bytes: int) -> AddressRange:
        if self._driver is None:
            return AllocatedRange(regions, self._device)
        return MappedRange(
            regions,
            page_bytes,
            self._driver,
            tensor_at=lambda *place: torch.as_tensor(_ArrayAt(*place), device=self._device),
            synchronize=lambda: torch.cuda.synchronize(self._device),
        )


def open_cuda_memory(device: torch.device, device_bytes: int) -> CudaMemory:
    """Return memory mapped page by page with the driver's bindings; without them plain allocations, which is logged
    once.
    """
    bindings = load_bindings()
    if bindings is None:
        logger.warning(
            "cuda-bindings is not installed: the KV cache is one allocation of its cap, and gpu_memory_utilization "
            "below the cap is a limit that gives no memory back; install the extra `cuda` to map it page by page"
        )
        return CudaMemory(device, device_bytes, None)
    torch.cuda.synchronize(device)  # the calls want this thread's context
    index = torch.cuda.current_device() if device.index is None else device.index
    return CudaMemory(device, device_bytes, CudaDriver(bindings, index))
