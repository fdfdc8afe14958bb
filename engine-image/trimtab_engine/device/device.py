"""The device as the engine sees it: how large it is, what is in use, and the highest use since a mark.

The CPU is a device like any other. Its size is `--device-memory-bytes`, else the container's memory limit, else the
machine's memory. What is "in use" is what the kernel cannot drop: anonymous and shared memory. File pages (the
weights' files, the interpreter) are page cache: they go when memory gets short.
"""

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from trimtab_engine.config.engine import c_compiler
from trimtab_engine.device.address_range import AddressSpace, HostMemory, pin_for_cuda
from trimtab_engine.device.mapped_range import CudaMemory, open_cuda_memory
from trimtab_engine.errors import ConfigError

NO_LIMIT_BYTES = 1 << 60
"""Control groups write "no limit" as a number near 2^63; no machine has this much."""
SAMPLE_SECONDS = 0.001
"""Between two looks at memory where the kernel keeps no high-water mark."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LOADING_MMAP_THRESHOLD_BYTES = 1 << 20
"""While weights load, every larger allocation is its own mapping, so that temporary copies really go back."""
SERVING_MMAP_THRESHOLD_BYTES = 32 << 20
"""glibc's maximum. While serving, activations are reused from the heap instead of being mapped and faulted in anew."""
SERVING_TRIM_THRESHOLD_BYTES = (1 << 31) - 1


@dataclass(slots=True)
class Peak:
    """The highest use seen above the use at the mark, in bytes; final when the `with` block ends."""

    bytes: int = 0


class Device:
    """One rank's device. `memory_bytes` overrides its size; `cpu_threads` the threads of CPU operators.

    With several ranks on this node the CPU, its memory and its threads, is divided among them; GPUs are dealt out, and
    shared when there are fewer.
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
        """Where its KV cache lies."""
        self.swap_memory: AddressSpace = HostMemory() if kind == "cpu" else HostMemory(pin_for_cuda)
        """Where swapped-out blocks lie: on CUDA pinned, so that the device copies them itself."""
        if kind == "cpu":
            torch.set_num_threads(self.num_threads)
        else:
            self.memory = open_cuda_memory(self.torch, self.total_bytes)
        self.scratch: AddressSpace = self.memory if kind == "cpu" else CudaMemory(self.torch, self.total_bytes, None)
        """Where a KV cache lies that is soon dropped: torch frees it."""

    def _own_size(self) -> int:
        if self.kind == "cuda":
            return int(torch.cuda.mem_get_info()[1])
        return (cgroup_memory_limit() or _meminfo_bytes("MemTotal")) // self._local_count

    @property
    def limit_bytes(self) -> int | None:
        """This rank's part of what the kernel lets the container use, whatever size the device is given; None: no
        limit, or CUDA."""
        limit = cgroup_memory_limit() if self.kind == "cpu" else None
        return None if limit is None else limit // self._local_count

    def kv_rounding_bytes(self, num_regions: int) -> int:
        """What a KV cache of so many regions may take beyond its blocks, because its memory comes in pages. The CPU's
        pages are too small to count."""
        is_mapped = isinstance(self.memory, CudaMemory) and self.memory.is_mapped
        return num_regions * self.memory.page_bytes(num_regions) if is_mapped else 0

    def used_bytes(self) -> int:
        """What the driver says is in use.

        CUDA: the whole device. CPU: the container's anonymous and shared memory when its control group has a limit,
        else that of this process and its parent (the API server); this process's alone with several ranks.
        """
        if self.kind == "cuda":
            free, total = torch.cuda.mem_get_info()
            return int(total - free)
        if self._local_count > 1:
            return process_bytes()
        if cgroup_memory_limit() is not None and (used := cgroup_used_bytes()) is not None:
            return used
        parent = _status_bytes(Path(f"/proc/{os.getppid()}/status"), ("RssAnon", "RssShmem"))
        return process_bytes() + parent

    @contextmanager
    def measure_peak(self) -> Iterator[Peak]:
        """Measure the highest use inside the block above the use at its start."""
        peak = Peak()
        if self.kind == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = self.used_bytes()
            yield peak
            torch.cuda.synchronize()
            # The driver's count: torch keeps the memory it has taken, and kernels and libraries take some without it.
            given_back = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
            peak.bytes = max(0, self.used_bytes() - before + given_back)
            return
        start = process_bytes()
        high_water = _reset_high_water()
        if high_water is None:
            with _sampled(process_bytes) as highest:
                yield peak
            peak.bytes = max(0, highest[0] - start)
            return
        yield peak
        peak.bytes = max(0, high_water())

    def settle(self) -> None:
        """CUDA: wait for what was begun, and give back what the allocator keeps for later."""
        if self.kind == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def before_weights(self) -> None:
        """Set the allocator up for loading."""
        if self.kind == "cpu":
            _mallopt(M_MMAP_THRESHOLD, LOADING_MMAP_THRESHOLD_BYTES)

    def after_weights(self) -> None:
        """Give back what loading left, and set the allocator up for serving."""
        if self.kind == "cuda":
            torch.cuda.empty_cache()
            return
        _mallopt(M_MMAP_THRESHOLD, SERVING_MMAP_THRESHOLD_BYTES)
        _mallopt(M_TRIM_THRESHOLD, SERVING_TRIM_THRESHOLD_BYTES)
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed. Torch says so for the CPU in words only."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def process_bytes() -> int:
    """Anonymous and shared memory of this process."""
    return _status_bytes(Path("/proc/self/status"), ("RssAnon", "RssShmem"))


def cgroup_memory_limit() -> int | None:
    """The container's memory limit (the tightest one up the tree), or None."""
    limits = [
        limit
        for folder in _memory_cgroups()
        for name in ("memory.max", "memory.limit_in_bytes")
        if (limit := _read_int(folder / name)) is not None and limit < NO_LIMIT_BYTES
    ]
    return min(limits, default=None)


