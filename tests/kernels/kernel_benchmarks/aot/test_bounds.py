"""The busiest unit of a counted loop, compared with manual calculations."""

from dataclasses import replace

import pytest
from kernel_benchmarks.aot.bounds import BYTES_IN_FLIGHT_NEEDED, MEMORY_BYTES, bound, ctas_per_sm, unit_cycles
from kernel_benchmarks.aot.machine_code import Loop

TILE = Loop(instructions=400, products=12, flops=128 * 64 * 128 * 4 // 8, waits=1, special=32, load_bytes=4096)
"""Attention over 64 keys of 128 for 128 rows, of one of eight warps."""


def test_unit_cycles_count_all_warps_of_a_cta() -> None:
    cycles = unit_cycles(TILE, 8)
    assert cycles["tensor"] == 1024, "4.2 MFLOP at 4096 a cycle"
    assert cycles["issue"] == 800, "four schedulers"
    assert cycles["special"] == 512, "one exponential per score, 16 a cycle"


def test_float8_takes_half_the_time_and_single_warps_more() -> None:
    assert unit_cycles(Loop(flops=1 << 20, float8_products=1), 4)["tensor"] == 512
    assert unit_cycles(Loop(flops=1 << 20, warp_products=1), 4)["tensor"] == pytest.approx(1024 / 0.62)


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "num_warps", "ctas"),
    [
        (168, 98_560, 8, 1),  # registers: 43,008 of 65,536
        (255, 98_560, 4, 2),
        (32, 98_560, 4, 2),  # shared memory
        (32, 0, 4, 16),  # warps
        (16, 0, 1, 32),
        (255, 0, 16, 0),
    ],
)
def test_ctas_per_sm_follows_resources(registers: int, shared_bytes: int, num_warps: int, ctas: int) -> None:
    assert ctas_per_sm(registers, shared_bytes, num_warps) == ctas


def test_single_cta_waits_for_its_instructions_and_two_fill_gaps() -> None:
    alone = bound(TILE, registers=168, shared_bytes=98_560, num_warps=8, is_memory_bound=False)
    assert (alone.unit, alone.ctas) == ("chain", 1)
    assert alone.share == pytest.approx(1024 / 1824)
    shared = bound(TILE, registers=128, shared_bytes=98_560, num_warps=8, is_memory_bound=False)
    assert (shared.unit, shared.share, shared.ctas) == ("tensor", 1.0, 2)


def test_instructions_in_flight_over_wait_hide_other_work() -> None:
    ahead = replace(TILE, products_ahead=1)
    found = bound(ahead, registers=168, shared_bytes=98_560, num_warps=8, is_memory_bound=False)
    assert (found.unit, found.share) == ("tensor", 1.0)


def test_memory_bound_loop_is_compared_with_bandwidth() -> None:
    loop = Loop(instructions=400, warp_products=32, flops=1 << 17, load_bytes=8192, copy_groups=3, copies_ahead=3)
    found = bound(loop, registers=90, shared_bytes=72_192, num_warps=4, is_memory_bound=True)
    assert (found.unit, found.share) == ("memory", 1.0)
    assert found.cycles["memory"] == pytest.approx(4 * 8192 / MEMORY_BYTES)
    assert found.in_flight == 3 * 2 * 4 * 8192, "three CTAs, the awaited tile and one ahead"
    assert found.in_flight > BYTES_IN_FLIGHT_NEEDED
    slow = Loop(instructions=4000, load_bytes=8192)
    assert bound(slow, registers=90, shared_bytes=0, num_warps=4, is_memory_bound=True).unit == "issue"


def test_consumer_groups_fill_gaps_and_copies_use_shared_memory() -> None:
    """The prefill's loop: 128 keys of 128 for 64 rows, of one of a group's four warps."""
    loop = Loop(instructions=480, products=16, flops=64 * 128 * 128 * 4 // 4, waits=2, special=66, shared_bytes=20_480)
    numbers = {"registers": 168, "shared_bytes": 164_168, "num_warps": 12, "is_memory_bound": False}
    found = bound(loop, **numbers, consumer_groups=2, bulk_bytes=65_536)  # type: ignore[arg-type]
    assert (found.unit, found.share, found.ctas) == ("tensor", 1.0, 1)
    assert found.cycles["tensor"] == 2048, "of both groups: 8.4 MFLOP at 4096 a cycle"
    assert found.cycles["shared"] == (20_480 * 8 + 65_536) / 128
    assert found.cycles["chain"] == pytest.approx((2048 + 1056) / 2)
    assert found.cycles["L2"] == pytest.approx(65_536 / (5120 / 132))
