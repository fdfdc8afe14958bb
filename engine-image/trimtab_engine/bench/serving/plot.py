"""Plot of TTFT and ITL of a run: over time, and their distributions. matplotlib is optional."""

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from trimtab_engine.bench.outputs import write_file
from trimtab_engine.bench.serving.client import RequestResult
from trimtab_engine.bench.serving.statistics import chunk_times
from trimtab_engine.errors import ConfigError

FORMATS = (".svg", ".png", ".pdf")


def check_plot(path: Path, *, made_anyway: str | None = None) -> None:
    """Raise ConfigError before the measurement if the plot cannot be created. `made_anyway` is a folder that will be
    created.
    """
    if not path.parent.is_dir() and (made_anyway is None or path.parent != Path(made_anyway)):
        raise ConfigError(f"--plot {path}: no such folder {path.parent}; create it, or set another path")
    if path.suffix not in FORMATS:
        raise ConfigError(f"--plot {path}: the name must end in {', '.join(FORMATS)}")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot requires matplotlib; pip install matplotlib, or remove it")


def plot(complete: Sequence[RequestResult], path: Path, *, title: str, objectives: dict[str, float]) -> None:
    """Plot two columns, TTFT and ITL; above over time, below as a cumulative distribution. Objectives are dotted
    lines.
    """
    import matplotlib

    matplotlib.use(path.suffix.removeprefix(".") if path.suffix != ".png" else "agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6))
    ttft = [(result.start_time, result.ttft * 1000) for result in complete]
    itl = [
        (moment, gap * 1000)
        for result in complete
        for moment, gap in zip(chunk_times(result)[1:], result.itl, strict=True)
    ]
    for column, (name, points) in enumerate((("ttft", ttft), ("itl", itl))):
        _over_time(axes[0][column], name, points, objectives.get(name))
        _distribution(axes[1][column], name, points, objectives.get(name))
    figure.suptitle(title)
    figure.tight_layout()
    drawn = io.BytesIO()
    figure.savefig(
        drawn, format=path.suffix.removeprefix("."), metadata={"Date": None} if path.suffix == ".svg" else None
    )
    pyplot.close(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, drawn.getvalue())


def _over_time(axes: Any, name: str, points: list[tuple[float, float]], objective: float | None) -> None:
    axes.plot([x for x, _ in points], [y for _, y in points], ".", markersize=2, rasterized=True)
    axes.set_xlabel("seconds after the start")
    axes.set_ylabel(f"{name.upper()} (ms)")
    if objective is not None:
        axes.axhline(objective, linestyle="dotted", color="black")


def _distribution(axes: Any, name: str, points: list[tuple[float, float]], objective: float | None) -> None:
    values = np.sort([y for _, y in points])
    axes.plot(values, np.arange(1, len(values) + 1) / max(len(values), 1))
    axes.set_xlabel(f"{name.upper()} (ms)")
    axes.set_ylabel("cumulative fraction")
    axes.set_ylim(0, 1.02)
    if objective is not None:
        axes.axvline(objective, linestyle="dotted", color="black")
