"""Arrivals of a replay from files and flags: --trace, --lengths, --from, --duration, --speed, --copies …"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from pathlib import Path

from trimtab_simulator.errors import BadRequest, BadTrace
from trimtab_simulator.trace.arrivals import Arrival, Trace
from trimtab_simulator.trace.formats import (
    RATE_WINDOW_SECONDS,
    Format,
    RateWindow,
    load_text,
    read_lengths,
    read_log,
    read_rates,
)
from trimtab_simulator.trace.sampling import Draw, draw_arrivals, pairs_of, peak_rate, windows_of

PEAK_WINDOW_SECONDS = 60.0  # window of a log's highest rate, in the replay's time
COPY_JITTER_SECONDS = 20.0  # of copies made for --peak, unless --jitter is given


@dataclass(frozen=True, slots=True)
class Transform:
    """Transformation of a trace. `start` and `duration` are seconds of the trace, the rest refers to the replay.

    `copies` overlay the same log, each request of each copy shifted by up to `jitter` seconds either way; `peak` is the
    highest rate, in requests a second; `cv` draws a rate file's clients as one process of that coefficient of
    variation.
    """

    start: float = 0.0
    duration: float | None = None
    speed: float = 1.0
    copies: int = 1
    jitter: float = 0.0
    peak: float | None = None
    cv: float | None = None

    def check(self) -> None:
        """Raise BadRequest for invalid values."""
        _check("--from", self.start, least=0.0)
        _check("--duration", self.duration, above=0.0)
        _check("--speed", self.speed, above=0.0)
        _check("--copies", self.copies, least=1)
        _check("--jitter", self.jitter, least=0.0)
        _check("--peak", self.peak, above=0.0)
        _check("--cv", self.cv, above=0.0)


def _check(flag: str, value: float | None, *, least: float = -math.inf, above: float = -math.inf) -> None:
    if value is None or (math.isfinite(value) and value >= least and value > above):
        return
    bound = f"at least {least:g}" if math.isfinite(least) else f"above {above:g}"
    raise BadRequest(f"{flag} is {value}; it must be a number {bound}")


def load_trace(path: Path, transform: Transform, *, lengths: Path | None = None, seed: int = 0) -> Trace:
    """Read and transform a trace. Raise BadTrace or BadRequest; equal arguments give equal arrivals."""
    transform.check()
    text, kind = load_text(path)
    rng = random.Random(f"trace-{seed}")
    match kind:
        case Format.LENGTHS:
            raise BadRequest(f"{path} holds lengths without arrivals; give it as --lengths, and rates as --trace")
        case Format.RATES:
            if lengths is None:
                raise BadRequest(f"{path} holds rates without lengths; give --lengths FILE (lengths, or another log)")
            trace = _from_rates(path.name, read_rates(path, text), draw_of(lengths), transform, rng)
        case _:
            if transform.cv is not None:
                raise BadRequest(f"--cv is for rate files; {path} is a log with arrival times")
            trace = _from_log(read_log(path, text, kind), transform, rng)
            if lengths is not None:
                draw = draw_of(lengths)
                drawn = (draw(rng, "", arrival.at) for arrival in trace.arrivals)
                arrivals = [Arrival(a.at, *pair) for a, pair in zip(trace.arrivals, drawn, strict=True)]
                trace = replace(trace, arrivals=arrivals)
    if not trace.arrivals:
        raise BadTrace(f"{path} has no requests between --from and --duration; choose another range")
    return trace


def draw_of(path: Path) -> Draw:
    """Return a sampler of lengths from a file of lengths or a log of requests."""
    text, kind = load_text(path)
    match kind:
        case Format.LENGTHS:
            return windows_of(read_lengths(path, text))
        case Format.RATES:
            raise BadRequest(f"--lengths {path} holds rates; give lengths per client, or a log of requests")
        case _:
            return pairs_of(read_log(path, text, kind).arrivals)


def _from_rates(name: str, windows: list[RateWindow], draw: Draw, transform: Transform, rng: random.Random) -> Trace:
    if transform.copies != 1 or transform.jitter:
        raise BadRequest("--copies and --jitter are for logs; a rate file is scaled by --peak")
    end = max(window.start for window in windows) + RATE_WINDOW_SECONDS
    stop = end if transform.duration is None else min(end, transform.start + transform.duration)
    part = [w for w in windows if w.start + RATE_WINDOW_SECONDS > transform.start and w.start < stop]
    peak = peak_rate(part) * transform.speed
    share = transform.peak / peak if transform.peak is not None and peak else 1.0
    rows = draw_arrivals(part, share, draw, rng, cv=transform.cv)
    arrivals = [
        row._replace(at=(row.at - transform.start) / transform.speed)
        for row in rows
        if transform.start <= row.at < stop
    ]
    return Trace(name, arrivals, (stop - transform.start) / transform.speed)


def _from_log(trace: Trace, transform: Transform, rng: random.Random) -> Trace:
    end = trace.seconds
    stop = end if transform.duration is None else min(end, transform.start + transform.duration)
    is_whole = transform.start == 0 and stop == end
    seconds = max(0.0, stop - transform.start) / transform.speed
    part = [
        arrival._replace(at=(arrival.at - transform.start) / transform.speed)
        for arrival in trace.arrivals
        if is_whole or transform.start <= arrival.at < stop
    ]
    copies, jitter, kept = transform.copies, transform.jitter, 1.0
    if transform.peak is not None and part:
        peak = highest_rate(part) * copies
        more = max(1, math.ceil(transform.peak / peak - 1e-9))
        if more > 1:
            copies, jitter = copies * more, jitter or COPY_JITTER_SECONDS
        kept = transform.peak / (peak * more)
    arrivals = _copied(part, copies, jitter, seconds, rng)
    if kept < 1:
        arrivals = [arrival for arrival in arrivals if rng.random() < kept]
    return replace(trace, arrivals=arrivals, seconds=seconds)


def _copied(part: list[Arrival], copies: int, jitter: float, seconds: float, rng: random.Random) -> list[Arrival]:
    """Return the overlaid log. Copies share no prefixes with each other: they represent other users."""
    if copies == 1 and not jitter:
        return part
    stride = 1 + max((max(arrival.prefix, default=0) for arrival in part), default=0)
    arrivals = [
        Arrival(
            min(seconds, max(0.0, arrival.at + rng.uniform(-jitter, jitter))),
            arrival.prompt,
            arrival.output,
            tuple(key + copy * stride for key in arrival.prefix),
        )
        for copy in range(copies)
        for arrival in part
    ]
    arrivals.sort(key=lambda arrival: arrival.at)
    return arrivals


def highest_rate(arrivals: list[Arrival]) -> float:
    """Return the highest number of requests in PEAK_WINDOW_SECONDS, per second."""
    first, most = 0, 0
    for index, arrival in enumerate(arrivals):
        while arrival.at - arrivals[first].at >= PEAK_WINDOW_SECONDS:
            first += 1
        most = max(most, index - first + 1)
    return most / PEAK_WINDOW_SECONDS
