"""Result table as one HTML file: rows of each scenario, and a plot of GPU-hours against violated requests. No
scripts.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab_simulator.report import COLORS, META, STYLE

WIDTH, LEFT, BOTTOM, TOP, RIGHT = 960, 64, 34, 12, 170
LEGEND_LINE = 16
LEAST_HEIGHT = 300
LEAST_MISSED, MOST_MISSED = 1e-5, 1.0  # shares of the requests; the axis is logarithmic
OBJECTIVE = 0.01
MARGIN = 0.1  # of the range of hours, left free at both ends
MOST_HOURS = 2.5  # times the fixed replicas' hours; dearer policies are at the right edge
EMPHASIZED = ("trimtab", "oracle", "static-n")

Row = Mapping[str, Any]


def table_page(text: str, rows: Sequence[Row]) -> str:
    """Return the whole page, from the table's Markdown and its rows."""
    by_title: dict[str, list[Row]] = {}
    for row in rows:
        by_title.setdefault(f"{row['scenario']}, cold start {row['cold_start']:g} s", []).append(row)
    parts = ["<h1>Scaling policies on real traces</h1>", f"<p>{INTRODUCTION}</p>"]
    for block in text.split("### ")[1:]:
        title, *lines = block.strip().splitlines()
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        parts += [f"<h2>{html.escape(title)}</h2>", _plot(by_title.get(title, [])), _table(cells[0], cells[2:])]
    head = f"{META}<title>Scaling policies on real traces</title><style>{STYLE}</style>"
    body = "\n".join(parts)
    return f'<!doctype html><html lang="en">{head}{body}</html>\n'


INTRODUCTION = (
    "Each point is one replay: GPU-hours to the right, the share of requests that violated an objective upwards. Below "
    "the line the objective of 99 % is attained. All policies start with the same replicas and token budget. The "
    "tables have means over seeds, with their spread; a policy that was not run is marked. Baselines with a target "
    "have the best one in hindsight, or with @other the best one of another trace."
)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        mark = ' class="met"' if cells[0] == EMPHASIZED[0] else ""
        return f"<tr{mark}>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _plot(rows: Sequence[Row]) -> str:
    hours: list[float] = [value for row in rows for value in row.get("hours", ())]
    if not hours:
        return ""
    fixed = [value for row in rows if row["policy"] == "static-n" for value in row.get("hours", ())]
    most = min(max(hours), MOST_HOURS * max(fixed, default=math.inf))
    spread = max(most - min(hours), 0.1 * most, 1e-6)
    low, high = max(0.0, min(hours) - MARGIN * spread), most + MARGIN * spread
    height = max(LEAST_HEIGHT, TOP + BOTTOM + LEGEND_LINE * len(rows))

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (min(value, high) - low) / (high - low)

    def y(missed: float) -> float:
        share = math.log(max(LEAST_MISSED, missed) / LEAST_MISSED) / math.log(MOST_MISSED / LEAST_MISSED)
        return height - BOTTOM - (height - TOP - BOTTOM) * share

    drawn = []
    for missed in (1e-4, 1e-3, OBJECTIVE, 1e-1, 1.0):
        kind = f'style="stroke:{COLORS[6]}"' if missed == OBJECTIVE else 'class="rule"'
        drawn.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(missed):.1f}" y2="{y(missed):.1f}" {kind}/>'
            f'<text x="{LEFT - 6}" y="{y(missed) + 4:.1f}" text-anchor="end">{100 * missed:g} %</text>'
        )
    for step in range(5):
        value = low + (high - low) * step / 4
        drawn.append(f'<text x="{x(value):.1f}" y="{height - 12}" text-anchor="middle">{value:.2f} h</text>')
    for index, row in enumerate(rows):
        name = html.escape(row["policy"])
        style = f"fill:{COLORS[index % len(COLORS)]}"
        weight = ";font-weight:700" if row["policy"] in EMPHASIZED else ""
        at = TOP + LEGEND_LINE * (index + 1)
        drawn.append(_mark(WIDTH - RIGHT + 16, at - 4, index, style, ""))
        label = name if row["seeds"] else f"{name} (not run)"
        drawn.append(f'<text x="{WIDTH - RIGHT + 26}" y="{at}" style="{style}{weight}">{label}</text>')
        for seed, value, share in zip(row["seeds"], row.get("hours", ()), row.get("attained", ()), strict=True):
            title = f"<title>{name}, seed {seed}: {value:.2f} h, {100 * share:.2f} %</title>"
            drawn.append(_mark(x(value), y(1 - share), index, style, title))
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="GPU-hours and violations">{"".join(drawn)}</svg>'
    )


def _mark(x: float, y: float, index: int, style: str, title: str) -> str:
    """Return a point: the colors repeat with another shape."""
    match index // len(COLORS):
        case 0:
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" style="{style}">{title}</circle>'
        case 1:
            return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" style="{style}">{title}</rect>'
        case _:
            return f'<path d="M{x:.1f},{y - 6:.1f}l5,9h-10z" style="{style}">{title}</path>'
