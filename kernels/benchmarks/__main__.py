"""`make bench-gpu [ONLY=paged] [RESUME=1]`: limits, then every row: checked, timed, and its peers beside it.

Ends by itself after --budget-seconds; what was not reached is named, and RESUME=1 goes on there.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from trimtab_kernels.jit import HAS_TRITON, triton

from benchmarks import (
    copy_blocks,
    edit_logits,
    fused_moe,
    paged_decode,
    paged_prefill,
    reshape_and_cache,
    rms_norm,
    rope_and_cache,
    rotary_embedding,
    sample,
    silu_and_mul,
    w8a8_block_fp8,
)
from benchmarks.limits import LIMITS
from benchmarks.report import Entry, Report, identity, plot
from benchmarks.row import Row, check
from benchmarks.timing import seconds_of

MODULES = (
    paged_decode, paged_prefill, w8a8_block_fp8, fused_moe, sample, edit_logits,
    rms_norm, rope_and_cache, rotary_embedding, silu_and_mul, reshape_and_cache, copy_blocks,
)  # fmt: skip
COMMAND = "make bench-gpu"
Seconds = Callable[[Callable[[], object]], float]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="folder of gpu.json and gpu.svg")
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    parser.add_argument("--resume", action="store_true", help="keep the rows of an earlier run on this device")
    parser.add_argument("--seed", type=int, default=None, help="of the random inputs (default: the clock)")
    parser.add_argument("--budget-seconds", type=float, default=480.0, help="no row is begun after this")
    return parser.parse_args(arguments)


def all_rows(device: torch.device, *, tiny: bool = False) -> Iterator[Row]:
    """One at a time: a row's tensors go when the next is made."""
    for module in MODULES:
        yield from module.rows(device, tiny=tiny)


def measure(row: Row, limits: dict[str, float], seconds: Seconds) -> Entry:
    """Check, time and compare. A kernel that is wrong or cannot run is an entry with its error."""
    entry: Entry = {"limit": row.limit, "bar": row.bar}
    try:
        entry["error_of_result"] = check(row)
        taken = seconds(row.ours)
    except Exception as error:  # of any kind: the other rows still run, and the exit code tells
        return {**entry, "error": f"{type(error).__name__}: {str(error)[:300]}"}
    rate = row.amount / taken
    entry |= {"seconds": taken, "rate": rate, "is_wrong": False}
    if limits.get(row.limit):
        entry["share"] = rate / limits[row.limit]
    entry["peers"] = {name: _peer(call, taken, seconds) for name, call in row.peers.items()}
    return entry


def _peer(call: Callable[[], object], ours: float, seconds: Seconds) -> Entry:
    try:
        taken = seconds(call)
    except Exception as error:  # a peer that this installation lacks
        return {"not_run": f"{type(error).__name__}: {str(error)[:120]}"}
    return {"seconds": taken, "times_as_long": taken / ours}


def run(report: Report, rows: Iterator[Row], *, only: str, deadline: float, seconds: Seconds) -> list[str]:
    """Measure every row that is wanted and not there yet; returns the names that were not reached."""
    left: list[str] = []
    for row in rows:
        if only not in row.name or report.has(row.name):
            continue
        if time.monotonic() > deadline:
            left.append(row.name)
            continue
        entry = measure(row, report.limits, seconds)
        report.add(row.name, entry)
        told = (
            entry.get("error") or f"{1e6 * entry['seconds']:.1f} us, share {entry.get('share', 0):.3f} of {row.bar:.2f}"
        )
        print(f"{row.name}: {told}", flush=True)
    return left


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 when every row ran and is right, 1 when one is not, 2 without a GPU or Triton, 3 out of time."""
    options = parse(arguments)
    if not torch.cuda.is_available() or not HAS_TRITON:
        print("bench-gpu: needs a CUDA device, torch with CUDA and triton; nothing was measured", file=sys.stderr)
        return 2
    started = time.monotonic()
    device = torch.device("cuda")
    seed = int(time.time()) if options.seed is None else options.seed
    torch.manual_seed(seed)
    command = f"{COMMAND} (seed {seed})"
    report = Report(options.output / "gpu.json", identity(device, triton.__version__), command, resume=options.resume)
    for name, measure_limit in LIMITS.items():
        try:
            report.limits[name] = measure_limit(device)
            print(f"limit {name}: {report.limits[name] / 1e12:.3g} T/s", flush=True)
        except RuntimeError as error:  # float8 before Ada
            print(f"limit {name}: not measured, {str(error)[:120]}", flush=True)
    report.write()
    deadline = started + options.budget_seconds
    left = run(report, all_rows(device), only=options.only, deadline=deadline, seconds=lambda c: seconds_of(c, device))
    if not plot(report.rows, options.output / "gpu.svg"):
        print("no plot: matplotlib is not installed")
    if left:
        print(f"out of time; RESUME=1 goes on with: {', '.join(left)}")
    if any("error" in row for row in report.rows.values()):
        return 1
    return 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
