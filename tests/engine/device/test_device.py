"""Device size, and memory of a block of code."""

import pytest
import torch
from trimtab_engine.device.device import (
    Device,
    is_out_of_memory,
)
from trimtab_engine.errors import ConfigError

MIB = 1 << 20


def test_a_declared_size_wins() -> None:
    assert Device("cpu", memory_bytes=123 * MIB).total_bytes == 123 * MIB


def test_peak_is_growth_of_block() -> None:
    device = Device("cpu")
    with device.measure() as growth:
        torch.ones(64 * MIB // 4).sum()
        kept = torch.ones(MIB // 4)
    assert growth.kept == MIB
    assert 64 * MIB <= growth.peak < 65 * MIB
    assert kept.numel()


@pytest.mark.parametrize(
    ("used", "most_reserved", "reserved", "peak"),
    [
        ([10, 17], 5, 5, 7),  # 5 that torch keeps, 2 of compiled kernels and libraries
        ([10, 13], 6, 2, 7),  # torch gave 4 back when memory was short
        ([10, 9], 0, 0, 0),  # another process ended meanwhile
    ],
)
def test_cuda_peak_uses_driver_count(
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
    with device.measure() as measured:
        pass
    assert measured.peak == peak


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
def test_failed_allocation_is_distinguished_from_other_errors(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one


def test_torch_words_of_a_failed_allocation_are_the_known_ones() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(error.value)
