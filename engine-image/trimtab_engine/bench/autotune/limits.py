"""Limits of a trial: latency percentiles, and the prefix cache hit rate. Pure.

Figures have the names of `bench serve`: `p99_ttft_ms`, `request_throughput`, `failed`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab_engine.errors import ConfigError

METRICS = ("ttft", "itl", "tpot", "e2el")
DEFAULT_PERCENTILE = 99.0
HIT_RATE = "prefix_cache_hit_rate"
Figures = Mapping[str, float | None]
"""Measured values; None if there was nothing to measure."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Upper limit of a latency percentile, in milliseconds."""

    metric: str
    percentile: float
    milliseconds: float

    @classmethod
    def parse(cls, text: str) -> "Limit":
        """Parse `ttft:500` (99th percentile) or `itl:p95:80`. Raises ConfigError."""
        metric, *percentile, value = text.split(":") if ":" in text else (text, "")
        limit = cls(metric, _percentile(percentile), _number(value))
        if metric not in METRICS or len(percentile) > 1 or not _is_possible(limit):
            raise ConfigError(
                f"--limits {text!r}: use NAME:MILLISECONDS or NAME:pPERCENTILE:MILLISECONDS, such as ttft:500 or "
                f"itl:p95:80; names are {', '.join(METRICS)}"
            )
        return limit

    @property
    def figure(self) -> str:
        """Name of the checked figure."""
        return f"p{self.percentile:g}_{self.metric}_ms"

    def __str__(self) -> str:
        return f"{self.metric.upper()} p{self.percentile:g} <= {self.milliseconds:g} ms"


@dataclass(frozen=True, slots=True)
class Limits:
    """All limits of a trial."""

    latencies: tuple[Limit, ...] = ()
    min_cache_hit: float = 0.0
    """Minimum fraction of prompt tokens found in the prefix cache."""

    @classmethod
    def parse(cls, texts: Sequence[str], min_cache_hit: float = 0.0) -> "Limits":
        """Parse the limits. Raises ConfigError, also for duplicates."""
        latencies = tuple(Limit.parse(text) for text in texts)
        figures = [limit.figure for limit in latencies]
        if twice := next((figure for figure in figures if figures.count(figure) > 1), None):
            raise ConfigError(f"--limits {twice} is set twice; remove one")
        return cls(latencies, min_cache_hit)

    @property
    def percentiles(self) -> list[float]:
        """Percentiles to measure."""
        return sorted({limit.percentile for limit in self.latencies} | {DEFAULT_PERCENTILE})

    def violations(self, figures: Figures) -> list[str]:
        """Return one phrase per violated limit; empty if all are met."""
        return [words for words, excess in self._evaluate_all(figures) if excess > 1]

    def excess(self, figures: Figures) -> float:
        """Return the worst figure divided by its limit; at most 1 if all are met."""
        return max((excess for _, excess in self._evaluate_all(figures)), default=0.0)

    def _evaluate_all(self, figures: Figures) -> list[tuple[str, float]]:
        failed = figures.get("failed") or 0
        judged = [(f"{failed:g} requests failed", math.inf if failed else 0.0)]
        judged += [_evaluate(limit, figures.get(limit.figure)) for limit in self.latencies]
        if self.min_cache_hit:
            hit = figures.get(HIT_RATE) or 0.0
            words = f"prefix cache hit rate {hit:.0%} < {self.min_cache_hit:.0%}"
            judged.append((words, self.min_cache_hit / hit if hit else math.inf))
        return judged

    def __str__(self) -> str:
        words = [str(limit) for limit in self.latencies]
        words += [f"prefix cache hits >= {self.min_cache_hit:.0%}"] * bool(self.min_cache_hit)
        return ", ".join(words) or "none"


def _evaluate(limit: Limit, seen: float | None) -> tuple[str, float]:
    if seen is None:  # an output of one token has no gap, so the limit is not met
        return f"no {limit.metric.upper()} was measured", math.inf
    return f"{limit.metric.upper()} p{limit.percentile:g} {seen:.4g} ms > {limit.milliseconds:g}", (
        seen / limit.milliseconds
    )


def _percentile(words: Sequence[str]) -> float:
    if not words:
        return DEFAULT_PERCENTILE
    return _number(words[0].removeprefix("p")) if words[0].startswith("p") else math.nan


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _is_possible(limit: Limit) -> bool:
    return 0 < limit.percentile <= 100 and 0 < limit.milliseconds < math.inf
