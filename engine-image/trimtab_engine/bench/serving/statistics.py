"""Statistics of a run from client-side results, under vLLM's names. Pure.

TTFT: from sending a request to its first output. ITL: between two chunks of output. TPOT: mean time per token after the
first. E2EL: to the last output. Results are in milliseconds; percentiles interpolate between adjacent values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trimtab_engine.bench.serving.client import RequestResult
from trimtab_engine.bench.serving.load import Outcome
from trimtab_engine.errors import ConfigError

METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time")
OBJECTIVES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True)
class Goodput:
    """Objectives of one request, in milliseconds. `itl` applies to every gap between two chunks."""

    objectives: dict[str, float]

    @classmethod
    def parse(cls, pairs: Sequence[str]) -> "Goodput":
        """Parse ["ttft:500", "tpot:50"]. Raises ConfigError."""
        objectives = {}
        for pair in pairs:
            name, _, text = pair.partition(":")
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            if name not in OBJECTIVES or not value >= 0:
                raise ConfigError(
                    f"--goodput {pair!r}: use NAME:MILLISECONDS, such as ttft:500; names are {', '.join(OBJECTIVES)}"
                )
            objectives[name] = value
        return cls(objectives)

    def is_met(self, result: RequestResult) -> bool:
        seen = {
            "ttft": result.ttft,
            "tpot": result.tpot,
            "itl": max(result.itl, default=0.0),
            "e2el": result.latency,
        }
        return all(seen[name] * 1000 <= limit for name, limit in self.objectives.items())


def summarize(
    outcome: Outcome, *, metrics: Sequence[str], percentiles: Sequence[float], goodput: Goodput
) -> dict[str, Any]:
    """Return the statistics of a run: vLLM's fields, then ours (client_…, send_lag…)."""
    complete, seconds = outcome.complete, max(outcome.duration, 1e-9)
    input_tokens, output_tokens = (sum(getattr(r, name) for r in complete) for name in ("prompt_len", "output_len"))
    met = sum(goodput.is_met(result) for result in complete)
    summary: dict[str, Any] = {
        "duration": outcome.duration,
        "completed": len(complete),
        "failed": sum(not result.success and result.error != "interrupted" for result in outcome.results),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(complete) / seconds,
        "request_goodput": met / seconds if goodput.objectives else None,
        "output_throughput": output_tokens / seconds,
        "total_token_throughput": (input_tokens + output_tokens) / seconds,
        "max_output_tokens_per_s": peak_tokens_per_second(complete),
        "max_concurrent_requests": peak_concurrency(complete),
    }
    for name in metrics:
        summary |= distribution(name, values_of(name, complete), percentiles)
    summary |= {
        "good_completed": met if goodput.objectives else None,
        "client_cpu_seconds": outcome.client_cpu_seconds,
        "client_cpu_share": outcome.client_cpu_seconds / seconds,
        "max_send_lag_ms": max((result.send_lag for result in outcome.results), default=0.0) * 1000,
        "interrupted": outcome.interrupted,
    }
    return summary


def values_of(metric: str, complete: Sequence[RequestResult]) -> list[float]:
    """Return the values in seconds. TPOT only for requests with more than one token."""
    match metric:
        case "ttft":
            return [result.ttft for result in complete]
        case "tpot":
            return [result.tpot for result in complete if result.output_len > 1]
        case "itl":
            return [gap for result in complete for gap in result.itl]
        case "e2el":
            return [result.latency for result in complete]
        case _:
            return [result.client_queue_time for result in complete]


def distribution(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Return mean_, median_, std_ and pNN_ of a metric in milliseconds; None if there are no values."""
    if not seconds:
        names = ["mean", "median", "std", *(f"p{_word(p)}" for p in percentiles)]
        return {f"{figure}_{name}_ms": None for figure in names}
    values = np.array(seconds) * 1000
    figures: dict[str, float | None] = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    return figures | {f"p{_word(p)}_{name}_ms": float(np.percentile(values, p)) for p in percentiles}


def _word(percentile: float) -> str:
    return str(int(percentile)) if percentile == int(percentile) else str(percentile)


def parse_percentiles(text: str) -> list[float]:
    """Parse "50,90,99". Raises ConfigError."""
    try:
        percentiles = [float(part) for part in text.split(",")]
    except ValueError:
        percentiles = [math.nan]
    if not all(0 <= p <= 100 for p in percentiles):
        raise ConfigError(f"--metric-percentiles {text!r}: use numbers from 0 to 100, such as 50,90,99")
    return percentiles


def parse_metrics(text: str) -> list[str]:
    """Parse "ttft,itl". Raises ConfigError."""
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise ConfigError(f"--percentile-metrics: unknown metric {unknown[0]!r}; choose from {', '.join(METRICS)}")
    return names


def peak_tokens_per_second(complete: Sequence[RequestResult]) -> float:
    """Return the maximum number of output chunks in any whole second of the run."""
    if not complete:
        return 0.0
    began = min(result.start_time for result in complete)
    moments = [moment - began for result in complete for moment in chunk_times(result)]
    return float(np.bincount(np.array(moments, dtype=int)).max())


def peak_concurrency(complete: Sequence[RequestResult]) -> int:
    """Return the maximum number of concurrent requests; one that ends when another starts does not overlap with it."""
    events = [(result.start_time, 1) for result in complete]
    events += [(result.start_time + result.latency, -1) for result in complete]
    running = peak = 0
    for _, change in sorted(events):
        running += change
        peak = max(peak, running)
    return peak


def chunk_times(result: RequestResult) -> list[float]:
    """Return the arrival time of each output chunk, in seconds after the start of the run."""
    times: list[float] = (result.start_time + result.ttft + np.cumsum([0.0, *result.itl])).tolist()
    return times


def details(outcome: Outcome) -> dict[str, Any]:
    """Return per-request results for --save-detailed: vLLM's lists, in order of sending."""
    results = outcome.results
    return {
        "input_lens": [result.prompt_len for result in results],
        "output_lens": [result.output_len if result.success else 0 for result in results],
        "ttfts": [result.ttft for result in results],
        "itls": [result.itl for result in results],
        "latencies": [result.latency for result in results],
        "start_times": [result.start_time for result in results],
        "queue_times": [result.client_queue_time for result in results],
        "generated_texts": [result.text for result in results],
        "errors": [result.error for result in results],
    }
