"""Send time of each request, in seconds after the start. Pure.

A rate without burstiness is a Poisson process; burstiness is the shape of Gamma-distributed gaps (below 1 burstier,
above 1 more even). Times are scaled so that the last one matches the rate: two seeds give the same load.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trimtab_engine.bench.serving.samples import Sample


@dataclass(frozen=True, slots=True)
class RampUp:
    """Change of the rate from `start` to `end` requests per second over the run."""

    strategy: Literal["linear", "exponential"]
    start: float
    end: float

    def at(self, progress: float) -> float:
        """Return the rate; `progress` is from 0 to 1."""
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return float(self.start * (self.end / self.start) ** progress)


def arrival_times(
    count: int, *, rate: float, burstiness: float, seed: int, ramp_up: RampUp | None = None
) -> list[float]:
    """Return the send times. `rate` is in requests per second; infinite sends all at once."""
    if ramp_up is None and math.isinf(rate):
        return [0.0] * count
    random = np.random.default_rng(seed)
    rates = [ramp_up.at(i / max(count - 1, 1)) if ramp_up else rate for i in range(count)]
    if math.isinf(burstiness):
        gaps = np.array([1 / r for r in rates])
    else:
        gaps = np.array([random.gamma(burstiness, 1 / (r * burstiness)) if r > 0 else 0.0 for r in rates])
    times = np.cumsum(gaps)
    if ramp_up is None and times[-1] > 0:
        times *= count / rate / times[-1]
    result: list[float] = times.tolist()
    return result


def recorded_times(samples: Sequence[Sample]) -> list[float]:
    """Return the samples' recorded times."""
    return [sample.timestamp or 0.0 for sample in samples]
