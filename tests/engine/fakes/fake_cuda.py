"""A fake of the CUDA driver's virtual memory: enforces its rules, records calls, and poisons unmapped memory.

The rules of the driver's reference: sizes and addresses are multiples of the granularity, a mapping is removed as a
whole, access is set on mapped memory, and a range is freed when nothing is mapped in it.
"""
# ruff: noqa: N801, N802  names of the driver's bindings

import ctypes
import enum
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from trimtab_engine.device.address_range import AddressRange, Span
from trimtab_engine.device.cuda_driver import CudaDriver
from trimtab_engine.device.mapped_range import MappedRange, Owner

PAGE = 8192  # bytes of one map: two pages of the machine
POISON = 0xFF  # as float32, bfloat16 and float8_e4m3fn: not a number


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class CUmemAllocationType(enum.IntEnum):
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(enum.IntEnum):
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAccess_flags(enum.IntEnum):
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUmemAllocationGranularity_flags(enum.IntEnum):
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0


@dataclass
class CUmemLocation:
    type: int = 0
    id: int = 0


@dataclass
class CUmemAllocationProp:
    type: int = 0
    location: CUmemLocation = field(default_factory=CUmemLocation)


@dataclass
class CUmemAccessDesc:
    flags: int = 0
    location: CUmemLocation = field(default_factory=CUmemLocation)


