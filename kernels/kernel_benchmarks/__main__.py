"""`make bench-gpu [ONLY=paged] [RESUME=1]`: checks and times every row and its peers within one time budget.

Trimtab's rows run first: the kernels, then the engine; the remaining time is used for peers that compile for long and
for other engines. Each phase is a process (supervision.py); the report is written after each row. Rows that were not
reached are listed, and RESUME=1 continues with them.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kernel_benchmarks.engine_peers import SHAPES, note_absent, select_rows
from kernel_benchmarks.engine_rows import GROUPS
from kernel_benchmarks.page import write_pages
from kernel_benchmarks.peers import PEERS
from kernel_benchmarks.phase import DONE, FAILED, OUT_OF_TIME, RUN_SECONDS, Clock
from kernel_benchmarks.report import FILE, Report
from kernel_benchmarks.supervision import run_phase
from kernel_benchmarks.wheels import use_wheels

COMMAND = "make bench-gpu"
KERNELS_SHARE, ENGINE_SHARE, OURS_SHARE = 0.45, 0.85, 0.92
"""Fractions of the budget after which kernels, the engine, and remaining kernels start no further row."""
END_SECONDS = 10.0
"""Reserved for the page and the plot."""
RunPart = Callable[..., int]


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its options, as passed to every phase."""

    options: argparse.Namespace
    started: float
    part: RunPart = run_phase

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
        """Run one phase, which starts no row after that fraction of the budget. Returns its exit code."""
        until = self.started + share * (self.deadline - self.started)
        options = self.options
        command = ["--output", str(options.output), "--only", options.only, "--wheels", str(options.wheels)]
        command += ["--run", self.name, "--started", f"{self.started}", "--deadline", f"{self.deadline}"]
        command += ["--until", f"{until}", *arguments]
        return self.part(f"kernel_benchmarks.{module}", command, self.path, self.name, deadline=self.deadline)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
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
    """Measure kernels and engine; return the phases' exit codes. Kernels that ran out of time continue after the
    engine.
    """
    kernels = ("kernel_rows", "--seed", str(seed))
    if run.options.kernels:
        return [run(*kernels)]
    codes = [run(*kernels, share=KERNELS_SHARE)]
    for number, group in enumerate(GROUPS):
        if group.select_rows(run.options.only, run.report().has):
            codes.append(run("end_to_end", "--group", str(number), share=ENGINE_SHARE))
    return [run(*kernels, share=OURS_SHARE), *codes[1:]] if codes[0] == OUT_OF_TIME else codes


def measure_peers(run: Run, seed: int) -> list[str]:
    """Measure peers in the remaining time; return the peers that were not reached."""
    left: list[str] = []
    for peer in PEERS:
        for shape in SHAPES:
            only = run.options.only
            if note_absent(peer, shape, only, run.report()) or not select_rows(peer, shape, only, run.report()):
                continue
            if run("engine_peers", "--peer", peer.name, "--shape", shape.name) == OUT_OF_TIME:
                left.append(f"{peer.name}, {shape.name}")
    if run("kernel_rows", "--peers", "--seed", str(seed)) == OUT_OF_TIME:
        left.append("kernels that compile for long")
    return left


def main(arguments: list[str] | None = None, part: RunPart = run_phase) -> int:
    """Return exit code 0 if every row ran and is correct, 1 if one is not, 2 without a GPU or Triton, 3 if time ran out
    before all rows. Peers do not affect it.
    """
    options = parse(arguments)
    run = Run(options, time.time(), part)
    use_wheels(options.wheels)
    seed = int(run.started) if options.seed is None else options.seed
    command = f"{COMMAND}{f' ONLY={options.only}' if options.only else ''}{' RESUME=1' if options.resume else ''}"
    begun = run("limits", "--command", f"{command} (seed {seed})", *(["--resume"] if options.resume else []))
    if begun != DONE:
        return begun
    codes = measure_ours(run, seed)
    run("limits", "--at-end")  # a warm or shared device is slower than at the start
    report = run.report()
    failed = [name for name, row in report.rows.items() if "error" in row and options.only in name]
    clock = Clock(run.started, run.deadline, run.deadline)
    measured = sum("run" in row for row in report.rows.values()) - len(failed)  # a row may have only peers
    clock.log(f"our own rows: {measured} measured, {len(failed)} failed")
    unmeasured_peers = [] if options.kernels else measure_peers(run, seed)
    if not write_pages(run.report(), options.output):
        clock.log("no plot: matplotlib is not installed")
    if OUT_OF_TIME in codes:
        clock.log("out of time before all rows were measured; RESUME=1 continues")
    if unmeasured_peers:
        clock.log(f"no time was left for: {'; '.join(unmeasured_peers)}; RESUME=1 continues")
    if failed or FAILED in codes:
        clock.log(f"failed: {', '.join(failed) or 'a phase of the run'}")
        return FAILED
    return OUT_OF_TIME if OUT_OF_TIME in codes else DONE


if __name__ == "__main__":
    sys.exit(main())
