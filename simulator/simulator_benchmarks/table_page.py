"""Result table as one HTML file: rows of each scenario, and a plot of GPU-hours against violated requests. No
scripts.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab_simulator.report import COLORS, STYLE

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 960, 300, 64, 34, 12, 170
LEAST_MISSED, MOST_MISSED = 1e-5, 1.0  # shares of the requests; the axis is logarithmic
OBJECTIVE = 0.01
MARGIN = 0.1  # of the range of hours, left free at both ends

Fields = Mapping[tuple[str, float], Mapping[str, Sequence[int]]]
Cells = Mapping[tuple[str, int, float, str], Mapping[str, Any]]


def table_page(text: str, cells: Cells, fields: Fields) -> str:
    """Return the whole page, from the table's Markdown and its cells."""
    plots = {
        f"{scenario}, cold start {cold_start:g} s": _plot(
            {
                policy: [cells[key] for seed in seeds if (key := (scenario, seed, cold_start, policy)) in cells]
                for policy, seeds in policies.items()
            }
        )
        for (scenario, cold_start), policies in fields.items()
    }
    parts = ["<h1>Policies on real traces</h1>", f"<p>{INTRODUCTION}</p>"]
    for block in text.split("### ")[1:]:
        title, *lines = block.strip().splitlines()
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
        parts += [f"<h2>{html.escape(title)}</h2>", plots.get(title, ""), _table(rows[0], rows[2:])]
    head = f'<meta charset="utf-8"><title>Policies on real traces</title><style>{STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html><html lang="en">{head}{body}</html>\n'


INTRODUCTION = (
    "Each point is one replay: GPU-hours to the right, the share of requests that violated an objective upwards. Below "
    "the line the objective of 99 % is attained. The tables have means over seeds, with their spread; a row that was "
    "not run is marked. Baselines have the best target in hindsight."
)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _plot(by_policy: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    hours: list[float] = [cell["gpu_hours"] for its in by_policy.values() for cell in its]
    if not hours:
        return ""
    spread = max(max(hours) - min(hours), 0.1 * max(hours), 1e-6)
    low, high = min(hours) - MARGIN * spread, max(hours) + MARGIN * spread

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low)

    def y(missed: float) -> float:
        share = math.log(max(LEAST_MISSED, missed) / LEAST_MISSED) / math.log(MOST_MISSED / LEAST_MISSED)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    drawn = []
    for missed in (1e-4, 1e-3, OBJECTIVE, 1e-1, 1.0):
        color = "#e03e3e" if missed == OBJECTIVE else "#ddd"
        drawn.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(missed):.1f}" y2="{y(missed):.1f}" stroke="{color}"/>'
            f'<text x="{LEFT - 6}" y="{y(missed) + 4:.1f}" text-anchor="end">{100 * missed:g} %</text>'
        )
    for step in range(5):
        value = low + (high - low) * step / 4
        drawn.append(f'<text x="{x(value):.1f}" y="{HEIGHT - 12}" text-anchor="middle">{value:.2f} h</text>')
    for index, (policy, its) in enumerate(by_policy.items()):
        color = COLORS[index % len(COLORS)]
        drawn.append(
            f'<text x="{WIDTH - RIGHT + 24}" y="{TOP + 16 * (index + 1)}" style="fill:{color}">'
            f"{html.escape(policy)}{'' if its else ' (not run)'}</text>"
        )
        drawn += [
            f'<circle cx="{x(cell["gpu_hours"]):.1f}" cy="{y(1 - cell["attainment"]):.1f}" r="5" fill="{color}" '
            f'fill-opacity="0.75"><title>{html.escape(policy)}, seed {cell["seed"]}: {cell["gpu_hours"]:.2f} h, '
            f"{100 * cell['attainment']:.2f} %</title></circle>"
            for cell in its
        ]
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(drawn)}</svg>'
