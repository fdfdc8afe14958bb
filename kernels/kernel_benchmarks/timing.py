"""Seconds of a call on the GPU: the median of single calls, each with a cold cache."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

FLUSH_BYTES = 512 << 20
"""Read before each call: empties the 50 MiB L2 cache, and takes long enough that the launch is queued meanwhile.
Writing would leave dirty cache lines, whose write-back would fall into the timed call."""
WARM_UP_CALLS = 3
MIN_CALLS, MAX_CALLS = 5, 50
SECONDS_PER_WAY = 0.25


class DeviceLost(Exception):
    """The CUDA context is destroyed: every further call of this process fails."""


def check_device() -> None:
    """Check the device after an error.

    Raises:
        DeviceLost: the CUDA context is destroyed.
    """
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise DeviceLost(str(error)[:200]) from error


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Return the faster of launching the call and of replaying it from a graph, as an engine does: with several small
    kernels, launching would measure the host, and with a single one, replaying would measure the graph. The first call
    may compile. Raises the call's exceptions.
    """
    for _ in range(WARM_UP_CALLS):
        call()
    torch.cuda.synchronize()
    flush = torch.zeros(FLUSH_BYTES // 4, device=device)
    taken = _median(call, flush)
    graph = _try_capture(call)
    return taken if graph is None else min(taken, _median(graph.replay, flush))


def _try_capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
    """Return the captured graph, or None if the call cannot be captured: it waits for the device, or its library
    forbids it.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        torch.cuda.synchronize()  # raises if more than the capture is lost
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
