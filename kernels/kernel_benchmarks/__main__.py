"""`make bench-gpu [ONLY=paged] [RESUME=1]`: every row checked, timed, and its peers beside it, in one span of time.

Our own rows come first: the kernels, then the engine; then what is left of the time goes to the peers that compile for
long and to the other engines. Each part is a process of its own (supervision.py); the report is written after each
row. What was not reached is named, and RESUME=1 goes on there.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kernel_benchmarks.engine_peers import SHAPES, note_absent, wanted
from kernel_benchmarks.engine_rows import GROUPS
from kernel_benchmarks.page import write_pages
from kernel_benchmarks.peers import PEERS
from kernel_benchmarks.phase import DONE, FAILED, OUT_OF_TIME, RUN_SECONDS, Clock
from kernel_benchmarks.report import FILE, Report
from kernel_benchmarks.supervision import run_part
from kernel_benchmarks.wheels import use_wheels

COMMAND = "make bench-gpu"
KERNELS_SHARE, ENGINE_SHARE, OURS_SHARE = 0.45, 0.85, 0.92
"""Of the time: until when kernels, the engine, and kernels that were not reached may begin a row."""
END_SECONDS = 10.0
"""Kept for the page and the picture."""
RunPart = Callable[..., int]


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its options, as every part is given them."""

    options: argparse.Namespace
    started: float
    part: RunPart = run_part

    @property
    def path(self) -> Path:
        return Path(self.options.output) / FILE

    @property
    def name(self) -> str:
        return f"{self.started:.0f}"

    @property
    def deadline(self) -> float:
        return self.started + float(self.options.budget_seconds) - END_SECONDS

    def report(self) -> Report:
        return Report(self.path, self.name)

    def __call__(self, module: str, *arguments: str, share: float = 1.0) -> int:
        """Run one part; no row of it is begun after that share of the time. Returns its exit code."""
        until = self.started + share * (self.deadline - self.started)
        options = self.options
        command = ["--output", str(options.output), "--only", options.only, "--wheels", str(options.wheels)]
        command += ["--run", self.name, "--started", f"{self.started}", "--deadline", f"{self.deadline}"]
        command += ["--until", f"{until}", *arguments]
        return self.part(f"kernel_benchmarks.{module}", command, self.path, self.name, deadline=self.deadline)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kernel_benchmarks", description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="folder of gpu.json, .md and .svg")
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    parser.add_argument("--resume", action="store_true", help="keep the rows of an earlier run on this device")
    parser.add_argument("--kernels", action="store_true", help="only the kernels' rows: no engine, no long peers")
    parser.add_argument("--seed", type=int, default=None, help="of the random inputs (default: the clock)")
    parser.add_argument("--budget-seconds", type=float, default=RUN_SECONDS, help="after that the run has ended")
    parser.add_argument("--wheels", type=Path, default=Path("build/wheels"), help="folder with wheels that are missing")
    return parser.parse_args(arguments)


def measure_ours(run: Run, seed: int) -> list[int]:
    """Exit codes of the parts. Kernels that the engine's turn cut off go on behind it."""
    kernels = ("kernel_rows", "--seed", str(seed))
    if run.options.kernels:
        return [run(*kernels)]
    codes = [run(*kernels, share=KERNELS_SHARE)]
    for number, group in enumerate(GROUPS):
        if group.wanted(run.options.only, run.report().has):
            codes.append(run("end_to_end", "--group", str(number), share=ENGINE_SHARE))
    return [run(*kernels, share=OURS_SHARE), *codes[1:]] if codes[0] == OUT_OF_TIME else codes


def measure_peers(run: Run, seed: int) -> list[str]:
    """Whatever time is left for; returns the peers that it did not suffice for."""
    left: list[str] = []
    for peer in PEERS:
        for shape in SHAPES:
            only = run.options.only
            if note_absent(peer, shape, only, run.report()) or not wanted(peer, shape, only, run.report()):
                continue
            if run("engine_peers", "--peer", peer.name, "--shape", shape.name) == OUT_OF_TIME:
                left.append(f"{peer.name}, {shape.name}")
    if run("kernel_rows", "--peers", "--seed", str(seed)) == OUT_OF_TIME:
        left.append("kernels that compile for long")
    return left


def main(arguments: list[str] | None = None, part: RunPart = run_part) -> int:
    """Exit code 0 when every row of ours ran and is right, 1 when one is not, 2 without a GPU or Triton, 3 when time
    ran out before all of them. Peers have no say in it."""
    options = parse(arguments)
    run = Run(options, time.time(), part)
    use_wheels(options.wheels)
    seed = int(run.started) if options.seed is None else options.seed
    command = f"{COMMAND}{f' ONLY={options.only}' if options.only else ''}{' RESUME=1' if options.resume else ''}"
    begun = run("limits", "--command", f"{command} (seed {seed})", *(["--resume"] if options.resume else []))
    if begun != DONE:
        return begun
    codes = measure_ours(run, seed)
    run("limits", "--at-end")  # a device that has become warm, or that others use, is slower than at the beginning
    report = run.report()
    failed = [name for name, row in report.rows.items() if "error" in row and options.only in name]
    clock = Clock(run.started, run.deadline, run.deadline)
    measured = sum("run" in row for row in report.rows.values()) - len(failed)  # a row may have peers alone
    clock.say(f"our own rows: {measured} measured, {len(failed)} failed")
    unmeasured_peers = [] if options.kernels else measure_peers(run, seed)
    if not write_pages(run.report(), options.output):
        clock.say("no picture: matplotlib is not installed")
    if OUT_OF_TIME in codes:
        clock.say("out of time before all rows of ours were measured; RESUME=1 goes on")
    if unmeasured_peers:
        clock.say(f"no time was left for: {'; '.join(unmeasured_peers)}; RESUME=1 goes on")
    if failed or FAILED in codes:
        clock.say(f"failed: {', '.join(failed) or 'a part of the run'}")
        return FAILED
    return OUT_OF_TIME if OUT_OF_TIME in codes else DONE


if __name__ == "__main__":
    sys.exit(main())
