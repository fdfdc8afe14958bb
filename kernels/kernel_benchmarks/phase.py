"""Shared by the phases of a run: command line, clock and exit codes. Does not import torch."""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

from kernel_benchmarks.report import FILE, Report

RUN_SECONDS = 540.0  # of a whole run, below the ten-minute command limit of shared machines
DONE, FAILED, NO_GPU, OUT_OF_TIME, DEVICE_LOST = 0, 1, 2, 3, 4
"""Exit codes. DEVICE_LOST: a kernel destroyed the CUDA context; its row reports it, and a new process continues."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Deadlines in time.time(), which processes share. No row starts after `until`; everything ends at `deadline`."""

    started: float
    until: float
    deadline: float

    @property
    def is_up(self) -> bool:
        return time.time() >= self.until

    def seconds_for(self, most: float) -> float:
        """Return the seconds available to a row: `most`, limited by the rest of the run."""
        return max(0.0, min(most, self.deadline - time.time()))

    def log(self, text: str) -> None:
        """Print a line of progress."""
        now = time.time()
        print(f"[{now - self.started:4.0f} s, {max(0.0, self.deadline - now):4.0f} s left] {text}", flush=True)


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase: its rows, their report, and its deadlines."""

    only: str
    report: Report
    clock: Clock
    rest: argparse.Namespace


def parse_phase(parser: argparse.ArgumentParser, arguments: list[str] | None) -> Phase:
    """Parse the options of every phase; without those of the run, a phase is a run by itself."""
    parser.add_argument("--output", type=Path, default=Path("docs/results"), help="folder of gpu.json")
    parser.add_argument("--wheels", type=Path, default=Path("build/wheels"), help="folder with wheels that are missing")
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    now = time.time()
    parser.add_argument("--run", default=f"{now:.0f}", help="which run it belongs to")
    parser.add_argument("--started", type=float, default=now, help="when the run began, in seconds since 1970")
    parser.add_argument("--deadline", type=float, default=None, help="when everything ends")
    parser.add_argument("--until", type=float, default=None, help="after that no row is begun")
    options = parser.parse_args(arguments)
    deadline = options.started + RUN_SECONDS if options.deadline is None else options.deadline
    clock = Clock(options.started, deadline if options.until is None else options.until, deadline)
    return Phase(options.only, Report(options.output / FILE, options.run), clock, options)
