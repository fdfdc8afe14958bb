"""Requests sampled from load per client and window.

Each client's gaps between requests have the coefficient of variation of the file (cv, 1 is Poisson). One deployment
gets a share of a fleet's requests: a share p of a renewal process has cv² = 1 + p·(cv² − 1).
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence

from trimtab_simulator.trace.arrivals import Arrival
from trimtab_simulator.trace.formats import (
    LENGTH_WINDOW_SECONDS,
    RATE_WINDOW_SECONDS,
    Distribution,
    LengthWindow,
    RateWindow,
)

Draw = Callable[[random.Random, str, float], tuple[int, int]]
"""(rng, client, seconds of the trace) → prompt and output tokens."""

ALL = ""  # client of a load that is sampled as one process


def peak_rate(windows: Sequence[RateWindow]) -> float:
    """Return the highest total rate of all clients, requests a second."""
    return max(total_rates(windows).values(), default=0.0)


def total_rates(windows: Sequence[RateWindow]) -> dict[float, float]:
    """Return the total rate of all clients by the window's start."""
    totals: dict[float, float] = defaultdict(float)
    for window in windows:
        totals[window.start] += window.rate
    return dict(totals)


def draw_arrivals(
    windows: Sequence[RateWindow], share: float, draw: Draw, rng: random.Random, *, cv: float | None = None
) -> list[Arrival]:
    """Return arrivals in the trace's own time; `share` of each client's requests. With `cv` all clients are one
    process.
    """
    by_client: dict[str, list[RateWindow]] = defaultdict(list)
    if cv is None:
        for window in windows:
            by_client[window.client].append(window)
    else:
        by_client[ALL] = [RateWindow(ALL, start, rate, cv) for start, rate in total_rates(windows).items()]
    rows: list[Arrival] = []
    for client, its in sorted(by_client.items()):
        for at in _times(its, share, rng, thins=cv is None):
            prompt, output = draw(rng, client, at)
            rows.append(Arrival(at, prompt, output))
    rows.sort(key=lambda row: row.at)
    return rows


def _times(windows: Sequence[RateWindow], share: float, rng: random.Random, *, thins: bool) -> list[float]:
    """Return arrival times of a renewal process whose clock runs at each window's rate: gaps have mean 1 in that
    time.
    """
    times: list[float] = []
    left: float | None = None  # of the gap that reaches into the next window, in its own time
    for window in sorted(windows, key=lambda window: window.start):
        rate = window.rate * share
        squared = window.cv**2
        if thins and share < 1:
            squared = 1 + share * (squared - 1)
        shape = 1 / max(squared, 1e-3)
        if left is None:
            left = rng.random() * rng.gammavariate(shape, 1 / shape)
        mass = rate * RATE_WINDOW_SECONDS
        done = left
        while done < mass:
            times.append(window.start + done / rate)
            done += rng.gammavariate(shape, 1 / shape)
        left = done - mass
    return times


def pairs_of(arrivals: Sequence[Arrival]) -> Draw:
    """Return a sampler of lengths from another log: prompt and output of a random request."""
    pairs = [(arrival.prompt, arrival.output) for arrival in arrivals]

    def draw(rng: random.Random, client: str, at: float) -> tuple[int, int]:
        return pairs[int(rng.random() * len(pairs))]

    return draw


def windows_of(lengths: Sequence[LengthWindow]) -> Draw:
    """Return a sampler of lengths by client and window; clients without lengths use those of another client, from the
    nearest window.
    """
    by_client: dict[str, list[LengthWindow]] = defaultdict(list)
    for window in lengths:
        by_client[window.client].append(window)
    for its in by_client.values():
        its.sort(key=lambda window: window.start)
    clients = sorted(by_client)

    def draw(rng: random.Random, client: str, at: float) -> tuple[int, int]:
        known = client if client in by_client else clients[int(rng.random() * len(clients))]
        its = by_client[known]
        index = bisect_right(its, at, key=lambda window: window.start) - 1
        window = its[max(0, index)]
        if at - window.start >= LENGTH_WINDOW_SECONDS and index + 1 < len(its):
            window = min(its[index], its[index + 1], key=lambda window: abs(window.start - at))
        return _value(window.prompts, rng), _value(window.outputs, rng)

    return draw


def _value(distribution: Distribution, rng: random.Random) -> int:
    index = bisect_right(distribution.cumulated, rng.random())
    return distribution.values[min(index, len(distribution.values) - 1)]
