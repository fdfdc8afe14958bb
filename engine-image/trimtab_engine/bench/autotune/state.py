"""Results so far in a file, so that a stopped search resumes.

Only results are stored, not the position of the search: it repeats the same trials, and those in the file are not run
again. A file with other settings is rejected, so that results of different loads or engines never mix.
"""

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab_engine.bench.autotune.search import Purpose, Trial, TrialResult
from trimtab_engine.bench.autotune.space import Candidate, Setting
from trimtab_engine.errors import ConfigError

FORMAT = 1
INFINITE = "inf"  # JSON has no infinity


@dataclass(frozen=True, slots=True)
class Run:
    """A trial and its result. `seconds` is its duration including the change before it."""

    trial: Trial
    seen: TrialResult
    seconds: float


@dataclass(slots=True)
class State:
    """State of a search. `start` has the engine's values before the first change."""

    path: Path
    settings: dict[str, Any]
    start: dict[str, float]
    set_last: dict[str, float]
    """Values last set by the search, so that a resumed search recognizes its own values after a crash."""
    runs: dict[Trial, Run] = field(default_factory=dict)

    def add(self, run: Run) -> None:
        """Record a run on disk before anything else happens."""
        self.runs[run.trial] = run
        self.write()

    def write(self) -> None:
        body = {
            "format": FORMAT,
            "settings": self.settings,
            "start": self.start,
            "set_last": self.set_last,
            "runs": [run_as_json(run) for run in self.runs.values()],
        }
        scratch = self.path.with_suffix(".new")
        scratch.write_text(json.dumps(body, indent=1) + "\n")
        os.replace(scratch, self.path)


def open_state(path: Path, settings: dict[str, Any], present: dict[str, float]) -> State:
    """Return the file's state, or a new one. `present` are the engine's current values.

    Raises:
        ConfigError: The file has other settings or cannot be read.
    """
    if not path.exists():
        return State(path, settings, start=present, set_last=present)
    try:
        body = json.loads(path.read_text())
        differing = _difference(body["settings"], settings) if body["format"] == FORMAT else "format"
        if differing is not None and not body["runs"]:
            return State(path, settings, start=present, set_last=present)
        if differing is None:
            runs = [run_from_json(one) for one in body["runs"]]
            # Values left by a crashed search are not the owner's.
            start = body["start"] if body["set_last"] == present else present
            return State(path, settings, start, body["set_last"], {run.trial: run for run in runs})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"cannot read {path}: {error!r}; use --restart to start over, or another --result-dir"
        ) from None
    raise ConfigError(
        f"{path} has runs with other settings: {differing}; their results are not comparable. Use another "
        "--result-dir, or --restart to drop them"
    )


def run_as_json(run: Run) -> dict[str, Any]:
    rate = INFINITE if math.isinf(run.trial.rate) else run.trial.rate
    return {
        "purpose": run.trial.purpose.value,
        **run.trial.setting.values,
        "request_rate": rate,
        "refused": run.seen.refused,
        "seconds": run.seconds,
        "figures": dict(run.seen.figures),
    }


def run_from_json(body: dict[str, Any]) -> Run:
    """Return the run. Raises KeyError, ValueError or TypeError for input not written by `run_as_json`."""
    candidate = Candidate(int(body["max_num_seqs"]), int(body["max_num_batched_tokens"]))
    setting = Setting(candidate, float(body["gpu_memory_utilization"]))
    trial = Trial(Purpose(body["purpose"]), setting, float(body["request_rate"]))
    return Run(trial, TrialResult(dict(body["figures"]), body["refused"]), float(body["seconds"]))


def _difference(there: dict[str, Any], here: dict[str, Any]) -> str | None:
    """Return the first differing setting as text, or None."""
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            return f"{name} was {there.get(name)!r} and is {here.get(name)!r} now"
    return None
