"""The CUDA driver's calls for virtual memory, as plain functions of addresses and sizes. Which pages there are is
mapped_range.py's.

The bindings (`cuda-bindings`, extra `cuda`) are handed in, so that tests record what is called with what.
"""

import importlib
from types import ModuleType
from typing import Any

Handle = Any
"""A physical allocation, as the bindings name it."""
BINDINGS = "cuda.bindings.driver"


def load_bindings() -> ModuleType | None:
    """The driver's bindings; None where they are not installed."""
    try:
        return importlib.import_module(BINDINGS)
    except ImportError:
        return None


class CudaDriver:
    """One device's. Every call raises MemoryError where the device has no memory left, else RuntimeError, with the
    driver's own word for it."""

    def __init__(self, bindings: Any, device_index: int) -> None:
        self._cuda = bindings
        self._properties = bindings.CUmemAllocationProp()
        self._properties.type = bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._access = bindings.CUmemAccessDesc()
        self._access.flags = bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for location in (self._properties.location, self._access.location):
            location.type = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            location.id = device_index

    def granularity(self) -> int:
        """What every size and address is a multiple of: 2 MiB on today's devices."""
        smallest = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        size = self._call("cuMemGetAllocationGranularity", self._properties, smallest)
        return int(size)

    def reserve(self, num_bytes: int, alignment: int) -> int:
        """An address range without memory behind it."""
        return int(self._call("cuMemAddressReserve", num_bytes, alignment, 0, 0))

    def free_range(self, address: int, num_bytes: int) -> None:
        """Give a range back. Nothing is mapped in it any more."""
        self._call("cuMemAddressFree", address, num_bytes)

    def map(self, address: int, num_bytes: int) -> None:
        """Put new memory behind these addresses. It is freed when they are unmapped, and has no access yet."""
        handle: Handle = self._call("cuMemCreate", num_bytes, self._properties, 0)
        try:
            self._call("cuMemMap", address, num_bytes, 0, handle, 0)
        finally:
            self._call("cuMemRelease", handle)  # the mapping keeps it alive

    def allow_access(self, address: int, num_bytes: int) -> None:
        """Let the device read and write a mapped range, of however many maps."""
        self._call("cuMemSetAccess", address, num_bytes, [self._access], 1)

    def unmap(self, address: int, num_bytes: int) -> None:
        """Take the memory of one map away again."""
        self._call("cuMemUnmap", address, num_bytes)

    def _call(self, name: str, *arguments: Any) -> Any:
        """The call's result; the bindings return (error, result) or (error,)."""
        error, *result = getattr(self._cuda, name)(*arguments)
        if error == self._cuda.CUresult.CUDA_SUCCESS:
            return result[0] if result else None
        what = f"{name} failed on the CUDA device: {getattr(error, 'name', error)}"
        if error == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryError(what)
        raise RuntimeError(what)
