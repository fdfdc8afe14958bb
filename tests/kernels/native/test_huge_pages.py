"""Huge pages are requested for large weights, only within their own memory."""

import ctypes
from pathlib import Path

import pytest
import torch
from trimtab_kernels.native import huge_pages
from trimtab_kernels.native.huge_pages import HUGE_PAGE_BYTES, advise_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return the (address, bytes) of each request; the fake system rejects all."""
    made: list[tuple[int, int]] = []

    class Libc:
        def madvise(self, address: ctypes.c_void_p, num_bytes: ctypes.c_size_t, advice: int) -> int:
            made.append((address.value or 0, num_bytes.value))
            return -1

    monkeypatch.setattr(huge_pages, "ADVICE", 14)
    monkeypatch.setattr(huge_pages, "_libc", Libc)
    return made


@pytest.mark.parametrize("num_bytes", [4, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES - 4, 8 * HUGE_PAGE_BYTES])
def test_only_whole_huge_pages_within_tensor_are_requested(requested: list[tuple[int, int]], num_bytes: int) -> None:
    tensor = torch.empty(num_bytes // 4)
    advise_huge_pages(tensor)
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    for address, length in requested:
        assert address % HUGE_PAGE_BYTES == length % HUGE_PAGE_BYTES == 0
        assert first <= address < address + length <= last
        assert tensor.nbytes - length < 2 * HUGE_PAGE_BYTES
    assert bool(requested) == (first + -first % HUGE_PAGE_BYTES + HUGE_PAGE_BYTES <= last)


def test_system_without_huge_pages_gets_no_request(
    requested: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huge_pages, "ADVICE", None)
    advise_huge_pages(torch.empty(8 * HUGE_PAGE_BYTES))
    assert requested == []


@pytest.mark.skipif(not SETTING.exists() or "[never]" in SETTING.read_text(), reason="this system has none")
def test_large_tensor_gets_huge_pages() -> None:
    tensor = torch.empty(32 * HUGE_PAGE_BYTES // 4)
    advise_huge_pages(tensor)
    flags = _flags_of(tensor.data_ptr() + HUGE_PAGE_BYTES)
    assert "hg" in flags


def _flags_of(address: int) -> list[str]:
    """Return the flags of the mapping that contains this address."""
    has_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition("-")
        if rest and ":" not in first and "VmFlags" not in first:
            has_it = int(first, 16) <= address < int(rest.split()[0], 16)
        elif has_it and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []
