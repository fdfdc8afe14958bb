"""Engine peer phase of a run: another engine on the engine's rows, one process per engine and model."""

import argparse
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path

from kernel_benchmarks.engine_rows import ROWS, EngineRow
from kernel_benchmarks.ideal import ModelShape
from kernel_benchmarks.peers import PEERS, Peer
from kernel_benchmarks.peers.served import Served
from kernel_benchmarks.phase import DONE, OUT_OF_TIME, Phase, parse_phase
from kernel_benchmarks.report import Report, format_error
from kernel_benchmarks.wheels import use_wheels

START_SECONDS, ROW_SECONDS = 180.0, 90.0
"""After this time, its start (including compilation) or a row is abandoned."""
SHAPES = tuple(dict.fromkeys(row.shape for row in ROWS if row.has_peers))


def select_rows(peer: Peer, shape: ModelShape, only: str, report: Report) -> list[EngineRow]:
    """Return the rows of this model without this peer's result."""
    rows = [row for row in ROWS if row.shape == shape and row.has_peers and only in row.name]
    return [row for row in rows if not report.has_peer(row.name, peer.name)]


def note_absent(peer: Peer, shape: ModelShape, only: str, report: Report) -> bool:
    """Return True if the peer does not run here, and record the reason in its rows."""
    why = peer.why_not(shape)
    for row in select_rows(peer, shape, only, report) if why else ():
        report.add_peer(row.name, peer.name, {"not_run": why})
    return bool(why)


def measure_rows(peer: Peer, served: Served, rows: list[EngineRow], phase: Phase) -> list[str]:
    """Measure rows while time remains, and return the names of the others."""
    left: list[str] = []
    for row in rows:
        if phase.clock.is_up:
            left.append(row.name)
            continue
        phase.report.begin(row.name, peer.name, seconds=phase.clock.seconds_for(ROW_SECONDS))
        try:
            rate = served.rate(row)
        except Exception as error:  # any error: the peer's failure is recorded
            text = format_error(error, 160)
            phase.report.add_peer(row.name, peer.name, {"not_run": text})
        else:
            phase.report.add_peer(row.name, peer.name, {"rate": rate})
            text = f"{rate:.4g} tokens/s"
        phase.clock.log(f"{row.name}, {peer.name}: {text}")
    return left


def main(arguments: list[str] | None = None) -> int:
    """Return exit code 0, or 3 out of time. A peer that cannot run is not a failure."""
    parser = argparse.ArgumentParser(
        prog="python -m kernel_benchmarks.engine_peers", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--peer", required=True, choices=[peer.name for peer in PEERS])
    parser.add_argument("--shape", required=True, choices=[shape.name for shape in SHAPES])
    phase = parse_phase(parser, arguments)
    use_wheels(phase.rest.wheels)
    peer = next(peer for peer in PEERS if peer.name == phase.rest.peer)
    shape = next(shape for shape in SHAPES if shape.name == phase.rest.shape)
    rows = select_rows(peer, shape, phase.only, phase.report)
    if not rows or note_absent(peer, shape, phase.only, phase.report):
        return DONE
    if phase.clock.is_up:
        return OUT_OF_TIME
    phase.report.begin(rows[0].name, peer.name, seconds=phase.clock.seconds_for(START_SECONDS))
    with tempfile.TemporaryDirectory() as folder:
        try:
            served: Served = import_module(f"kernel_benchmarks.peers.{peer.adapter}").start(shape, Path(folder))
        except Exception as error:  # another dependency is missing
            for row in rows:
                phase.report.add_peer(row.name, peer.name, {"not_run": format_error(error, 160)})
            return DONE
        return OUT_OF_TIME if measure_rows(peer, served, rows, phase) else DONE


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the other engine may have left threads running
