"""CUDA driver calls for virtual memory, as plain functions of addresses and sizes.

mapped_range.py manages pages. The bindings (`cuda-bindings`, extra `cuda`) are a parameter, so that tests can record
calls.
"""

import importlib
from types import ModuleType
from typing import Any

Handle = Any
"""A physical allocation, as the bindings name it."""
BINDINGS = "cuda.bindings.driver"


def load_bindings() -> ModuleType | None:
    """Return the driver's bindings. None if they are not installed."""
    try:
        return importlib.import_module(BINDINGS)
    except ImportError:
        return None


class CudaDriver:
    """Driver calls of one device.

    Raises:
        MemoryError: If the device has no memory left.
        RuntimeError: For other errors, with the driver's message.
    """

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
        """Return the alignment of sizes and addresses: 2 MiB on current devices."""
        smallest = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        size = self._call("cuMemGetAllocationGranularity", self._properties, smallest)
        return int(size)

    def reserve(self, num_bytes: int, alignment: int) -> int:
        """Reserve an address range without memory and return its address."""
        return int(self._call("cuMemAddressReserve", num_bytes, alignment, 0, 0))

    def free_range(self, address: int, num_bytes: int) -> None:
        """Free a range in which nothing is mapped."""
        self._call("cuMemAddressFree", address, num_bytes)

    def map(self, address: int, num_bytes: int) -> None:
        """Map new memory at these addresses. It is freed when unmapped, and has no access rights yet."""
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
        """Return the call's result; the bindings return (error, result) or (error,)."""
        error, *result = getattr(self._cuda, name)(*arguments)
        if error == self._cuda.CUresult.CUDA_SUCCESS:
            return result[0] if result else None
        what = f"{name} failed on the CUDA device: {getattr(error, 'name', error)}"
        if error == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryError(what)
        raise RuntimeError(what)
