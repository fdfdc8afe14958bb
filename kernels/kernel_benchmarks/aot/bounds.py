"""Upper bound on the speed of a counted loop on an H200: the busiest unit, and dependencies.

Every figure is an upper bound from counted instructions; none is measured. Rates are lanes, bytes or FLOPs per cycle
and multiprocessor: matrix units from the datasheet (990 and 1979 TFLOP/s with 132 multiprocessors at 1.83 GHz), the
others from the CUDA programming guide's table for compute capability 9.0. Two are undocumented estimates: single-warp
matrix instructions reach 0.62 of a warp group's rate, and the L2 cache provides 5120 bytes per cycle in total (A100's
figure).
"""

from dataclasses import dataclass

from kernel_benchmarks.aot.machine_code import LANES, WARPS_OF_GROUP, Loop

NUM_SMS = 132
CLOCK_HZ = 990e12 / (NUM_SMS * 4096)
BF16_FLOPS, FLOAT8_FLOPS = 4096, 8192
WARP_PRODUCT_SHARE = 0.62
SCHEDULERS = 4
SPECIAL_LANES, HALF_RATE_LANES, FULL_RATE_LANES, SHUFFLE_LANES = 16, 64, 128, 32
SHARED_BYTES = 128
MEMORY_BYTES = 4.3e12 / NUM_SMS / CLOCK_HZ
"""The memory bandwidth of a copy: 17.8 bytes."""
L2_BYTES = 5120 / NUM_SMS
LATENCY_SECONDS = 800e-9
"""Latency of a read under load, between 700 and 900 ns."""
BYTES_IN_FLIGHT_NEEDED = 4.3e12 * LATENCY_SECONDS / NUM_SMS
"""Bytes in flight per multiprocessor for full bandwidth (Little's law): 26 KB."""
REGISTERS, SHARED_MEMORY, MAX_WARPS, MAX_CTAS = 65536, 228 << 10, 64, 32
"""Resources of a multiprocessor. Registers are allocated in units of 8 per thread, and a CTA uses 1 KiB of shared
memory for the system."""


@dataclass(frozen=True, slots=True)
class Bound:
    """`cycles` of one pass of one CTA's loop on each unit. `unit` is the bottleneck, and `share` the attainable
    fraction of the peak. `in_flight` are bytes per multiprocessor that loads may have in flight.
    """

    cycles: dict[str, float]
    ctas: int
    unit: str
    share: float
    in_flight: int


def ctas_per_sm(registers: int, shared_bytes: int, num_warps: int) -> int:
    """Return the number of resident CTAs per multiprocessor; 0 if it cannot hold one."""
    per_thread = -(-max(registers, 1) // 8) * 8
    return min(
        REGISTERS // (per_thread * LANES * num_warps),
        SHARED_MEMORY // (shared_bytes + 1024),
        MAX_WARPS // num_warps,
        MAX_CTAS,
    )


def unit_cycles(loop: Loop, num_warps: int) -> dict[str, float]:
    """Return the cycles that one pass of one CTA keeps each unit of a multiprocessor busy."""
    rate = (FLOAT8_FLOPS if loop.float8_products else BF16_FLOPS) * (WARP_PRODUCT_SHARE if loop.warp_products else 1.0)
    lanes = LANES * num_warps
    return {
        "tensor": loop.flops * num_warps / rate,
        "issue": loop.instructions * num_warps / SCHEDULERS,
        "special": loop.special * lanes / SPECIAL_LANES,
        "integer": loop.half_rate * lanes / HALF_RATE_LANES,
        "float": loop.full_rate * lanes / FULL_RATE_LANES,
        "shuffle": loop.shuffles * lanes / SHUFFLE_LANES,
        "shared": loop.shared_bytes * num_warps / SHARED_BYTES,
    }


def bound(
    loop: Loop,
    *,
    registers: int,
    shared_bytes: int,
    num_warps: int,
    is_memory_bound: bool,
    consumer_groups: int = 0,
    bulk_bytes: int = 0,
) -> Bound:
    """Return the unit that needs the most cycles; `chain` if one CTA's matrix instructions and the work that waits for
    them are serialised (no wait leaves an instruction in flight) and too few CTAs share the multiprocessor to fill the
    gaps.

    A memory-bound kernel reads its bytes from memory and is compared with the bandwidth; other kernels read shared
    tiles from the L2 cache and are compared with the tensor peak.

    For a kernel with consumer groups, the loop is one group's and a pass is that of all groups, which fill each other's
    gaps as CTAs do; bulk_bytes are additionally copied from the L2 cache into shared memory.
    """
    busy_warps = consumer_groups * WARPS_OF_GROUP or num_warps
    cycles = unit_cycles(loop, busy_warps)
    cycles["shared"] += bulk_bytes / SHARED_BYTES
    loaded = loop.load_bytes * busy_warps + bulk_bytes
    source = "memory" if is_memory_bound else "L2"
    cycles[source] = (loaded + loop.store_bytes * busy_warps) / (MEMORY_BYTES if is_memory_bound else L2_BYTES)
    ctas = max(1, ctas_per_sm(registers, shared_bytes, num_warps))
    if loop.products and not loop.products_ahead:
        others = max(cycles[unit] for unit in ("issue", "special", "integer", "float"))
        cycles["chain"] = (cycles["tensor"] + others) / (ctas * max(1, consumer_groups))
    unit = max(cycles, key=lambda name: cycles[name])
    judged = cycles["memory"] if is_memory_bound else _tensor_peak_cycles(loop, busy_warps)
    ahead = loop.copies_ahead // loop.copy_groups + 1 if loop.copy_groups else 1
    return Bound(cycles, ctas, unit, judged / cycles[unit] if cycles[unit] else 0.0, int(loaded * ahead * ctas))


def _tensor_peak_cycles(loop: Loop, num_warps: int) -> float:
    return loop.flops * num_warps / (FLOAT8_FLOPS if loop.float8_products else BF16_FLOPS)
