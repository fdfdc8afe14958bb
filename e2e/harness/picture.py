"""A chart of the demo: KV usage, preemptions and the operator's decisions over time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from harness.engine import EngineReading

USED, CAPACITY, PREEMPTED, RUNNING, DECIDED = "#4c78a8", "#1b3a57", "#d1495b", "#e9a23b", "#2e8b57"
ROOM_FOR_TEXT = 1.35  # axis limit as a multiple of the highest value
SIZE_INCHES = (10.0, 4.6)


@dataclass(frozen=True, slots=True)
class Moment:
    """One reading of the engine; `at` in seconds since the epoch."""

    at: float
    kv_used_tokens: float
    kv_tokens: int
    preemptions: float
    running: float
    waiting: float


@dataclass(frozen=True, slots=True)
class Move:
    """A decision of the operator: when, and what it changed."""

    at: float
    text: str


@dataclass(slots=True)
class Trace:
    """The readings and decisions of one scene, in order."""

    title: str
    moments: list[Moment] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)

    def see(self, reading: EngineReading, *, at: float) -> None:
        used = reading.kv_usage * reading.kv_tokens
        self.moments.append(Moment(at, used, reading.kv_tokens, reading.preemptions, reading.running, reading.waiting))


def write(traces: Sequence[Trace], caption: str, path: Path) -> None:
    """Draw the scenes side by side into an SVG file, and write the data to a JSON file with the same stem."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Text stays text, so that the file is small and searchable; equal figures give equal bytes.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "trimtab", "font.size": 9.0}):
        draw(traces, caption).savefig(path, format="svg", metadata={"Date": None})
    figures = {"caption": caption, "scenes": [asdict(trace) for trace in traces]}
    path.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")


def read(path: Path) -> tuple[list[Trace], str]:
    """Return the data that `write` stored with a picture, and its caption."""
    figures = json.loads(path.read_text())
    traces = [
        Trace(
            scene["title"],
            [Moment(**moment) for moment in scene["moments"]],
            [Move(**move) for move in scene["moves"]],
        )
        for scene in figures["scenes"]
    ]
    return traces, figures["caption"]


def draw(traces: Sequence[Trace], caption: str) -> Figure:
    """One column for each scene: KV tokens above, preemptions and running requests below."""
    figure = Figure(figsize=SIZE_INCHES, layout="constrained", facecolor="white")
    figure.suptitle(caption, fontsize=9.0, color="#555555")
    grid = figure.subplots(2, len(traces), sharex="col", sharey="row", squeeze=False, height_ratios=[3, 2])
    for column, trace in enumerate(traces):
        upper, lower = grid[0][column], grid[1][column]
        _kv(upper, trace)
        _requests(lower, trace)
        _moves(upper, lower, trace)
        upper.set_title(trace.title, fontsize=10.0, fontweight="bold")
        lower.set_xlabel("seconds under load")
    most = max(moment.kv_tokens for trace in traces for moment in trace.moments)
    grid[0][0].set_ylim(0.0, ROOM_FOR_TEXT * most)
    grid[0][0].set_ylabel("KV cache, tokens")
    grid[1][0].set_ylabel("count")
    figure.legend(
        handles=[*grid[0][0].get_legend_handles_labels()[0], *grid[1][0].get_legend_handles_labels()[0]],
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    return figure


def _times(trace: Trace) -> list[float]:
    return [moment.at - trace.moments[0].at for moment in trace.moments]


def _kv(axes: Axes, trace: Trace) -> None:
    times = _times(trace)
    axes.fill_between(
        times, [m.kv_used_tokens for m in trace.moments], color=USED, alpha=0.35, label="KV tokens in use"
    )
    axes.step(times, [m.kv_tokens for m in trace.moments], where="post", color=CAPACITY, label="KV tokens allocated")
    axes.margins(x=0.0)


def _requests(axes: Axes, trace: Trace) -> None:
    times = _times(trace)
    first = trace.moments[0].preemptions
    axes.step(times, [m.running for m in trace.moments], where="post", color=RUNNING, label="requests running")
    preempted = [m.preemptions - first for m in trace.moments]
    axes.step(times, preempted, where="post", color=PREEMPTED, linewidth=2.0, label="preempted so far")
    axes.set_ylim(bottom=0.0)
    axes.margins(x=0.0, y=0.1)


def _moves(upper: Axes, lower: Axes, trace: Trace) -> None:
    """Mark each decision with a labelled line in both charts. Later labels are placed lower, so that none overlap."""
    for number, move in enumerate(trace.moves):
        at = move.at - trace.moments[0].at
        for axes in (upper, lower):
            axes.axvline(at, color=DECIDED, linestyle="--", linewidth=1.0)
        upper.annotate(
            move.text,
            (at, 0.97 - 0.1 * number),
            xycoords=upper.get_xaxis_transform(),
            xytext=(4, 0),
            textcoords="offset points",
            va="top",
            color=DECIDED,
            fontweight="bold",
            fontsize=8.0,
        )
