"""Figures with their limits, and the table of all figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean

from trimtab_operator.tuner.engine_model import Sequence as Served
from trimtab_operator.tuner.parameters import Parameter
from trimtab_simulator.objectives import Objectives
from trimtab_simulator.replay import Change
from trimtab_simulator.scores import percentile, reversals


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement of one row."""

    row: str
    load: str
    seed: int
    measure: str
    value: float
    bar: float
    higher_is_better: bool = True
    details: dict[str, float] = field(default_factory=dict)
    """Values that it is computed from."""

    @property
    def is_met(self) -> bool:
        """True if it is within the limit."""
        return self.value >= self.bar if self.higher_is_better else self.value <= self.bar


def reversals_figure(row: str, name: str, seed: int, changes: Sequence[Change]) -> Figure:
    """Return the maximum number of direction changes of a live parameter within 10 minutes."""
    found = {
        parameter: count for parameter, count in reversals(changes).items() if parameter in {k.value for k in Parameter}
    }
    most = max(found.values(), default=0)
    return Figure(
        row,
        name,
        seed,
        "direction changes of a parameter in 10 min",
        most,
        1,
        False,
        {k: float(v) for k, v in found.items()},
    )


def good_tokens(served: Sequence[Served], objectives: Objectives, since: float, until: float) -> float:
    """Return output tokens a second of requests that arrived in that time and attained the objectives."""
    found = [s for s in served if since <= s.arrival < until and objectives.met_by(s)]
    return sum(s.num_output for s in found) / (until - since)


def first_token(served: Sequence[Served], since: float) -> float:
    """Return the median time to first token of requests that arrived since then."""
    return percentile(sorted(s.ttft for s in served if s.arrival >= since and s.ttft is not None), 50) or 0.0


def markdown(figures: Sequence[Figure]) -> str:
    """Return one line per measure: mean and worst over seeds, and the number of seeds within the limit."""
    lines = ["| row | load | measure | mean | worst | bar | met |", "|---|---|---|---|---|---|---|"]
    by_line: dict[tuple[str, str, str], list[Figure]] = {}
    for figure in figures:
        by_line.setdefault((figure.row, figure.load, figure.measure), []).append(figure)
    for (row, load, measure), its in by_line.items():
        values = [figure.value for figure in its]
        worst = min(values) if its[0].higher_is_better else max(values)
        sign = "≥" if its[0].higher_is_better else "≤"
        met = f"{sum(figure.is_met for figure in its)} of {len(its)}"
        lines.append(
            f"| {row} | {load} | {measure} | {mean(values):.3g} | {worst:.3g} | {sign} {its[0].bar:g} | {met} |"
        )
    return "\n".join(lines)
