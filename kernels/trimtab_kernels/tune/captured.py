"""Timing of a call as an engine makes it: from a captured graph, after other calls of its kind.

Timed one by one from Python, a call of less than 40 microseconds shows the host that launches it instead of the kernel,
and the memory written to empty the cache is still being flushed. Here, one graph contains many calls with different
copies of the weights, so that all of them are read from memory, and the graph's time is divided by the number of calls.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

CALLS = 20
ROTATED_BYTES = 192 << 20
"""Weights of all calls of a graph: several times the L2 cache of current GPUs (40 to 60 MiB)."""
WARM_UP_REPLAYS, TIMED_REPLAYS = 2, 5


def copies_needed(num_bytes: int) -> int:
    """Return the number of copies of a weight of this size that are used in rotation, so that none is still in the
    cache when it is read again; at most one per call.
    """
    return max(1, min(CALLS, -(-ROTATED_BYTES // max(1, num_bytes))))


def seconds_in_graph(calls: Sequence[Callable[[], object]]) -> float:
    """Return seconds per call: the median replay of a graph of CALLS calls, used in rotation. They must have run
    before, so that nothing is compiled here.

    Raises:
        RuntimeError: they cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(CALLS):
            calls[number % len(calls)]()
    for _ in range(WARM_UP_REPLAYS):
        graph.replay()
    event: Any = torch.cuda.Event
    times: list[float] = []
    for _ in range(TIMED_REPLAYS):
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times) / CALLS
