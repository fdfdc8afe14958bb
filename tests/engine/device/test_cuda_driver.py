"""CUDA driver calls: arguments and error mapping, on a fake that enforces the driver's rules."""

import inspect

import pytest
from fake_cuda import CUresult, FakeCuda
from trimtab_engine.device.cuda_driver import CudaDriver, load_bindings

PAGE = 4096


def a_driver(fake: FakeCuda) -> CudaDriver:
    return CudaDriver(fake, device_index=3)


def test_new_memory_is_created_mapped_and_released_so_that_unmapping_frees_it() -> None:
    fake = FakeCuda()
    driver = a_driver(fake)
    address = driver.reserve(8 * PAGE, PAGE)
    driver.map(address, 2 * PAGE)
    driver.map(address + 2 * PAGE, 2 * PAGE)
    driver.allow_access(address, 4 * PAGE)
    assert fake.calls == [
        ("cuMemAddressReserve", 8 * PAGE, PAGE, 0, 0),
        ("cuMemCreate", 2 * PAGE, 3, 0),
        ("cuMemMap", address, 2 * PAGE, 0, 101, 0),
        ("cuMemRelease", 101),
        ("cuMemCreate", 2 * PAGE, 3, 0),
        ("cuMemMap", address + 2 * PAGE, 2 * PAGE, 0, 102, 0),
        ("cuMemRelease", 102),
        ("cuMemSetAccess", address, 4 * PAGE, 1),
    ]
    before = fake.free_bytes
    driver.unmap(address, 2 * PAGE)
    driver.unmap(address + 2 * PAGE, 2 * PAGE)
    assert fake.free_bytes == before + 4 * PAGE
    driver.free_range(address, 8 * PAGE)


def test_a_device_without_memory_left_is_a_memory_error_and_holds_nothing() -> None:
    fake = FakeCuda(free_bytes=PAGE)
    driver = a_driver(fake)
    address = driver.reserve(4 * PAGE, PAGE)
    with pytest.raises(MemoryError, match="cuMemCreate failed on the CUDA device: CUDA_ERROR_OUT_OF_MEMORY"):
        driver.map(address, 2 * PAGE)
    assert fake.mapped_bytes == 0
    assert fake.free_bytes == PAGE


def test_memory_that_cannot_be_mapped_is_released() -> None:
    fake = FakeCuda()
    driver = a_driver(fake)
    address, before = driver.reserve(4 * PAGE, PAGE), fake.free_bytes
    fake.fails["cuMemMap"] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(RuntimeError, match="cuMemMap failed on the CUDA device: CUDA_ERROR_INVALID_VALUE"):
        driver.map(address, 2 * PAGE)
    assert fake.names()[-1] == "cuMemRelease"
    assert fake.free_bytes == before


def test_the_real_bindings_have_the_calls_with_the_arguments_in_this_order() -> None:
    bindings = load_bindings()
    assert bindings is not None, "cuda-bindings is a dependency of development"
    expected = {
        "cuMemGetAllocationGranularity": ["prop", "option"],
        "cuMemAddressReserve": ["size", "alignment", "addr", "flags"],
        "cuMemAddressFree": ["ptr", "size"],
        "cuMemCreate": ["size", "prop", "flags"],
        "cuMemMap": ["ptr", "size", "offset", "handle", "flags"],
        "cuMemSetAccess": ["ptr", "size", "desc", "count"],
        "cuMemUnmap": ["ptr", "size"],
        "cuMemRelease": ["handle"],
    }
    for name, parameters in expected.items():
        assert list(inspect.signature(getattr(bindings, name)).parameters) == parameters, name
        assert list(inspect.signature(getattr(FakeCuda(), name)).parameters) == parameters, f"the fake's {name}"


def test_the_real_bindings_take_the_device_and_the_access_that_are_set() -> None:
    bindings = load_bindings()
    assert bindings is not None
    driver = CudaDriver(bindings, device_index=2)  # makes structures, calls nothing
    assert driver._properties.location.id == driver._access.location.id == 2
    assert driver._properties.location.type == bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    assert driver._properties.type == bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    assert driver._access.flags == bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    assert bindings.CUresult.CUDA_ERROR_OUT_OF_MEMORY.name == "CUDA_ERROR_OUT_OF_MEMORY"
