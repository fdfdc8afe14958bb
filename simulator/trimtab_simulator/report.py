"""HTML report of an experiment: figures, load, replicas and parameters over time, decisions. No scripts."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from trimtab_simulator.experiment import Experiment
from trimtab_simulator.results import Result, to_json

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 960, 170, 56, 26, 22
MAX_POINTS = 1500
META = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'

_LIGHT = ("#0b6e99", "#d9730d", "#0f7b6c", "#ad1a72", "#6940a5", "#a67c00", "#d03030", "#64473a", "#37352f", "#777674")
_DARK = ("#5db8e3", "#ffa344", "#4dd0b9", "#f075bd", "#b697f0", "#f2ca4c", "#ff7b7b", "#c9a18c", "#e6e4df", "#a5a4a2")
COLORS = tuple(f"var(--line{index})" for index in range(len(_LIGHT)))
"""Colors of lines, with a light and a dark variant in STYLE."""


def _variables(text: str, back: str, rule: str, marked: str, lines: Sequence[str]) -> str:
    named = "".join(f"--line{index}:{color};" for index, color in enumerate(lines))
    return f":root{{--text:{text};--back:{back};--rule:{rule};--marked:{marked};{named}}}"


STYLE = f"""
{_variables("#222", "#fff", "#ddd", "#eef7ee", _LIGHT)}
@media (prefers-color-scheme:dark){{{_variables("#e3e3e3", "#161616", "#3a3a3a", "#1c2f1f", _DARK)}}}
:root{{color-scheme:light dark}}
body{{font:15px/1.5 system-ui,sans-serif;max-width:1020px;margin:2em auto;padding:0 1em;color:var(--text);
background:var(--back)}}
table{{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}}
td,th{{padding:3px 9px;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}}
td:first-child,th:first-child{{text-align:left}} tr.met td{{background:var(--marked)}}
svg{{display:block;margin:.6em 0;max-width:100%}} svg .rule{{stroke:var(--rule)}}
text{{font:11px system-ui,sans-serif;fill:var(--text)}} h2{{margin-top:1.6em}}
"""

COLUMNS = (
    ("policy", "policy", str),
    ("gpu_hours", "GPU-hours", lambda v: f"{v:.2f}"),
    ("attainment", "attainment", lambda v: f"{100 * v:.2f} %"),
    ("goodput_tokens_per_s", "goodput, tokens/s", lambda v: f"{v:,.0f}"),
    ("ttft_p50", "TTFT p50", lambda v: f"{v:.2f} s"),
    ("ttft_p95", "TTFT p95", lambda v: f"{v:.2f} s"),
    ("itl_p95", "mean ITL p95", lambda v: f"{1000 * v:.1f} ms"),
    ("itl_token_p99", "token ITL p99", lambda v: f"{1000 * v:.0f} ms"),
    ("preempted_token_share", "recomputed", lambda v: f"{100 * v:.2f} %"),
    ("decisions", "decisions", str),
    ("max_replicas", "most replicas", str),
    ("target", "target", lambda v: f"{v:g}"),
)


def html_report(experiment: Experiment, results: Sequence[Result]) -> str:
    """Return the whole page."""
    data = to_json(experiment, results)
    parts = [
        f"<h1>{html.escape(str(data['trace']['name']))}</h1>",
        f"<p>{_summary(data)}</p>",
        "<h2>Figures</h2>",
        _table(data),
        "<h2>Arriving requests per second</h2>",
        _plot([("arrivals", _rates(experiment))], experiment.trace.seconds),
        "<h2>Billed replicas</h2>",
        _plot(
            [(r.entry.label, [(m.at, float(m.paid)) for m in r.outcome.timeline]) for r in results],
            experiment.trace.seconds,
        ),
        "<h2>Waiting requests</h2>",
        _plot(
            [(r.entry.label, [(m.at, float(m.waiting)) for m in r.outcome.timeline]) for r in results],
            experiment.trace.seconds,
        ),
        *_parameter_plots(results, experiment.trace.seconds),
        *_changes(results),
    ]
    body = "\n".join(parts)
    head = f"{META}<title>trimtab simulate</title><style>{STYLE}</style>"
    return f'<!doctype html><html lang="en">{head}{body}</html>\n'


def _summary(data: dict[str, Any]) -> str:
    trace, targets, fleet = data["trace"], data["objectives"], data["fleet"]
    parts = []
    if targets["ttft"] is not None:
        more = (
            f" + prompt × {1e6 * targets['ttft_per_prompt_token']:.0f} µs" if targets["ttft_per_prompt_token"] else ""
        )
        parts.append(f"TTFT {targets['ttft']:g} s{more}")
    if targets["itl_mean"] is not None:
        parts.append(f"mean ITL {1000 * targets['itl_mean']:g} ms")
    if targets["itl_token"] is not None:
        parts.append(f"token ITL {1000 * targets['itl_token']:g} ms")
    return html.escape(
        f"{trace['requests']:,} requests in {trace['seconds']:,.0f} s, {trace['prompt_tokens_mean']:,.0f} prompt and "
        f"{trace['output_tokens_mean']:,.0f} output tokens on average; {fleet['model']} on {fleet['gpu']}, "
        f"{fleet['min_replicas']} to {fleet['max_replicas']} replicas from {fleet['start_replicas']}, cold start "
        f"{fleet['cold_start_seconds']:g} s, router {fleet['router']}. Objectives: {', '.join(parts) or 'none'}, for "
        f"{100 * targets['attain']:g} % of requests."
    )


def _table(data: dict[str, Any]) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for _, title, _ in COLUMNS)
    rows = []
    for policy in data["policies"]:
        cells = "".join(
            f"<td>{'–' if policy.get(name) is None else html.escape(shown(policy[name]))}</td>"
            for name, _, shown in COLUMNS
        )
        mark = ' class="met"' if policy["attainment"] >= data["objectives"]["attain"] else ""
        rows.append(f"<tr{mark}>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


Line = tuple[str, list[tuple[float, float]]]


def _plot(lines: Sequence[Line], seconds: float) -> str:
    """Return step lines over time."""
    highest = max((value for _, points in lines for _, value in points), default=0.0)
    top = _round_up(highest)
    width, height = WIDTH - LEFT - 8, HEIGHT - TOP - BOTTOM

    def x(at: float) -> float:
        return LEFT + width * at / max(seconds, 1e-9)

    def y(value: float) -> float:
        return TOP + height * (1 - value / top)

    drawn = []
    for share in (0.0, 0.5, 1.0):
        drawn.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{y(share * top):.1f}" y2="{y(share * top):.1f}" class="rule"/>'
            f'<text x="{LEFT - 6}" y="{y(share * top) + 4:.1f}" text-anchor="end">{share * top:g}</text>'
        )
    for index in range(7):
        at = seconds * index / 6
        drawn.append(f'<text x="{x(at):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{at / 60:.0f} min</text>')
    for index, (name, points) in enumerate(lines):
        color = COLORS[index % len(COLORS)]
        kept = points[:: max(1, math.ceil(len(points) / MAX_POINTS))]
        path = " ".join(
            f"{'M' if i == 0 else 'L'}{x(at):.1f},{y(value):.1f}" for i, (at, value) in enumerate(_steps(kept))
        )
        drawn.append(f'<path d="{path}" fill="none" style="stroke:{color}" stroke-width="1.6"/>')
        drawn.append(f'<text x="{LEFT + 130 * (index % 7)}" y="{12}" style="fill:{color}">{html.escape(name)}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(drawn)}</svg>'


def _steps(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return points in which each value holds until the next one."""
    found: list[tuple[float, float]] = []
    for at, value in points:
        if found:
            found.append((at, found[-1][1]))
        found.append((at, value))
    return found