def cgroup_used_bytes() -> int | None:
    """Anonymous and shared memory of this process's control group, or None where it is not shown."""
    for folder in _memory_cgroups():
        try:
            lines = (folder / "memory.stat").read_text().splitlines()
        except OSError:
            continue
        stat = {key: int(value) for key, _, value in (line.partition(" ") for line in lines)}
        if "anon" in stat:
            return stat["anon"] + stat.get("shmem", 0)
        if "total_rss" in stat:
            return stat["total_rss"] + stat.get("total_shmem", 0)
    return None


def allowed_cpus() -> int:
    """CPUs that this process may use at once: its affinity, and its control group's quota rounded up."""
    count = len(os.sched_getaffinity(0))
    for folder in _cgroups("cpu"):
        quota, period = _cpu_quota(folder)
        if quota is not None and quota > 0 and period:
            count = min(count, -(-quota // period))
    return max(1, count)


def _cpu_quota(folder: Path) -> tuple[int | None, int | None]:
    """(quota, period) in microseconds; quota None or negative when there is none."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return _read_int(folder / "cpu.cfs_quota_us"), _read_int(folder / "cpu.cfs_period_us")
    return (int(quota) if quota.isdigit() else None), int(period)


def _memory_cgroups() -> list[Path]:
    return _cgroups("memory")


def _cgroups(controller: str) -> list[Path]:
    """This process's control groups, v1 or v2, from its own up to the root (a container sees its own as the root)."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            base = root / controller
        elif controllers == "" and (root / "cgroup.controllers").exists():
            base = root
        else:
            continue
        own = base / path.lstrip("/")
        above = [own, *own.parents]
        folders += [f for f in above[: above.index(base) + 1] if f.is_dir()] if base in above else [base]
    return folders


def _read_int(path: Path) -> int | None:
    """The file's number; None when it is absent or says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _meminfo_bytes(key: str) -> int:
    return _status_bytes(Path("/proc/meminfo"), (key,))


def _status_bytes(path: Path, keys: tuple[str, ...]) -> int:
    """Sum of these "Key:  123 kB" lines; 0 when the file cannot be read (the process has ended)."""
    total = 0
    try:
        text = path.read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        key, _, rest = line.partition(":")
        if key in keys:
            total += int(rest.split()[0]) * 1024
    return total


def _reset_high_water() -> Callable[[], int] | None:
    """Reset the kernel's high-water mark. Returns what reads the growth of non-file memory since, or None."""
    status = Path("/proc/self/status")
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    resident, files = _status_bytes(status, ("VmRSS",)), _status_bytes(status, ("RssFile",))
    if _status_bytes(status, ("VmHWM",)) > resident + (64 << 20):
        return None  # a kernel that ignores the reset: the mark still shows an older peak

    def growth() -> int:
        new_files = max(0, _status_bytes(status, ("RssFile",)) - files)
        return _status_bytes(status, ("VmHWM",)) - resident - new_files

    return growth


@contextmanager
def _sampled(read: Callable[[], int]) -> Iterator[list[int]]:
    """Yields [highest value read so far], read from a thread."""
    highest, done = [read()], threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_SECONDS):
            highest[0] = max(highest[0], read())

    thread = threading.Thread(target=sample, name="memory-peak", daemon=True)
    thread.start()
    try:
        yield highest
    finally:
        highest[0] = max(highest[0], read())
        done.set()
        thread.join()


def _mallopt(option: int, value: int) -> None:
    """glibc's mallopt; other C libraries have none, and nothing depends on it but speed and tidiness."""
    function = getattr(ctypes.CDLL(None), "mallopt", None)
    if function is not None:
        function(option, value)
