"""Score of a replay: the figures of a result table, in seconds and tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from trimtab_simulator.objectives import Objectives
from trimtab_simulator.replay import REPLICAS, Change, SimulationResult

REVERSAL_WINDOW_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Score:
    """One policy on one trace.

    `attainment` is the share of requests whose own TTFT and ITL were within the targets; requests that no replica can
    hold or that were never answered count as violations. `itl_*` are percentiles over requests of their mean gap
    between tokens, `itl_token_*` over all gaps. `goodput_tokens_per_s` are output tokens of requests that attained
    their targets, per second until the last request finished. Percentiles are None without values.
    """

    policy: str
    gpu_hours: float
    requests: int
    met: int
    attainment: float
    goodput_tokens_per_s: float
    ttft_mean: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p95: float | None
    itl_p99: float | None
    preempted_token_share: float
    decisions: int
    reversals_per_knob_per_10min: dict[str, int]
    """Maximum number of direction changes within 10 minutes, by parameter and for `replicas`."""
    max_replicas: int
    itl_token_p50: float | None = None
    itl_token_p95: float | None = None
    itl_token_p99: float | None = None
    throughput_tokens_per_s: float = 0.0
    preemptions: int = 0
    prefix_hit_share: float = 0.0
    """Share of all prompt tokens in the prefix cache."""
    parameters: dict[str, float] = field(default_factory=dict)
    """Values at the end, by parameter."""

    def to_json(self) -> dict[str, object]:
        """Return the score as in `trimtab simulate -o json`."""
        return asdict(self)


def score(policy: str, outcome: SimulationResult, objectives: Objectives) -> Score:
    """Return the score of one replay."""
    served = outcome.served
    requests = len(served) + outcome.rejected
    met = [s for s in served if objectives.met_by(s)]
    ttfts = sorted(s.ttft for s in served if s.ttft is not None)
    gaps = sorted(gap for s in served if (gap := s.mean_gap) is not None)
    seconds = max(outcome.seconds, outcome.ended_at)
    return Score(
        policy=policy,
        gpu_hours=outcome.gpu_seconds / 3600,
        requests=requests,
        met=len(met),
        attainment=len(met) / requests if requests else 1.0,
        goodput_tokens_per_s=sum(s.num_output for s in met) / seconds if seconds else 0.0,
        ttft_mean=sum(ttfts) / len(ttfts) if ttfts else None,
        ttft_p50=percentile(ttfts, 50),
        ttft_p95=percentile(ttfts, 95),
        ttft_p99=percentile(ttfts, 99),
        itl_p50=percentile(gaps, 50),
        itl_p95=percentile(gaps, 95),
        itl_p99=percentile(gaps, 99),
        preempted_token_share=outcome.recomputed_tokens / outcome.computed_tokens if outcome.computed_tokens else 0.0,
        decisions=len(outcome.changes),
        reversals_per_knob_per_10min=reversals(outcome.changes),
        max_replicas=outcome.most_replicas,
        itl_token_p50=outcome.gaps.percentile(50),
        itl_token_p95=outcome.gaps.percentile(95),
        itl_token_p99=outcome.gaps.percentile(99),
        throughput_tokens_per_s=sum(s.num_output for s in served) / seconds if seconds else 0.0,
        preemptions=outcome.preemptions,
        prefix_hit_share=outcome.cached_tokens / outcome.prompt_tokens if outcome.prompt_tokens else 0.0,
        parameters={name: float(value) for name, value in outcome.final_parameters.items()},
    )


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the percentile of these sorted values, interpolated linearly."""
    if not values:
        return None
    position = (len(values) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


def reversals(changes: Sequence[Change]) -> dict[str, int]:
    """Return, per target, the maximum number of direction changes within REVERSAL_WINDOW_SECONDS."""
    by_target: dict[str, list[Change]] = defaultdict(list)
    for change in changes:
        by_target[change.target].append(change)
    by_target.setdefault(REPLICAS, [])
    return {target: _most_within(_direction_changes(its)) for target, its in sorted(by_target.items())}


def _direction_changes(changes: Sequence[Change]) -> list[float]:
    """Return the times of direction changes."""
    turns = []
    was_up: bool | None = None
    for change in changes:
        is_up = change.after > change.before
        if was_up is not None and is_up != was_up:
            turns.append(change.at)
        was_up = is_up
    return turns


def _most_within(times: Sequence[float]) -> int:
    most, first = 0, 0
    for index, at in enumerate(times):
        while at - times[first] >= REVERSAL_WINDOW_SECONDS:
            first += 1
        most = max(most, index - first + 1)
    return most
