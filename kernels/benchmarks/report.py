"""gpu.json, written after every row so that a run which ends early has kept what it found; and a plot of it."""

import json
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

Entry = dict[str, Any]


def identity(device: torch.device, triton_version: str) -> Entry:
    """Where a figure was measured: rows of another device or version are not mixed."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "triton": triton_version, "python": platform.python_version()}


class Report:
    """The file and its rows by name. `resume` keeps those of an earlier run on the same device and versions."""

    def __init__(self, path: Path, identity: Entry, command: str, *, resume: bool) -> None:
        self.path = path
        before = json.loads(path.read_text()) if resume and path.exists() else {}
        same = all(before.get(key) == value for key, value in identity.items())
        self.rows: dict[str, Entry] = before.get("rows", {}) if same else {}
        self._head = {**identity, "command": command, "date": datetime.now(UTC).date().isoformat()}
        self.limits: dict[str, float] = {}

    def has(self, name: str) -> bool:
        """Whether the row was measured, here or before; one that failed is tried again."""
        return name in self.rows and "error" not in self.rows[name]

    def add(self, name: str, entry: Entry) -> None:
        """Keep a row, and write the file."""
        self.rows[name] = entry
        self.write()

    def write(self) -> None:
        """Beside and renamed: a reader never sees half a file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".tmp")
        beside.write_text(json.dumps({**self._head, "limits": self.limits, "rows": self.rows}, indent=1) + "\n")
        beside.replace(self.path)


def plot(rows: dict[str, Entry], path: Path) -> bool:
    """Shares of the limit as bars, with the bar that is asked. False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    shown = [(name, row["share"], row["bar"]) for name, row in rows.items() if "share" in row]
    figure = Figure(figsize=(9, 0.28 * len(shown) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(shown))
    axes.barh(places, [share for _, share, _ in shown], color=["#2a7" if s >= b else "#c73" for _, s, b in shown])
    axes.plot([bar for _, _, bar in shown], places, "k|", markersize=12, label="asked")
    axes.set_yticks(list(places), [name for name, _, _ in shown], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("share of the limit measured in the same run")
    axes.legend()
    figure.savefig(path)
    return True
