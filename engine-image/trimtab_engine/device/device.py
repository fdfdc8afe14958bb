"""The device of the engine: its size, memory in use, and the memory of a block of code.

The CPU is a device like any other. Its size is `--device-memory-bytes`, else the container's memory limit, else a share
of the machine's memory (host_memory.py).
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trimtab_engine.config.engine import c_compiler
from trimtab_engine.device.address_range import AddressSpace, HostMemory, pin_for_cuda
from trimtab_engine.device.allocations import Growth, count_allocations
from trimtab_engine.device.host_memory import (
    allowed_cpus,
    cgroup_memory_limit,
    cgroup_used_bytes,
    default_device,
    process_bytes,
)
from trimtab_engine.device.mapped_range import CudaMemory, open_cuda_memory
from trimtab_engine.errors import ConfigError
from trimtab_engine.ipc.malloc import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, set_option, trim

LOADING_MMAP_THRESHOLD_BYTES = 1 << 20
"""While weights load, every larger allocation is its own mapping, so that temporary copies really go back."""
SERVING_MMAP_THRESHOLD_BYTES = 32 << 20
"""glibc's maximum. While serving, activations reuse heap memory instead of being mapped and faulted in again."""
SERVING_TRIM_THRESHOLD_BYTES = (1 << 31) - 1


class Device:
    """One rank's device. `memory_bytes` overrides its size; `cpu_threads` the threads of CPU operators. With several
    ranks on this node, CPU memory and threads are divided among them; GPUs are assigned in turn, and shared if there
    are fewer.
    """

    def __init__(
        self,
        kind: str,
        *,
        memory_bytes: int | None = None,
        cpu_threads: int | None = None,
        local_index: int = 0,
        local_count: int = 1,
    ) -> None:
        if kind == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device is cuda, but torch finds no CUDA device here; use --device cpu")
        if kind == "cuda" and c_compiler() is None:
            raise ConfigError(
                "--device is cuda, but there is no C compiler, which Triton needs to launch its kernels: install gcc "
                "with the C library's headers (an image whose base has them: python:3.12, not -slim), or set CC"
            )
        self.kind = kind
        self._local_count = local_count
        self.torch = torch.device(kind)
        if kind == "cuda" and local_count > 1:
            self.torch = torch.device(kind, local_index % torch.cuda.device_count())
            torch.cuda.set_device(self.torch)
        self.num_threads = cpu_threads or max(1, allowed_cpus() // local_count)
        self.total_bytes = memory_bytes or self._own_size()
        self.memory: AddressSpace = HostMemory()
        """Memory of the KV cache."""
        self.swap_memory: AddressSpace = HostMemory() if kind == "cpu" else HostMemory(pin_for_cuda)
        """Memory of swapped-out blocks: pinned on CUDA, so that the device copies them itself."""
        if kind == "cpu":
            torch.set_num_threads(self.num_threads)
        else:
            self.memory = open_cuda_memory(self.torch, self.total_bytes)
        self.scratch: AddressSpace = self.memory if kind == "cpu" else CudaMemory(self.torch, self.total_bytes, None)
        """Memory of short-lived KV caches, freed by torch."""

    def _own_size(self) -> int:
        if self.kind == "cuda":
            return int(torch.cuda.mem_get_info()[1])
        return default_device().num_bytes // self._local_count

    @property
    def limit_bytes(self) -> int | None:
        """This rank's share of the container's memory limit, independent of the device size. None means no limit, or
        CUDA.
        """
        limit = cgroup_memory_limit() if self.kind == "cpu" else None
        return None if limit is None else limit // self._local_count

    def kv_rounding_bytes(self, num_regions: int) -> int:
        """Return the bytes that a KV cache of `num_regions` regions may take beyond its blocks, because memory is
        allocated in pages. CPU pages are too small to count.
        """
        is_mapped = isinstance(self.memory, CudaMemory) and self.memory.is_mapped
        return num_regions * self.memory.page_bytes(num_regions) if is_mapped else 0

    def used_bytes(self) -> int:
        """Return the memory in use. CUDA: the whole device, by the driver. CPU: the container's anonymous and shared
        memory if its control group has a limit, else that of this process and its parent (the API server); only this
        process's with several ranks.
        """
        if self.kind == "cuda":
            free, total = torch.cuda.mem_get_info()
            return int(total - free)
        if self._local_count > 1:
            return process_bytes()
        if cgroup_memory_limit() is not None and (used := cgroup_used_bytes()) is not None:
            return used
        return process_bytes() + process_bytes(os.getppid())

    @contextmanager
    def measure(self) -> Iterator[Growth]:
        """Measure the memory of the block. CPU: torch allocations, which are deterministic. CUDA: the driver's count,
        because kernels and libraries allocate without torch.
        """
        if self.kind == "cpu":
            with count_allocations() as growth:
                yield growth
            trim()  # the counter's own objects lie between the allocations
            return
        growth = Growth()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = self.used_bytes()
        yield growth
        torch.cuda.synchronize()
        grown = self.used_bytes() - before
        given_back = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
        growth.kept, growth.peak = max(0, grown), max(0, grown + given_back)

    def settle(self) -> None:
        """On CUDA, wait for the device and release the allocator's cached memory."""
        if self.kind == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def before_weights(self) -> None:
        """Set the allocator up for loading."""
        if self.kind == "cpu":
            set_option(M_MMAP_THRESHOLD, LOADING_MMAP_THRESHOLD_BYTES)

    def after_weights(self) -> None:
        """Give back what loading left, and set the allocator up for serving."""
        if self.kind == "cuda":
            torch.cuda.empty_cache()
            return
        set_option(M_MMAP_THRESHOLD, SERVING_MMAP_THRESHOLD_BYTES)
        set_option(M_TRIM_THRESHOLD, SERVING_TRIM_THRESHOLD_BYTES)
        trim()


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an allocation failed. For the CPU torch reports it only in the message."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)
