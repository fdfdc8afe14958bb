"""Kernel figures of memory and CPUs; control groups come from a fake tree."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import trimtab_engine.device.host_memory as host_memory
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.device.device import Device
from trimtab_engine.device.host_memory import (
    DeviceDefault,
    allowed_cpus,
    cgroup_memory_limit,
    cgroup_used_bytes,
    default_device,
    family_bytes,
    process_bytes,
    room_bytes,
    share_of_machine,
    with_device_memory,
)

MIB, GIB = 1 << 20, 1 << 30


def a_group(monkeypatch: pytest.MonkeyPatch, folder: Path, **files: str) -> None:
    """A control group with these files (dots written as double underscores)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    monkeypatch.setattr(host_memory, "_cgroups", lambda controller: [folder])


def test_cgroup_v2_limits_size_and_counts_unreclaimable_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    assert default_device().num_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def test_without_a_limit_use_is_this_process_and_its_parent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a_group(monkeypatch, tmp_path)
    assert Device("cpu").used_bytes() >= process_bytes() > 0


@pytest.mark.parametrize(("quota", "expected"), [("100000 100000", 1), ("max 100000", None), ("50000 100000", 1)])
def test_a_cpu_quota_limits_the_threads(
    quota: str, expected: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a_group(monkeypatch, tmp_path, cpu__max=quota)
    assert allowed_cpus() == (expected or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("machine", "available", "expected"),
    [
        (16 * GIB, 15 * GIB, DeviceDefault(8 * GIB)),
        (16 * GIB, 8 * GIB, DeviceDefault(8 * GIB)),  # the same, however much the rest is used
        (16 * GIB, 5 * GIB + 100 * MIB, DeviceDefault(5 * GIB, is_cut_short=True)),  # never memory of other processes
        (16 * GIB, 1 * MIB, DeviceDefault(256 * MIB, is_cut_short=True)),
    ],
)
def test_device_without_limit_is_half_or_available_memory(
    machine: int, available: int, expected: DeviceDefault
) -> None:
    assert share_of_machine(machine, available) == expected


def test_the_default_is_written_into_the_configuration_once_for_all_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a_group(monkeypatch, tmp_path, memory__max=f"{3000 * MIB}\n")
    config = EngineConfig(model="m", tensor_parallel_size=2, data_parallel_size=2)
    assert with_device_memory(config).device_memory_bytes == 750 * MIB
    given = EngineConfig(model="m", device_memory_bytes=100 * MIB)
    assert with_device_memory(given) is given
    on_cuda = EngineConfig(model="m", device="cuda")
    assert with_device_memory(on_cuda) is on_cuda, "each rank queries its GPU"
    assert caplog.text == ""


def test_smaller_default_device_is_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a_group(monkeypatch, tmp_path)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 256 * MIB)
    assert with_device_memory(EngineConfig(model="m")).device_memory_bytes == 256 * MIB
    assert "set --device-memory-bytes to have the same each time" in caplog.text


def test_room_is_bounded_by_tightest_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    a_group(monkeypatch, tmp_path, memory__max="1000\n", memory__stat="anon 700\nshmem 50\n")
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 10_000)
    assert room_bytes(600) == 1000 - 150, "others hold 150 of the 750 in use"
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 100)
    assert room_bytes(600) == 700, "of the machine no more is available"


def test_a_family_is_a_process_and_all_that_it_started() -> None:
    with subprocess.Popen([sys.executable, "-c", "x = b'1' * (20 << 20); input()"], stdin=subprocess.PIPE) as child:
        while process_bytes(child.pid) < 20 * MIB:
            assert child.poll() is None
        assert family_bytes(os.getpid()) >= process_bytes() + 20 * MIB
        assert family_bytes(child.pid) < process_bytes() + 20 * MIB
        child.communicate(b"\n")
