"""Seconds of a call on the GPU: median of single calls, each with a cold cache."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

FLUSH_BYTES = 512 << 20
"""Read before each call: empties the 50 MiB L2 cache, and takes so long that the launch is queued by its end. Written,
it would leave the cache full of lines whose way to memory falls into the call that is timed."""
WARM_UP_CALLS = 3
MIN_CALLS, MAX_CALLS = 5, 50
SECONDS_PER_WAY = 0.25


class DeviceLost(Exception):
    """The CUDA context is gone: every further call of this process fails."""


def check_device() -> None:
    """After an error: raises DeviceLost where the device took it for good."""
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise DeviceLost(str(error)[:200]) from error


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """The faster of launching it and of replaying it from a graph, as an engine does: of several small kernels the
    host's launches would be timed, and of a single one the graph's. The first call may compile. Raises what it raises.
    """
    for _ in range(WARM_UP_CALLS):
        call()
    torch.cuda.synchronize()
    flush = torch.zeros(FLUSH_BYTES // 4, device=device)
    taken = _median(call, flush)
    graph = _captured(call)
    return taken if graph is None else min(taken, _median(graph.replay, flush))


def _captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
    """None where it cannot be captured: it waits for the device, or its library forbids it."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()  # raises where more than the capture is lost
        return None
    return graph


def _median(call: Callable[[], object], flush: torch.Tensor) -> float:
    event: Any = torch.cuda.Event
    times: list[float] = []
    started = time.monotonic()
    while len(times) < MIN_CALLS or (len(times) < MAX_CALLS and time.monotonic() - started < SECONDS_PER_WAY):
        start, end = event(enable_timing=True), event(enable_timing=True)
        flush.sum()
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)
