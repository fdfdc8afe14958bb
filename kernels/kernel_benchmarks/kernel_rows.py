"""The part of a run that checks and times every kernel, or (`--peers`) what compiles for long beside them.

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
from kernel_benchmarks.report import Entry, in_words
from kernel_benchmarks.row import Row, check
from kernel_benchmarks.timing import DeviceLost, check_device, seconds_of
from kernel_benchmarks.wheels import use_wheels

MODULES = (
    paged_decode, paged_prefill, latent_attention, rms_norm, rope_and_cache, rotary_embedding, silu_and_mul,
    reshape_and_cache, copy_blocks, skinny_gemm, lora, layer, sample, edit_logits, fused_moe, w8a8_block_fp8,
)  # fmt: skip
ROW_SECONDS, PEER_SECONDS = 60.0, 120.0
"""After that a row counts as hung, and a peer as too slow to compile. FlashInfer compiles for a minute."""
Seconds = Callable[[Callable[[], object]], float]


def all_rows(device: torch.device, *, tiny: bool = False) -> Iterator[Row]:
    """One at a time: a row's tensors go when the next is made."""
    for module in MODULES:
        yield from module.rows(device, tiny=tiny)


def measure(row: Row, limits: dict[str, float], seconds: Seconds) -> Entry:
    """Check and time. A kernel that is wrong or cannot run is an entry with its error."""
    entry: Entry = {"limit": row.limit, "bar": row.bar}
    try:
        entry["error_of_result"] = check(row)
        taken = seconds(row.ours)
    except Exception as error:  # of any kind: the other rows still run, and the exit code tells
        traceback.print_exception(error)
        return {**entry, "error": in_words(error)}
    rate = row.amount / taken
    entry |= {"seconds": taken, "rate": rate}
    if limits.get(row.limit):
        entry["share"] = rate / limits[row.limit]
    return entry


def measure_peer(call: Callable[[], object], seconds: Seconds) -> Entry:
    """Seconds, or why it does not run here."""
    try:
        return {"seconds": seconds(call)}
    except Exception as error:  # a peer that this installation lacks, or that this GPU cannot run
        return {"not_run": in_words(error, 160)}


def run_row(row: Row, phase: Phase, seconds: Seconds) -> None:
    """The row, and its peers that are quick to start."""
    report = phase.report
    report.begin(row.name, seconds=phase.clock.seconds_for(ROW_SECONDS))
    entry = measure(row, report.limits, seconds)
    report.add(row.name, entry)
    asked = f" of {row.bar:.2f} asked" if row.bar else ""
    told = entry.get("error") or f"{microseconds(entry)}, share {entry.get('share', 0):.3f}{asked}"
    phase.clock.say(f"{row.name}: {told}")
    if "error" in entry:
        check_device()
    if "error" not in entry:
        run_peers(row.name, row.peers, phase, seconds, ROW_SECONDS)


def run_peers(name: str, peers: dict[str, Callable[[], object]], phase: Phase, seconds: Seconds, most: float) -> None:
    """Those that are not in the report, while there is time."""
    for peer, call in peers.items():
        if phase.report.has_peer(name, peer) or phase.clock.is_up:
            continue
        phase.report.begin(name, peer, seconds=phase.clock.seconds_for(most))
        entry = measure_peer(call, seconds)
        phase.report.add_peer(name, peer, entry)
        phase.clock.say(f"{name}, {peer}: {entry.get('not_run') or microseconds(entry)}")
        if "not_run" in entry:
            check_device()


def microseconds(entry: Entry) -> str:
    return f"{1e6 * entry['seconds']:.1f} us"


def run(rows: Iterator[Row], phase: Phase, seconds: Seconds, *, peers: bool) -> list[str]:
    """Every row (or its compiled peers) that is wanted and not there yet; returns the names that were not reached."""
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
    """Kernel after kernel. One whose inputs cannot be made is a row with its error, and the next kernel is measured."""
    left: list[str] = []
    for module in modules:
        try:
            left += run(module.rows(device, tiny=False), phase, seconds, peers=peers)
        except DeviceLost:
            raise
        except Exception as error:  # of any kind, out of memory first of all
            name = f"{module.__name__.rpartition('.')[2]}, its inputs"
            if not peers:
                phase.report.add(name, {"error": in_words(error)})
            phase.clock.say(f"{name}: {error}")
            check_device()
    return left


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 when every row ran and is right, 1 when one is not, 3 out of time, 4 when the device is lost."""
    parser = argparse.ArgumentParser(prog="python -m kernel_benchmarks.kernel_rows", description=__doc__.split("\n")[0])
    parser.add_argument("--peers", action="store_true", help="what compiles for long, beside rows that are there")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs")
    phase = parse_phase(parser, arguments)
    use_wheels(phase.rest.wheels)
    torch.manual_seed(phase.rest.seed)
    device = torch.device("cuda")
    try:
        left = run_modules(MODULES, device, phase, lambda call: seconds_of(call, device), peers=phase.rest.peers)
    except DeviceLost as lost:
        phase.clock.say(f"the device is lost, a new process goes on: {lost}")
        return DEVICE_LOST
    if left:
        phase.clock.say(f"not reached: {', '.join(left)}")
        return OUT_OF_TIME
    return FAILED if any("error" in row for row in phase.report.rows.values()) else DONE


if __name__ == "__main__":
    sys.exit(main())
