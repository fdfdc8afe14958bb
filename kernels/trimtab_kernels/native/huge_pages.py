"""Huge pages for the memory of a tensor that has not been written yet.

Only whole pages within the tensor are requested, so that no memory is used that torch has not counted. If the system
has none, or does not grant them on request (/sys/kernel/mm/transparent_hugepage/enabled), pages stay small.
"""

import ctypes
import mmap
from functools import cache
from typing import Any

import torch

HUGE_PAGE_BYTES = 2 << 20  # on x86-64, and on aarch64 with pages of 4 KiB; on other systems the kernel rounds
ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
"""None if this system has no such advice."""


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Request huge pages for a contiguous tensor. Its contents do not change."""
    first, last = _whole_pages(tensor.data_ptr(), tensor.nbytes)
    if ADVICE is not None and first < last:
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ADVICE)


def _whole_pages(address: int, num_bytes: int) -> tuple[int, int]:
    """Return the start of the first whole huge page and the end of the last one within these bytes; start >= end if
    there is none.
    """
    return -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, (address + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
