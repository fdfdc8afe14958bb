"""The device's size, use and peak; control groups are read from a made-up tree."""

import os
from pathlib import Path

import pytest
import torch
import trimtab_engine.device.device as device_module
from trimtab_engine.device.device import (
    Device,
    allowed_cpus,
    cgroup_memory_limit,
    cgroup_used_bytes,
    is_out_of_memory,
    process_bytes,
)
from trimtab_engine.errors import ConfigError

MIB = 1 << 20


def a_group(monkeypatch: pytest.MonkeyPatch, folder: Path, **files: str) -> None:
    """A control group with these files (dots written as double underscores)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    monkeypatch.setattr(device_module, "_cgroups", lambda controller: [folder])


def test_a_declared_size_wins() -> None:
    assert Device("cpu", memory_bytes=123 * MIB).total_bytes == 123 * MIB


def test_cgroup_v2_limits_size_and_counts_what_cannot_be_dropped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a_group(monkeypatch, tmp_path, memory__max="1048576000\n", memory__stat="anon 300\nfile 999\nshmem 50\n")
    assert cgroup_memory_limit() == 1048576000
    assert cgroup_used_bytes() == 350
    device = Device("cpu")
    assert device.total_bytes == 1048576000
    assert device.used_bytes() == 350


def test_cgroup_v1_likewise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stat = "cache 9\nrss 1\ntotal_rss 300\ntotal_cache 999\ntotal_shmem 50\n"
    a_group(monkeypatch, tmp_path, memory__limit_in_bytes="2097152000\n", memory__stat=stat)
    assert cgroup_memory_limit() == 2097152000
    assert cgroup_used_bytes() == 350


@pytest.mark.parametrize("limit", ["max\n", "9223372036854771712\n"])
def test_no_limit_is_no_limit(limit: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a_group(monkeypatch, tmp_path, memory__max=limit)
    assert cgroup_memory_limit() is None
    assert Device("cpu").total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_without_a_limit_use_is_this_process_and_its_parent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a_group(monkeypatch, tmp_path)
    assert Device("cpu").used_bytes() >= process_bytes() > 0


@pytest.mark.parametrize(("quota", "expected"), [("100000 100000", 1), ("max 100000", None), ("50000 100000", 1)])
def test_a_cpu_quota_limits_the_threads(
    quota: str, expected: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a_group(monkeypatch, tmp_path, cpu__max=quota)
    assert allowed_cpus() == (expected or len(os.sched_getaffinity(0)))


def test_the_peak_is_what_a_block_of_code_added() -> None:
    device = Device("cpu")
    with device.measure_peak() as peak:
        torch.ones(64 * MIB // 4).sum()
    assert 60 * MIB < peak.bytes < 90 * MIB


def test_the_peak_is_sampled_where_the_kernel_keeps_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "_reset_high_water", lambda: None)
    with Device("cpu").measure_peak() as peak:
        kept = torch.ones(64 * MIB // 4)
    assert kept.numel()
    assert 60 * MIB < peak.bytes < 90 * MIB


@pytest.mark.parametrize(
    ("used", "most_reserved", "reserved", "peak"),
    [
        ([10, 17], 5, 5, 7),  # 5 that torch keeps, 2 of compiled kernels and libraries
        ([10, 13], 6, 2, 7),  # torch gave 4 back when memory was short
        ([10, 9], 0, 0, 0),  # another process ended meanwhile
    ],
)
def test_the_peak_on_cuda_is_what_the_driver_counts(
    used: list[int], most_reserved: int, reserved: int, peak: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = 1000
    answers = {
        "mem_get_info": lambda: (total - used.pop(0), total),
        "max_memory_reserved": lambda: most_reserved,
        "memory_reserved": lambda: reserved,
        "synchronize": lambda: None,
        "reset_peak_memory_stats": lambda: None,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    device = Device.__new__(Device)
    device.kind = "cuda"
    with device.measure_peak() as measured:
        pass
    assert measured.bytes == peak


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="--device cpu"):
        Device("cuda")


def test_cuda_without_a_c_compiler_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ConfigError, match="no C compiler, which Triton needs"):
        Device("cuda")


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: 9 bytes"), True),
        (OSError(2, "No such file"), False),
        (RuntimeError("shapes do not match"), False),
    ],
)
def test_a_failed_allocation_is_told_from_other_errors(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one


def test_torch_words_of_a_failed_allocation_are_the_known_ones() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(error.value)