def _round_up(value: float) -> float:
    if value <= 0:
        return 1.0
    scale = 10 ** math.floor(math.log10(value))
    return float(next(step * scale for step in (1, 2, 5, 10) if step * scale >= value))


def _rates(experiment: Experiment, windows: int = 240) -> list[tuple[float, float]]:
    width = experiment.trace.seconds / windows
    counts = [0] * windows
    for arrival in experiment.trace.arrivals:
        counts[min(windows - 1, int(arrival.at / width))] += 1
    return [(index * width, count / width) for index, count in enumerate(counts)]


def _parameter_plots(results: Sequence[Result], seconds: float) -> list[str]:
    """Return a plot for each parameter that was changed."""
    moved = sorted({change.target for r in results for change in r.outcome.changes} - {"replicas"})
    plots = []
    for parameter in moved:
        lines = [
            (
                r.entry.label,
                [(m.at, float(m.parameters[parameter])) for m in r.outcome.timeline if parameter in m.parameters],
            )
            for r in results
            if any(change.target == parameter for change in r.outcome.changes)
        ]
        plots.append(f"<h2>{html.escape(parameter)}</h2>{_plot(lines, seconds)}")
    return plots


def _changes(results: Sequence[Result]) -> list[str]:
    """Return each policy's changes with their reasons, if it gives any."""
    found = []
    for result in results:
        explained = [change for change in result.outcome.changes if change.why]
        if explained:
            rows = "".join(
                f"<tr><td>{change.at / 60:.1f} min</td><td>{html.escape(change.target)}</td><td>{change.before:g} → "
                f'{change.after:g}</td><td style="text-align:left">{html.escape(change.why)}</td></tr>'
                for change in explained
            )
            found.append(
                f"<details><summary>{html.escape(result.entry.label)}: {len(explained)} decisions</summary>"
                f"<table>{rows}</table></details>"
            )
    return ["<h2>Decisions</h2>", *found] if found else []
