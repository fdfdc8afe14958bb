"""Figures beside their bars: what is measured of a replay, and the table of all."""

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
    told: dict[str, float] = field(default_factory=dict)
    """What it is made of."""

    @property
    def is_met(self) -> bool:
        """Whether it is within the bar."""
        return self.value >= self.bar if self.higher_is_better else self.value <= self.bar


def turns_of(row: str, name: str, seed: int, changes: Sequence[Change]) -> Figure:
    """The most turns of a hot knob within 10 minutes."""
    found = {
        parameter: count for parameter, count in reversals(changes).items() if parameter in {k.value for k in Parameter}
    }
    most = max(found.values(), default=0)
    return Figure(row, name, seed, "turns of a knob in 10 min", most, 1, False, {k: float(v) for k, v in found.items()})


def good_tokens(served: Sequence[Served], objectives: Objectives, since: float, until: float) -> float:
    """Tokens a second of answers whose requests came in that time and met the objectives."""
    found = [s for s in served if since <= s.arrival < until and objectives.met_by(s)]
    return sum(s.num_output for s in found) / (until - since)


def first_token(served: Sequence[Served], since: float) -> float:
    """The median time to the first token of what came since then."""
    return percentile(sorted(s.ttft for s in served if s.arrival >= since and s.ttft is not None), 50) or 0.0


def markdown(figures: Sequence[Figure]) -> str:
    """One line a measure: the mean over seeds, the worst, and in how many seeds the bar was met."""
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
