"""Kernel phase of a run: checks and times every kernel, or (`--peers`) the peers that compile for long.

`python -m kernel_benchmarks.kernel_rows`; see __main__.py for the whole run.
"""

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import torch

from kernel_benchmarks import (
    copy_blocks,
    edit_logits,
    fused_moe,
    latent_attention,
    layer,
    lora,
    paged_decode,
    paged_prefill,
    reshape_and_cache,
    rms_norm,
    rope_and_cache,
    rotary_embedding,
    sample,
    silu_and_mul,
    skinny_gemm,
    w8a8_block_fp8,
)
from kernel_benchmarks.phase import DEVICE_LOST, DONE, FAILED, OUT_OF_TIME, Phase, parse_phase
from kernel_benchmarks.report import Entry, format_error
from kernel_benchmarks.row import Row, check
from kernel_benchmarks.timing import DeviceLost, check_device, seconds_of
from kernel_benchmarks.wheels import use_wheels

MODULES = (
    paged_decode, paged_prefill, latent_attention, rms_norm, rope_and_cache, rotary_embedding, silu_and_mul,
    reshape_and_cache, copy_blocks, skinny_gemm, lora, layer, sample, edit_logits, fused_moe, w8a8_block_fp8,
)  # fmt: skip
ROW_SECONDS, PEER_SECONDS = 60.0, 120.0
"""After this time, a row counts as hung, and a peer as too slow to compile. FlashInfer compiles for a minute."""
Seconds = Callable[[Callable[[], object]], float]


def all_rows(device: torch.device, *, tiny: bool = False) -> Iterator[Row]:
    """Yield one row at a time, so that a row's tensors are freed before the next one's are created."""
    for module in MODULES:
        yield from module.rows(device, tiny=tiny)


def measure(row: Row, limits: dict[str, float], seconds: Seconds) -> Entry:
    """Check and time a row. A kernel that is wrong or cannot run is an entry with its error."""
    entry: Entry = {"limit": row.limit, "bar": row.bar}
    try:
        entry["error_of_result"] = check(row)
        taken = seconds(row.ours)
    except Exception as error:  # any error: the other rows still run, and the exit code reports it
        traceback.print_exception(error)
        return {**entry, "error": format_error(error)}
    rate = row.amount / taken
    entry |= {"seconds": taken, "rate": rate}
    if limits.get(row.limit):
        entry["share"] = rate / limits[row.limit]
    return entry


def measure_peer(call: Callable[[], object], seconds: Seconds) -> Entry:
    """Return seconds, or the reason why the peer does not run here."""
    try:
        return {"seconds": seconds(call)}
    except Exception as error:  # the peer is not installed, or this GPU cannot run it
        return {"not_run": format_error(error, 160)}


def run_row(row: Row, phase: Phase, seconds: Seconds) -> None:
    """Run the row and its peers that start quickly."""
    report = phase.report
    report.begin(row.name, seconds=phase.clock.seconds_for(ROW_SECONDS))
    entry = measure(row, report.limits, seconds)
    report.add(row.name, entry)
    target = f" of {row.bar:.2f} required" if row.bar else ""
    text = entry.get("error") or f"{microseconds(entry)}, share {entry.get('share', 0):.3f}{target}"
    phase.clock.log(f"{row.name}: {text}")
    if "error" in entry:
        check_device()
    if "error" not in entry:
        run_peers(row.name, row.peers, phase, seconds, ROW_SECONDS)


def run_peers(name: str, peers: dict[str, Callable[[], object]], phase: Phase, seconds: Seconds, most: float) -> None:
    """Run the peers without a result, while time remains."""
    for peer, call in peers.items():
        if phase.report.has_peer(name, peer) or phase.clock.is_up:
            continue
        phase.report.begin(name, peer, seconds=phase.clock.seconds_for(most))
        entry = measure_peer(call, seconds)
        phase.report.add_peer(name, peer, entry)
        phase.clock.log(f"{name}, {peer}: {entry.get('not_run') or microseconds(entry)}")
        if "not_run" in entry:
            check_device()


def microseconds(entry: Entry) -> str:
    return f"{1e6 * entry['seconds']:.1f} us"


def run(rows: Iterator[Row], phase: Phase, seconds: Seconds, *, peers: bool) -> list[str]:
    """Run every selected row (or its compiled peers) without a result; return the names of rows that were not
    reached.
    """
    left: list[str] = []
    for row in rows:
        done = all(phase.report.has_peer(row.name, peer) for peer in row.compiled) if peers else False
        if phase.only not in row.name or done or (not peers and phase.report.has(row.name)):
            continue
        if phase.clock.is_up:
            left.append(row.name)
        elif peers:
            run_peers(row.name, row.compiled, phase, seconds, PEER_SECONDS)
        else:
            run_row(row, phase, seconds)
    return left


def run_modules(
    modules: Sequence[ModuleType], device: torch.device, phase: Phase, seconds: Seconds, *, peers: bool
) -> list[str]:
    """Run one kernel after the other. A kernel whose inputs cannot be created is a row with its error, and the next
    kernel is measured.
    """
    left: list[str] = []
    for module in modules:
        try:
            left += run(module.rows(device, tiny=False), phase, seconds, peers=peers)
        except DeviceLost:
            raise
        except Exception as error:  # any error, most likely out of memory
            name = f"{module.__name__.rpartition('.')[2]}, its inputs"
            if not peers:
                phase.report.add(name, {"error": format_error(error)})
            phase.clock.log(f"{name}: {error}")
            check_device()
    return left


def main(arguments: list[str] | None = None) -> int:
    """Return exit code 0 if every row ran and is correct, 1 if one is not, 3 out of time, 4 if the device is lost."""
    parser = argparse.ArgumentParser(prog="python -m kernel_benchmarks.kernel_rows", description=__doc__.split("\n")[0])
    parser.add_argument("--peers", action="store_true", help="run the peers that compile for long, for measured rows")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs")
    phase = parse_phase(parser, arguments)
    use_wheels(phase.rest.wheels)
    torch.manual_seed(phase.rest.seed)
    device = torch.device("cuda")
    try:
        left = run_modules(MODULES, device, phase, lambda call: seconds_of(call, device), peers=phase.rest.peers)
    except DeviceLost as lost:
        phase.clock.log(f"the device is lost; a new process continues: {lost}")
        return DEVICE_LOST
    if left:
        phase.clock.log(f"not reached: {', '.join(left)}")
        return OUT_OF_TIME
    return FAILED if any("error" in row for row in phase.report.rows.values()) else DONE


if __name__ == "__main__":
    sys.exit(main())
