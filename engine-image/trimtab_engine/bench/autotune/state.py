"""What was seen so far, in a file: a search that was ended, by whomever, goes on where it was.

Only what was seen is kept, never where the search stood: it asks the same questions again, and those that the file
answers make no run. A file of other settings is refused, so that results of different loads or engines never mix.
"""

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab_engine.bench.autotune.search import Purpose, Seen, Trial
from trimtab_engine.bench.autotune.space import Candidate, Setting
from trimtab_engine.errors import ConfigError

FORMAT = 1
INFINITE = "inf"  # JSON has no such number


@dataclass(frozen=True, slots=True)
class Run:
    """A trial and what it showed. `seconds`: how long it took, with the change before it."""

    trial: Trial
    seen: Seen
    seconds: float


@dataclass(slots=True)
class State:
    """`start`: the engine's values before the first change, by their names."""

    path: Path
    settings: dict[str, Any]
    start: dict[str, float]
    set_last: dict[str, float]
    """The values that were last given to the engine: who finds them there after a crash knows that they are ours."""
    runs: dict[Trial, Run] = field(default_factory=dict)

    def add(self, run: Run) -> None:
        """Keep it, on disk before anything else happens."""
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
    """The file's state, or a new one. `present`: the engine's values now. Raises ConfigError for a file that is of
    other settings or cannot be read."""
    if not path.exists():
        return State(path, settings, start=present, set_last=present)
    try:
        body = json.loads(path.read_text())
        differing = _difference(body["settings"], settings) if body["format"] == FORMAT else "format"
        if differing is None:
            runs = [run_from_json(one) for one in body["runs"]]
            # What we left there when we crashed is not what its owner had.
            start = body["start"] if body["set_last"] == present else present
            return State(path, settings, start, body["set_last"], {run.trial: run for run in runs})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read {path}: {error!r}; --restart begins anew, --result-dir takes another") from None
    raise ConfigError(
        f"{path} has runs of other settings: {differing}; their results are not comparable. Name another --result-dir, "
        f"or let --restart drop them"
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
    """Raises KeyError, ValueError or TypeError for what `run_as_json` did not write."""
    candidate = Candidate(int(body["max_num_seqs"]), int(body["max_num_batched_tokens"]))
    setting = Setting(candidate, float(body["gpu_memory_utilization"]))
    trial = Trial(Purpose(body["purpose"]), setting, float(body["request_rate"]))
    return Run(trial, Seen(dict(body["figures"]), body["refused"]), float(body["seconds"]))


def _difference(there: dict[str, Any], here: dict[str, Any]) -> str | None:
    """The first setting that is not the same, in words; None: all are."""
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            return f"{name} is {there.get(name)!r} there and {here.get(name)!r} now"
    return None
