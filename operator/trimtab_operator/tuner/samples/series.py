"""Parser from a metrics page to a sample. Pure: the caller parses the text, or queries Prometheus, and passes series by
name.

Several API servers of one engine show the same page; several ranks (label `engine`) are summed. Missing families become
None or an error that names them; impossible values are passed on and judged later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from trimtab_operator.tuner.samples.sample import Counters, Gauges, Histogram, RequestUpdates, Sample, Work

Labels = Mapping[str, str]
Series = Mapping[str, Sequence[tuple[Labels, float]]]
"""Samples by name, with labels. Each combination of name and labels is one series."""

# Names in order of preference: current names of Trimtab and vLLM, then those of older vLLM releases.
RUNNING = ("vllm:num_requests_running",)
WAITING = ("vllm:num_requests_waiting",)
KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
PREEMPTIONS = ("vllm:num_preemptions_total", "vllm:num_preemptions")
GENERATED = ("vllm:generation_tokens_total", "vllm:generation_tokens")
PROMPT = ("vllm:prompt_tokens_total", "vllm:prompt_tokens")
CACHED = ("vllm:prompt_tokens_cached_total",)
FINISHED = ("vllm:request_success_total", "vllm:request_success")
REJECTED = ("vllm:admission_rejections_total",)
TTFT = ("vllm:time_to_first_token_seconds",)
ITL = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
MEAN_ITL = ("vllm:request_time_per_output_token_seconds",)
PREEMPTED_BY_REASON = "trimtab_preempted_requests_total"
RECOMPUTED = ("trimtab_recomputed_tokens_total",)
ARRIVED = ("trimtab_arrived_requests_total",)
ARRIVED_TOKENS = ("trimtab_arrived_prompt_tokens_total",)
BLOCKED = "trimtab_blocked_seconds_total"
GENERATION = ("trimtab_config_generation",)
WAITING_TOKENS = ("trimtab_waiting_tokens",)
OLDEST = ("trimtab_oldest_waiting_seconds",)
RANKED = (RUNNING, WAITING, GENERATED, PROMPT, FINISHED, ARRIVED, ARRIVED_TOKENS)
"""Families that are compared between pages."""
DECODE_KINDS = ("decode",)
PREFILL_KINDS = ("prefill", "mixed")

USED_NAMES = frozenset(
    {
        *(RUNNING + WAITING + KV_USAGE + PREEMPTIONS + GENERATED + PROMPT + CACHED + FINISHED + REJECTED),
        *(RECOMPUTED + ARRIVED + ARRIVED_TOKENS + GENERATION + WAITING_TOKENS + OLDEST),
        *(f"{name}_{part}" for name in TTFT + ITL + MEAN_ITL for part in ("bucket", "sum", "count")),
        PREEMPTED_BY_REASON,
        BLOCKED,
        "trimtab_step_seconds_count",
        "trimtab_step_seconds_sum",
        *(f"trimtab_step_{name}_total" for name in ("tokens", "sequences", "context_tokens", "attended_tokens")),
    }
)
"""All series that are read; other series may be skipped."""


class Unreadable(ValueError):
    """A page lacks required metrics, or has an invalid number."""


def sample_of(series: Series, *, at: float, requests: RequestUpdates | None = None) -> Sample:
    """Parse one page. Raise Unreadable with the names of missing metrics."""
    needed = (RUNNING, WAITING, KV_USAGE, GENERATED)
    missing = [names[0] for names in needed if not _found(series, names)]
    if missing:
        raise Unreadable(f"the metrics page lacks {', '.join(missing)} (is --disable-log-stats set?)")
    return Sample(
        at=at,
        counters=_counters(series),
        gauges=_gauges(series),
        ttft=histogram_of(series, TTFT),
        itl=histogram_of(series, ITL),
        mean_itl=histogram_of(series, MEAN_ITL),
        requests=requests,
        ranks=_ranks(series),
    )


def _ranks(series: Series) -> frozenset[tuple[str, str]]:
    """Return the ranks of each summed counter: a sum over other ranks than before is not comparable with it."""
    return frozenset((names[0], labels.get("engine", "")) for names in RANKED for labels, _ in _found(series, names))


def _counters(series: Series) -> Counters:
    by_reason = _by_label(series.get(PREEMPTED_BY_REASON, ()), "reason")
    finished = _by_label(_found(series, FINISHED), "finished_reason")
    return Counters(
        generated_tokens=_sum(series, GENERATED) or 0.0,
        prompt_tokens=_sum(series, PROMPT) or 0.0,
        finished=math.fsum(finished.values()) if finished else 0.0,
        aborted=finished.get("abort", 0.0),
        preemptions=by_reason or {"capacity": _sum(series, PREEMPTIONS) or 0.0},
        arrived=_sum(series, ARRIVED),
        arrived_prompt_tokens=_sum(series, ARRIVED_TOKENS),
        cached_prompt_tokens=_sum(series, CACHED) or 0.0,
        recomputed_tokens=_sum(series, RECOMPUTED),
        rejected=_sum(series, REJECTED) or 0.0,
        blocked_seconds=_by_label(series.get(BLOCKED, ()), "reason"),
        decode=_work(series, DECODE_KINDS),
        prefill=_work(series, PREFILL_KINDS),
    )


def _gauges(series: Series) -> Gauges:
    usage = [value for _, value in _found(series, KV_USAGE)]
    generations = [value for _, value in _found(series, GENERATION)]
    if not all(value.is_integer() for value in generations):
        raise Unreadable(f"{GENERATION[0]} is not a whole number")
    oldest = [value for _, value in _found(series, OLDEST)]
    return Gauges(
        running=_sum(series, RUNNING) or 0.0,
        waiting=_sum(series, WAITING) or 0.0,
        kv_usage=math.nan if any(math.isnan(value) for value in usage) else max(usage),
        config_generation=int(min(generations)) if generations else None,
        waiting_tokens=_sum(series, WAITING_TOKENS),
        oldest_waiting_seconds=max(oldest) if oldest else None,
    )


def _work(series: Series, kinds: Iterable[str]) -> Work | None:
    """Return the sums over steps of these kinds; None if the engine does not export them."""
    if "trimtab_step_context_tokens_total" not in series:
        return None

    def total(name: str) -> float:
        found = _by_label(series.get(f"trimtab_step_{name}", ()), "kind")
        return math.fsum(found.get(kind, 0.0) for kind in kinds)

    return Work(
        steps=total("seconds_count"),
        tokens=total("tokens_total"),
        sequences=total("sequences_total"),
        context=total("context_tokens_total"),
        attended=total("attended_tokens_total"),
        seconds=total("seconds_sum"),
    )


def histogram_of(series: Series, names: Sequence[str]) -> Histogram | None:
    """Return the histogram of all ranks; None without one, or if ranks differ in their edges."""
    for name in names:
        buckets = series.get(f"{name}_bucket")
        if not buckets:
            continue
        counts: dict[float, float] = {}
        ranks: dict[float, int] = {}
        for labels, count in buckets:
            edge = _edge(labels)
            counts[edge] = counts.get(edge, 0.0) + count
            ranks[edge] = ranks.get(edge, 0) + 1
        edges = sorted(counts)
        if len(set(ranks.values())) > 1 or not edges or edges[-1] != math.inf:
            return None
        total = _sum(series, (f"{name}_sum",)) or 0.0
        return Histogram(tuple(edges), tuple(counts[edge] for edge in edges), total)
    return None


def _edge(labels: Labels) -> float:
    try:
        return float(labels["le"])
    except (KeyError, ValueError) as error:
        raise Unreadable(f"a histogram's bucket has no edge: {error}") from error


def _found(series: Series, names: Sequence[str]) -> Sequence[tuple[Labels, float]]:
    """Return the samples under the first of these names that the page has."""
    return next((series[name] for name in names if series.get(name)), ())


def _sum(series: Series, names: Sequence[str]) -> float | None:
    found = _found(series, names)
    return math.fsum(value for _, value in found) if found else None


def _by_label(samples: Iterable[tuple[Labels, float]], label: str) -> dict[str, float]:
    totals: dict[str, float] = {}
    for labels, value in samples:
        key = labels.get(label, "")
        totals[key] = totals.get(key, 0.0) + value
    return totals
