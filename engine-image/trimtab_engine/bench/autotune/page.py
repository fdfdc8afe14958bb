"""The report as one self-contained HTML page: table, details of each trial, and SVG plots. Pure."""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from trimtab_engine.bench.autotune.limits import Limit, Limits
from trimtab_engine.bench.autotune.report import conclusion
from trimtab_engine.bench.autotune.search import Purpose, Search
from trimtab_engine.bench.autotune.space import Candidate
from trimtab_engine.bench.autotune.state import Run

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 520, 260, 60, 36, 24  # pixels
PLOTTED = (Limit("ttft", 99, math.inf), Limit("itl", 99, math.inf), Limit("e2el", 99, math.inf))
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#1b2733}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.25em .7em;border:1px solid #d3dae0;text-align:right}
td.w{text-align:left}figure{display:inline-block;margin:0 1em 1em 0}svg{background:#f7f9fa}
pre{background:#f7f9fa;padding:1em}"""


def page(search: Search, facts: dict[str, Any], runs: Sequence[Run], patch: str | None) -> str:
    """Return the page."""
    measured = [run for run in runs if run.trial.purpose in (Purpose.LOAD, Purpose.FINAL) and run.seen.refused is None]
    plots = "".join(_plot(limit, measured) for limit in _plotted(search.limits))
    sentences = "".join(f"<p>{escape(line)}</p>" for line in conclusion(search))
    patched = f"<h2>Patch</h2><pre>{escape(patch)}</pre>" if patch else ""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Autotune of "
        f"{escape(str(facts['model']))}</title><style>{STYLE}</style><h1>Autotune of "
        f"{escape(str(facts['model']))}</h1>{sentences}<p>Load: {escape(str(facts['load']))}. Limits: "
        f"{escape(str(search.limits))}. {len(runs)} runs.</p><h2>Requests per second within the "
        f"limits</h2>{_grid(search)}<h2>Latency by rate</h2>{plots}{patched}<h2>Runs</h2>{_runs(runs)}</html>\n"
    )


def _plotted(limits: Limits) -> list[Limit]:
    """Return the limited metrics, and the 99th percentiles of the others."""
    limited = {limit.metric for limit in limits.latencies}
    return [*limits.latencies, *(limit for limit in PLOTTED if limit.metric not in limited)]


def _grid(search: Search) -> str:
    """Return a table with max_num_seqs down and budgets across; greener is better."""
    most = max((verdict.value for verdict in search.verdicts.values()), default=0.0)
    head = "".join(f"<th>{budget}</th>" for budget in search.space.budgets)
    rows = "".join(
        f"<tr><th>{num_seqs}</th>"
        + "".join(_cell(search, Candidate(num_seqs, budget), most) for budget in search.space.budgets)
        + "</tr>"
        for num_seqs in search.space.num_seqs
    )
    return f"<table><tr><th>max_num_seqs \\ max_num_batched_tokens</th>{head}</tr>{rows}</table>"


def _cell(search: Search, candidate: Candidate, most: float) -> str:
    verdict = search.verdicts.get(candidate)
    if verdict is None:
        return "<td></td>"
    share = verdict.value / most if most else 0.0
    text = f"{verdict.value:.3g}" if verdict.value else verdict.outcome.value
    bold = f"<b>{text}</b>" if candidate == search.best and verdict.value else text
    return f'<td style="background:rgba(40,160,90,{0.6 * share:.2f})" title="{escape(verdict.why)}">{bold}</td>'


def _plot(limit: Limit, runs: Sequence[Run]) -> str:
    """Return a plot with a dot per trial: requests per second across, latency up (logarithmic), the limit as a line."""
    points = [(run.seen.throughput, value, run) for run in runs if (value := run.seen.figures.get(limit.figure))]
    if not points:
        return ""
    is_limited = math.isfinite(limit.milliseconds)
    heights = [value for _, value, _ in points] + ([limit.milliseconds] if is_limited else [])
    most = max(x for x, _, _ in points)
    across = _scale(0.0, most * 1.05, LEFT, WIDTH - 10)
    up = _scale(math.log(min(heights) / 1.2), math.log(max(heights) * 1.2), HEIGHT - BOTTOM, TOP)
    dots = "".join(
        f'<circle cx="{across(x):.1f}" cy="{up(math.log(y)):.1f}" r="4" fill="{_color(limit, y)}">'
        f"<title>{escape(str(run.trial.setting.candidate))}: {x:.3g} requests/s, {y:.4g} ms</title></circle>"
        for x, y, run in points
    )
    line = _limit_line(up(math.log(limit.milliseconds))) if is_limited else ""
    marks = "".join(_mark(up(math.log(y)), y) for y in (min(heights), max(heights)))
    name = f"{limit.metric.upper()} p{limit.percentile:g}"
    return (
        f'<figure><svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{name} by requests per second">'
        f'<text x="8" y="16">{name} (ms)</text>'
        f'<text x="{WIDTH - 10}" y="{HEIGHT - 10}" text-anchor="end">requests/s, up to {most:.3g}</text>'
        f"{line}{marks}{dots}</svg></figure>"
    )


def _color(limit: Limit, value: float) -> str:
    return "#c0392b" if value > limit.milliseconds else "#2a7f4f"


def _limit_line(y: float) -> str:
    return f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#c0392b" stroke-dasharray="5 4"/>'


def _mark(y: float, value: float) -> str:
    return f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" font-size="11">{value:.3g}</text>'


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _runs(runs: Sequence[Run]) -> str:
    head = "<tr><th>run</th><th>for</th><th>utilization</th><th>max_num_seqs</th><th>budget</th><th>rate</th>"
    head += "<th>requests/s</th><th>TTFT p99</th><th>ITL p99</th><th>seconds</th><th>rejected</th></tr>"
    return f"<table>{head}{''.join(_run_row(number, run) for number, run in enumerate(runs, 1))}</table>"


def _run_row(number: int, run: Run) -> str:
    setting, figures = run.trial.setting, run.seen.figures
    cells = [
        str(number), run.trial.purpose.value, f"{setting.gpu_memory_utilization:.2f}",
        str(setting.candidate.max_num_seqs), str(setting.candidate.max_num_batched_tokens),
        "all" if math.isinf(run.trial.rate) else f"{run.trial.rate:.3g}", f"{run.seen.throughput:.3g}",
        _figure(figures.get("p99_ttft_ms")), _figure(figures.get("p99_itl_ms")), f"{run.seconds:.1f}",
        run.seen.refused or "",
    ]  # fmt: skip
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