class FakeCuda:
    """Stands where `cuda.bindings.driver` does."""

    CUresult = CUresult
    CUmemAllocationType = CUmemAllocationType
    CUmemLocationType = CUmemLocationType
    CUmemAccess_flags = CUmemAccess_flags
    CUmemAllocationGranularity_flags = CUmemAllocationGranularity_flags
    CUmemAllocationProp = CUmemAllocationProp
    CUmemAccessDesc = CUmemAccessDesc

    def __init__(self, granularity: int = mmap.PAGESIZE, free_bytes: int = 1 << 40) -> None:
        self.size, self.free_bytes = granularity, free_bytes
        self.calls: list[tuple[Any, ...]] = []
        self.fails: dict[str, int] = {}
        """The next call of this name fails so."""
        self._mappings: dict[int, mmap.mmap] = {}
        self.ranges: dict[int, int] = {}
        self.maps: dict[int, tuple[int, int]] = {}
        """Address -> (size, handle)."""
        self.accessible: set[int] = set()
        self._handles: dict[int, int] = {}
        self._released: set[int] = set()
        self._mapped_handles: set[int] = set()
        self._next_handle = 100

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def _note(self, *call: Any) -> int:
        self.calls.append(call)
        return self.fails.pop(call[0], CUresult.CUDA_SUCCESS)

    def _is_aligned(self, *values: int) -> bool:
        return all(value % self.size == 0 for value in values)

    def cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> tuple[Any, ...]:
        assert prop.type == CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        return self._note("cuMemGetAllocationGranularity", prop.location.id), self.size

    def cuMemAddressReserve(self, size: int, alignment: int, addr: int, flags: int) -> tuple[Any, ...]:
        error = self._note("cuMemAddressReserve", size, alignment, addr, flags)
        assert self._is_aligned(size, alignment)
        if error:
            return error, 0
        mapping = mmap.mmap(-1, size + alignment, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        address = -(-start // alignment) * alignment
        self._mappings[address], self.ranges[address] = mapping, size
        return error, address

    def cuMemAddressFree(self, ptr: int, size: int) -> tuple[Any, ...]:
        error = self._note("cuMemAddressFree", ptr, size)
        assert self.ranges.pop(ptr) == size
        assert not any(ptr <= address < ptr + size for address in self.maps)
        return (error,)

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> tuple[Any, ...]:
        error = self._note("cuMemCreate", size, prop.location.id, flags)
        assert self._is_aligned(size)
        assert size > 0
        if error or size > self.free_bytes:
            return error or CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        self.free_bytes -= size
        self._next_handle += 1
        self._handles[self._next_handle] = size
        return error, self._next_handle

    def cuMemMap(self, ptr: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        error = self._note("cuMemMap", ptr, size, offset, handle, flags)
        assert self._is_aligned(ptr, size)
        assert offset == 0
        assert self._handles[handle] == size
        assert any(start <= ptr and ptr + size <= start + length for start, length in self.ranges.items())
        assert not any(at in self.maps for at in range(ptr, ptr + size, self.size))
        if not error:
            self.maps[ptr] = (size, handle)
            self._mapped_handles.add(handle)
            ctypes.memset(ptr, 0, size)
        return (error,)

    def cuMemSetAccess(self, ptr: int, size: int, desc: list[Any], count: int) -> tuple[Any, ...]:
        error = self._note("cuMemSetAccess", ptr, size, count)
        assert count == len(desc) == 1
        assert desc[0].flags == CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        if not error:
            self.accessible.update(self._whole_maps(ptr, size))
        return (error,)

    def cuMemUnmap(self, ptr: int, size: int) -> tuple[Any, ...]:
        error = self._note("cuMemUnmap", ptr, size)
        length, handle = self.maps.pop(ptr)
        assert length == size, "one whole map, as torch's allocator does: the reference leaves several open"
        self._mapped_handles.discard(handle)
        self.accessible.discard(ptr)
        ctypes.memset(ptr, POISON, length)
        self._free_if_unused(handle)
        return (error,)

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        error = self._note("cuMemRelease", handle)
        self._released.add(handle)
        self._free_if_unused(handle)
        return (error,)

    def _whole_maps(self, ptr: int, size: int) -> list[int]:
        """The maps that fill [ptr, ptr + size) without a gap."""
        inside, at = [], ptr
        while at < ptr + size:
            inside.append(at)
            at += self.maps[at][0]
        assert at == ptr + size, "not whole maps"
        return inside

    def _free_if_unused(self, handle: int) -> None:
        if handle in self._released and handle not in self._mapped_handles:
            self.free_bytes += self._handles.pop(handle)

    @property
    def mapped_bytes(self) -> int:
        return sum(size for size, _ in self.maps.values())

    def check(self) -> None:
        """Check that mapped memory is readable and unmapped memory was not written."""
        assert self.accessible == set(self.maps)
        for start, end in self._gaps():
            assert ctypes.string_at(start, end - start).count(b"\xff") + self._never_mapped(start, end) == end - start

    def _never_mapped(self, start: int, end: int) -> int:
        return ctypes.string_at(start, end - start).count(b"\0")

    def _gaps(self) -> Iterator[tuple[int, int]]:
        for start, size in self.ranges.items():
            at = start
            for address in sorted(a for a in self.maps if start <= a < start + size):
                if address > at:
                    yield at, address
                at = address + self.maps[address][0]
            if at < start + size:
                yield at, start + size


def tensor_at(address: int, size: int, owner: Owner) -> torch.Tensor:
    """uint8 [size] on that memory, which keeps the owner alive."""
    array: Any = (ctypes.c_ubyte * size).from_address(address)
    array.owner = owner
    return torch.frombuffer(array, dtype=torch.uint8)


class FakeMemory:
    """A CUDA device's memory on the fake driver: what mapped_range.CudaMemory is on a real one."""

    kind = "cuda"

    def __init__(self, fake: FakeCuda, page: int = PAGE) -> None:
        self.fake, self._page = fake, page
        self.num_waits = 0

    def page_bytes(self, num_regions: int) -> int:
        return self._page

    def reserve(self, regions: Sequence[Span], page_bytes: int) -> AddressRange:
        return MappedRange(regions, page_bytes, CudaDriver(self.fake, 0), tensor_at=tensor_at, synchronize=self._wait)

    def _wait(self) -> None:
        self.num_waits += 1
        self.fake.calls.append(("synchronize",))
