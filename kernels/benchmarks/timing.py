"""Seconds of a call on the GPU: median of single calls, each with a cold cache."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

FLUSH_BYTES = 512 << 20
"""Written before each call: empties the 50 MiB L2 cache, and takes so long that the launch is queued by its end."""
WARM_UP_CALLS = 3
MIN_CALLS, MAX_CALLS = 5, 50
SECONDS_PER_ROW = 0.5


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """The first call may compile. Raises what the call raises."""
    for _ in range(WARM_UP_CALLS):
        call()
    torch.cuda.synchronize()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    event: Any = torch.cuda.Event
    times: list[float] = []
    started = time.monotonic()
    while len(times) < MIN_CALLS or (len(times) < MAX_CALLS and time.monotonic() - started < SECONDS_PER_ROW):
        start, end = event(enable_timing=True), event(enable_timing=True)
        flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)
