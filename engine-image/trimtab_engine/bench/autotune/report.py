"""Results of a search: progress lines, a table, and a JSON object. Pure."""

import math
from collections.abc import Sequence
from typing import Any

from trimtab_engine.bench.autotune.limits import Limits
from trimtab_engine.bench.autotune.search import CandidateResult, Outcome, Purpose, Search
from trimtab_engine.bench.autotune.space import Candidate, Setting, Space
from trimtab_engine.bench.autotune.state import Run, run_as_json

HEADER = "   seqs   budget      rate  requests/s  TTFT p99   ITL p99  E2EL p99  verdict"
SHOWN = ("p99_ttft_ms", "p99_itl_ms", "p99_e2el_ms")
BISECTIONS = 6  # of the request rate, with limits
DOING = {
    Purpose.MEMORY: "memory",
    Purpose.SINGLE_REQUEST: "one request at a time",
    Purpose.LOAD: "load",
    Purpose.FINAL: "final profile",
}


def estimate_num_runs(space: Space, limits: Limits) -> int:
    """Estimate the number of trials: a climb visits some candidates of each axis, and bisects few of them."""
    axes = len(space.num_seqs) + len(space.budgets)
    met = min(len(space.candidates()), axes + 3)
    return 1 + 1 + met + (2 * BISECTIONS if limits.latencies or limits.min_cache_hit else 0) + 1


def progress_line(run: Run, limits: Limits, *, done: int, likely: int, elapsed: float, per_run: float) -> str:
    """Return the progress line of one run, with the estimated remaining time."""
    left = max(likely - done, 1) * per_run
    head = f"[{done}/~{max(likely, done + 1)}, {_duration(elapsed)}, about {_duration(left)} left]"
    setting = run.trial.setting
    what = f"{DOING[run.trial.purpose]}: gpu_memory_utilization {setting.gpu_memory_utilization:.2f}"
    rate = "" if run.trial.purpose in (Purpose.MEMORY, Purpose.SINGLE_REQUEST) else f", {_rate(run.trial.rate)}"
    return f"{head} {what}, {setting.candidate}{rate}: {_seen_words(run, limits)}"


def _seen_words(run: Run, limits: Limits) -> str:
    if run.seen.refused is not None:
        return f"rejected: {run.seen.refused}"
    violations = "; ".join(limits.violations(run.seen.figures)) if run.trial.purpose is not Purpose.MEMORY else ""
    ttft, itl = (_milliseconds(run.seen.figures.get(name)) for name in SHOWN[:2])
    words = f"{run.seen.throughput:.3g} requests/s, TTFT p99 {ttft}, ITL p99 {itl} ms"
    return f"{words}; violated: {violations}" if violations else words


def table(search: Search, facts: dict[str, Any], runs: Sequence[Run]) -> str:
    """Return all results, and the reasons why candidates were not tried."""
    duration = _duration(sum(run.seconds for run in runs))
    lines = [
        f"Autotune of {facts['model']}: {len(runs)} runs, {duration} of measurements",
        f"load: {facts['load']}",
        f"limits: {search.limits}",
        _memory_line(search),
        "",
        HEADER,
    ]
    for candidate, verdict in sorted(search.verdicts.items()):
        lines.append(_row(candidate, verdict) + ("  <- best" if candidate == search.best and verdict.value else ""))
    return "\n".join([*lines, "", *conclusion(search)])


def _memory_line(search: Search) -> str:
    refused = "; ".join(f"{hundredths / 100:.2f}: {why}" for hundredths, why in sorted(search.refused.items()))
    found = "no value works" if search.utilization is None else f"{search.utilization:.2f} is the largest working value"
    return f"gpu_memory_utilization: {found}" + (f" ({refused})" if refused else "")


def _row(candidate: Candidate, verdict: CandidateResult) -> str:
    seen = " ".join(f"{_milliseconds(verdict.figures.get(name)):>9}" for name in SHOWN)
    rate = "all" if math.isinf(verdict.rate) else f"{verdict.rate:.3g}" if verdict.rate else "-"
    value = f"{verdict.value:.3g}" if verdict.value else "-"
    why = "" if verdict.outcome is Outcome.HOLDS else f": {verdict.why}"
    return (
        f"{candidate.max_num_seqs:>7} {candidate.max_num_batched_tokens:>8} {rate:>9} {value:>11} {seen}  "
        f"{verdict.outcome.value}{why}"
    )


def conclusion(search: Search) -> list[str]:
    """Return the best candidate and its final run, or the closest one if no candidate meets the limits."""
    if search.utilization is None:
        return ["No gpu_memory_utilization in the range serves the load; lower --min-utilization, or free memory."]
    if search.best is None:
        return ["No candidate was measured."]
    best = search.verdicts[search.best]
    if not best.value:
        return [f"No candidate meets the limits. The closest is {search.best}: {best.why}"]
    head = f"Best: gpu_memory_utilization {search.utilization:.2f}, {search.best}"
    lines = [f"{head}: {best.value:.3g} requests/s ({_rate(best.rate)})"]
    if search.final is None:
        return [*lines, "Not confirmed: there was no final run."]
    figures = search.final.figures
    shown = ", ".join(
        f"{name} p99 {_milliseconds(figures.get(key))} ms"
        for name, key in zip(("TTFT", "ITL", "E2EL"), SHOWN, strict=True)
    )
    throughput = figures.get("request_throughput") or 0.0
    tokens = figures.get("output_throughput") or 0.0
    lines.append(
        f"Final run, {_rate(search.final.rate)}: {throughput:.3g} requests/s, {tokens:.3g} tokens/s out, {shown}"
    )
    if search.final.outcome is not Outcome.HOLDS:
        lines.append(f"Not confirmed: {search.final.why}. Use more --num-prompts, or wider limits.")
    return lines


def found(search: Search) -> Setting | None:
    """Return the values of the patch, only if a final run confirmed them."""
    if search.best is None or search.utilization is None or search.final is None:
        return None
    return Setting(search.best, search.utilization) if search.final.outcome is Outcome.HOLDS else None


def as_json(search: Search, facts: dict[str, Any], runs: Sequence[Run]) -> dict[str, Any]:
    """Return the results as JSON; infinite rates are "inf"."""
    setting = found(search)
    return {
        **facts,
        "limits": [str(limit) for limit in search.limits.latencies],
        "min_cache_hit": search.limits.min_cache_hit,
        "found": None if setting is None else setting.values,
        "conclusion": conclusion(search),
        "refused_utilizations": {f"{at / 100:.2f}": why for at, why in search.refused.items()},
        "candidates": [_candidate(candidate, verdict) for candidate, verdict in sorted(search.verdicts.items())],
        "final": None if search.final is None else _verdict(search.final),
        "runs": [run_as_json(run) for run in runs],
    }


def _candidate(candidate: Candidate, verdict: CandidateResult) -> dict[str, Any]:
    num_seqs, budget = candidate.max_num_seqs, candidate.max_num_batched_tokens
    return {"max_num_seqs": num_seqs, "max_num_batched_tokens": budget, **_verdict(verdict)}


def _verdict(verdict: CandidateResult) -> dict[str, Any]:
    return {
        "outcome": verdict.outcome.value,
        "why": verdict.why,
        "request_rate": "inf" if math.isinf(verdict.rate) else verdict.rate,
        "requests_per_second": verdict.value,
        "figures": dict(verdict.figures),
    }


def _rate(rate: float) -> str:
    return "all at once" if math.isinf(rate) else f"{rate:.3g} requests/s requested"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
