"""Allocation counting: exact, repeatable, and without side effects."""

import pytest
import torch
from trimtab_engine.device.allocations import Growth, count_allocations
from trimtab_engine.errors import ConfigError

MIB = 1 << 20


def test_kept_and_peak_bytes_are_exact() -> None:
    before = torch.ones(3 * MIB, dtype=torch.uint8)
    with count_allocations() as growth:
        kept = torch.zeros(2 * MIB, dtype=torch.uint8)
        passing = torch.zeros(5 * MIB, dtype=torch.uint8)
        del passing
        other = torch.zeros(4 * MIB, dtype=torch.uint8)
        del other
    assert growth == Growth(kept=2 * MIB, peak=7 * MIB)
    assert kept.numel() < before.numel()


def test_the_same_work_counts_the_same_every_time() -> None:
    def work() -> Growth:
        with count_allocations() as growth:
            x = torch.randn(300, 300)
            (x @ x).softmax(dim=-1).sort(dim=-1)
        return growth

    assert len({(work().kept, work().peak) for _ in range(5)}) == 1


def test_an_error_ends_the_count() -> None:
    with pytest.raises(KeyError), count_allocations():
        raise KeyError
    with count_allocations() as growth:
        pass
    assert growth == Growth()


def test_inside_torchs_profiler_the_count_is_refused_by_name() -> None:
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        pytest.raises(ConfigError, match="start the engine first, then the profiler"),
        count_allocations(),
    ):
        raise AssertionError("not reached")
