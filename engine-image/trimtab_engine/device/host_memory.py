"""Host memory and CPUs by the kernel's accounting: container limits and usage, processes, the machine. No torch: the
server's first process uses it as well.

Memory "in use" is memory that the kernel cannot reclaim: anonymous and shared memory. File pages (weight files, the
interpreter) are page cache, which is dropped under pressure.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trimtab_engine.config.engine import EngineConfig

NO_LIMIT_BYTES = 1 << 60
"""Control groups write "no limit" as a number near 2^63; no machine has this much."""
MACHINE_SHARE = 2
"""Without a limit an engine's device is 1/MACHINE_SHARE of the machine's memory, to leave room for the desktop, the
page cache and a second engine.
"""
AVAILABLE_STEP_BYTES = 256 << 20
"""If that is not available, available memory is rounded down to this step."""
GIB = 1 << 30

logger = logging.getLogger("trimtab_engine.memory")


@dataclass(frozen=True, slots=True)
class DeviceDefault:
    """Default size of the CPU device: bytes of all ranks of this machine, and whether that is less than on an idle
    machine.
    """

    num_bytes: int
    is_cut_short: bool = False


def default_device() -> DeviceDefault:
    """Return the container's limit, or without one half of the machine's memory, or less if less is available."""
    limit = cgroup_memory_limit()
    return DeviceDefault(limit) if limit is not None else share_of_machine(machine_bytes(), available_bytes())


def with_device_memory(config: EngineConfig) -> EngineConfig:
    """Return the configuration with the CPU device's size per rank, decided once before any process starts, because
    available memory changes with every process. On CUDA each rank queries its GPU.
    """
    if config.device == "cuda" or config.device_memory_bytes is not None:
        return config
    default = default_device()
    if default.is_cut_short:
        logger.warning(
            "the device is %.2f GiB, the memory available now, instead of half the machine's memory (%.2f GiB): "
            "the next start may find another size; set --device-memory-bytes to have the same each time",
            default.num_bytes / GIB,
            machine_bytes() / MACHINE_SHARE / GIB,
        )
    return msgspec.structs.replace(config, device_memory_bytes=default.num_bytes // config.num_local_ranks)


def share_of_machine(machine: int, available: int) -> DeviceDefault:
    """Return the default on a machine without a limit. The same every time unless the machine is crowded."""
    share = machine // MACHINE_SHARE
    if available >= share:
        return DeviceDefault(share)
    return DeviceDefault(max(1, available // AVAILABLE_STEP_BYTES) * AVAILABLE_STEP_BYTES, is_cut_short=True)


def machine_bytes() -> int:
    """Return the machine's memory."""
    return _status_bytes(Path("/proc/meminfo"), ("MemTotal",))


def available_bytes() -> int:
    """Return the kernel's estimate of memory available to new processes without swapping."""
    return _status_bytes(Path("/proc/meminfo"), ("MemAvailable",))


def room_bytes(own_bytes: int) -> int:
    """Return the maximum memory of processes that hold `own_bytes` now, given all others: on the machine, and in each
    limiting control group.
    """
    rooms = [available_bytes() + own_bytes]
    for folder in _cgroups("memory"):
        limit, used = _limit_of(folder), _used_in(folder)
        if limit is not None and used is not None:
            rooms.append(limit - max(0, used - own_bytes))
    return max(0, min(rooms))


def process_bytes(pid: int | None = None) -> int:
    """Return anonymous and shared memory of a process, this one unless a pid is given; 0 when it has ended."""
    return _status_bytes(Path(f"/proc/{pid or 'self'}/status"), ("RssAnon", "RssShmem"))


def family_bytes(first_pid: int) -> int:
    """Return anonymous and shared memory of a process and of all that descend from it."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and (parent := _parent_of(folder)) is not None:
            children.setdefault(parent, []).append(int(folder.name))
    family, waiting = 0, [first_pid]
    while waiting:
        pid = waiting.pop()
        family += process_bytes(pid)
        waiting += children.get(pid, [])
    return family


def _parent_of(folder: Path) -> int | None:
    """Return the parent's pid. None if the process has ended."""
    try:
        text = (folder / "stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[1])  # the name before it may hold anything


def cgroup_memory_limit() -> int | None:
    """Return the container's memory limit (the tightest one up the tree), or None."""
    return min((limit for folder in _cgroups("memory") if (limit := _limit_of(folder)) is not None), default=None)


def cgroup_used_bytes() -> int | None:
    """Return anonymous and shared memory of this process's control group. None if it is not shown."""
    return next((used for folder in _cgroups("memory") if (used := _used_in(folder)) is not None), None)


def allowed_cpus() -> int:
    """Return the CPUs usable at once: the affinity, and the control group's quota rounded up."""
    count = len(os.sched_getaffinity(0))
    for folder in _cgroups("cpu"):
        quota, period = _cpu_quota(folder)
        if quota is not None and quota > 0 and period:
            count = min(count, -(-quota // period))
    return max(1, count)


def _limit_of(folder: Path) -> int | None:
    """Return a memory control group's own limit, v2 or v1."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = _read_int(folder / name)
        if limit is not None and limit < NO_LIMIT_BYTES:
            return limit
    return None


def _used_in(folder: Path) -> int | None:
    """Return anonymous and shared memory in a control group and those below it, v2 or v1."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    stat = {key: int(value) for key, _, value in (line.partition(" ") for line in lines)}
    if "anon" in stat:
        return stat["anon"] + stat.get("shmem", 0)
    if "total_rss" in stat:
        return stat["total_rss"] + stat.get("total_shmem", 0)
    return None


def _cpu_quota(folder: Path) -> tuple[int | None, int | None]:
    """(quota, period) in microseconds; quota None or negative when there is none."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return _read_int(folder / "cpu.cfs_quota_us"), _read_int(folder / "cpu.cfs_period_us")
    return (int(quota) if quota.isdigit() else None), int(period)


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
    """Return the file's number. None if it is absent or contains "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


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
