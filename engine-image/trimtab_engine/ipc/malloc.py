"""Settings of glibc's allocator. Other C libraries lack them; only speed and memory use depend on them."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
LARGE_BYTES = 256 << 10
"""From this size on, an allocation of an API server is a mapping of its own, which goes back when it is freed. By
default glibc raises the limit to the largest allocation so far, and bodies of requests stay in the heap."""
MAX_ARENAS = 2  # heaps; by default each thread may get one, and what a thread frees there stays


def set_up_for_requests() -> None:
    """Set the allocator up for a process whose largest objects are requests and responses of clients."""
    set_option(M_MMAP_THRESHOLD, LARGE_BYTES)
    set_option(M_ARENA_MAX, MAX_ARENAS)


def set_option(option: int, value: int) -> None:
    """Set an option of malloc."""
    function = getattr(ctypes.CDLL(None), "mallopt", None)
    if function is not None:
        function(option, value)


def trim() -> None:
    """Give the heap's free pages back to the kernel, if the C library can."""
    function = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if function is not None:
        function(0)
