"""Asks the system for huge pages behind a tensor that nobody has touched yet.

Only whole ones that lie within the tensor are asked for, so that no memory is taken that torch has not counted. Where
the system has none, or gives none to those who ask (/sys/kernel/mm/transparent_hugepage/enabled), pages stay small.
"""

import ctypes
import mmap
from functools import cache
from typing import Any

import torch

HUGE_PAGE_BYTES = 2 << 20  # of x86-64, and of aarch64 with pages of 4 KiB; elsewhere the system takes what fits
ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)
"""None: this system knows of none."""


def ask_for_huge_pages(tensor: torch.Tensor) -> None:
    """Of a contiguous one. Changes nothing but how its pages come."""
    first, last = _whole_pages(tensor.data_ptr(), tensor.nbytes)
    if ADVICE is not None and first < last:
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ADVICE)


def _whole_pages(address: int, num_bytes: int) -> tuple[int, int]:
    """From the first huge page's begin to the last one's end within these bytes; equal or crossed where there is
    none."""
    return -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, (address + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
