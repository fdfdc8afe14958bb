"""How fast a counted loop can go at best on an H200: the busiest unit, and what waits for what.

Every figure is an upper bound from counted instructions, none is measured. Rates are lanes, bytes or FLOPs per cycle
and multiprocessor: matrix units from the datasheet (990 and 1979 TFLOP/s at 132 multiprocessors and 1.83 GHz), the
others from the CUDA programming guide's table for compute capability 9.0. Two are leads, not documented: products of
single warps reach 0.62 of a warp group's rate, and the L2 cache gives 5120 bytes a cycle to all (A100's figure).
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
"""Of the memory's bandwidth as a copy has it: 17.8 bytes."""
L2_BYTES = 5120 / NUM_SMS
LATENCY_SECONDS = 800e-9
"""Of a read under load, between 700 and 900 ns."""
BYTES_IN_FLIGHT_NEEDED = 4.3e12 * LATENCY_SECONDS / NUM_SMS
"""Per multiprocessor, to read at full bandwidth (Little's law): 26 KB."""
REGISTERS, SHARED_MEMORY, MAX_WARPS, MAX_CTAS = 65536, 228 << 10, 64, 32
"""Of a multiprocessor. Registers are given out in units of 8 per thread, and a program takes 1 KiB of shared memory
for the system."""


@dataclass(frozen=True, slots=True)
class Bound:
    """`cycles` of one pass of one program's loop on each unit. `unit` binds, and `share` is what it leaves of the peak.
    `in_flight` are bytes per multiprocessor that loads may have under way."""

    cycles: dict[str, float]
    programs: int
    unit: str
    share: float
    in_flight: int


def ctas_per_sm(registers: int, shared_bytes: int, num_warps: int) -> int:
    """How many programs a multiprocessor runs at once; 0 when it cannot hold one."""
    per_thread = -(-max(registers, 1) // 8) * 8
    return min(
        REGISTERS // (per_thread * LANES * num_warps),
        SHARED_MEMORY // (shared_bytes + 1024),
        MAX_WARPS // num_warps,
        MAX_CTAS,
    )


def unit_cycles(loop: Loop, num_warps: int) -> dict[str, float]:
    """Cycles that each unit of a multiprocessor is busy with one pass of one program."""
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
    """The unit that needs the most cycles; `chain` when one program's products and what waits for them come one after
    the other (no wait lets a product go on) and too few programs share the multiprocessor to fill the gaps.

    A memory-bound kernel reads its bytes from memory, and is judged by the bandwidth; another reads tiles that
    neighbours share from the L2 cache, and is judged by the tensor peak.

    Of a kernel with consumer groups the loop is one group's, a pass is that of all groups, which fill each other's
    gaps as programs do, and bulk_bytes go from the L2 cache into shared memory beside it.
    """
    busy_warps = consumer_groups * WARPS_OF_GROUP or num_warps
    cycles = unit_cycles(loop, busy_warps)
    cycles["shared"] += bulk_bytes / SHARED_BYTES
    loaded = loop.load_bytes * busy_warps + bulk_bytes
    source = "memory" if is_memory_bound else "L2"
    cycles[source] = (loaded + loop.store_bytes * busy_warps) / (MEMORY_BYTES if is_memory_bound else L2_BYTES)
    programs = max(1, ctas_per_sm(registers, shared_bytes, num_warps))
    if loop.products and not loop.products_ahead:
        others = max(cycles[unit] for unit in ("issue", "special", "integer", "float"))
        cycles["chain"] = (cycles["tensor"] + others) / (programs * max(1, consumer_groups))
    unit = max(cycles, key=lambda name: cycles[name])
    judged = cycles["memory"] if is_memory_bound else _tensor_peak_cycles(loop, busy_warps)
    ahead = loop.copies_ahead // loop.copy_groups + 1 if loop.copy_groups else 1
    return Bound(cycles, programs, unit, judged / cycles[unit] if cycles[unit] else 0.0, int(loaded * ahead * programs))


def _tensor_peak_cycles(loop: Loop, num_warps: int) -> float:
    return loop.flops * num_warps / (FLOAT8_FLOPS if loop.float8_products else BF16_FLOPS)
