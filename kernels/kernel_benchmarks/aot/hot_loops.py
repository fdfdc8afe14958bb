"""Table of hot loops in the results page, counted from machine code."""

from collections.abc import Iterable

from kernel_benchmarks.aot.bounds import BYTES_IN_FLIGHT_NEEDED
from kernel_benchmarks.aot.compiler import Compiled

INTRODUCTION = """**Counted from machine code, not measured.** Per pass of the innermost loop of one CTA on sm_90:
warp-group matrix instructions and waits for them, bytes read, cycles of a multiprocessor's units, and resident CTAs.
`chain` is the serial time of a CTA's matrix instructions and the rest, divided by the CTAs that fill each other's gaps.
The busiest unit is the bottleneck. `share` is the attainable fraction: of the tensor peak for tiles of 128 rows and
more, whose operands are in the L2 cache; otherwise of 4.3 TB/s, with each byte read from memory once, for which a
multiprocessor needs {needed:.0f} KiB in flight (800 ns). Latencies within a pass, bank conflicts and clocks are not
counted: it is a limit, not a prediction. Rates and their sources are in `aot/bounds.py`, experiments in
[kernel-notes.md](kernel-notes.md)."""
UNITS = ("tensor", "issue", "special", "integer", "shared")
READ = ("case", "kernel", "MMAs / waits", "KiB read")
COLUMNS = (*READ, *UNITS, "from", "chain", "CTAs", "KiB in flight", "bottleneck", "share")


def hot_loop_table(compiled: Iterable[Compiled]) -> list[str]:
    """Return a section of the page; empty if no loop was analysed."""
    rows = [row for entry in compiled if (row := _row(entry))]
    head = [
        "## Hot loops",
        "",
        INTRODUCTION.format(needed=BYTES_IN_FLIGHT_NEEDED / 1024),
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|" + " --- |" * len(COLUMNS),
    ]
    return [*head, *rows, ""] if rows else []


def _row(entry: Compiled) -> str | None:
    loop, limit = entry.hot_loop, entry.bound
    if loop is None or limit is None:
        return None
    products = f"{loop.products} / {loop.waits}" if loop.products else "–"
    source = "memory" if entry.is_memory_bound else "L2"
    chain = f"{limit.cycles['chain']:.0f}" if "chain" in limit.cycles else "–"
    read = loop.load_bytes * entry.num_warps + entry.bulk_bytes
    cells = [
        entry.case,
        entry.kernel,
        products,
        f"{read / 1024:.3g}",
        *[f"{limit.cycles[unit]:.0f}" for unit in UNITS],
        f"{source} {limit.cycles[source]:.0f}",
        chain,
        str(limit.ctas),
        f"{limit.in_flight / 1024:.0f}",
        limit.unit,
        f"{limit.share:.2f}",
    ]
    return f"| {' | '.join(cells)} |"
