"""Cache of searches in hindsight, in the user's cache folder, by the content of their inputs.

A key covers the arrivals, the fleet, the objectives and the simulator's sources; a change of any of them repeats the
search.
"""

from __future__ import annotations

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import trimtab_operator.tuner.engine_model

import trimtab_simulator
from trimtab_simulator.experiment import Experiment

UNUSED_MODULES = ("report", "results", "trimtab")
"""Modules that no search depends on."""


def folder() -> Path:
    """Return the cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "trimtab" / "simulator"


def key_of(experiment: Experiment, search: str) -> str:
    """Return the key of a search on an experiment."""
    digest = hashlib.sha256(_sources())
    settings = experiment.settings
    inputs = (
        search,
        settings.machine,
        sorted(settings.parameters.items()),
        experiment.objectives,
        experiment.loop.router,
    )
    digest.update(repr(inputs).encode())
    counts = (settings.start_replicas, settings.min_replicas, settings.max_replicas, settings.cold_start_seconds)
    shares = getattr(settings.make_blocks, "__name__", "")
    loop = experiment.loop
    digest.update(repr((counts, shares, settings.allowance, loop.seed, loop.delay_seconds)).encode())
    digest.update(repr(experiment.trace.seconds).encode())
    for arrival in experiment.trace.arrivals:
        digest.update(repr(tuple(arrival)).encode())
    return digest.hexdigest()


def load_result(key: str) -> dict[str, Any] | None:
    """Return a cached result; None if it is missing or unreadable."""
    try:
        found = json.loads((folder() / f"{key}.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def store_result(key: str, found: dict[str, Any]) -> None:
    """Store a result. Write errors are ignored."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        path = folder() / f"{key}.json"
        waiting = path.with_suffix(f".{os.getpid()}")
        waiting.write_text(json.dumps(found))
        waiting.replace(path)
    except OSError:
        return


@lru_cache(maxsize=1)
def _sources() -> bytes:
    digest = hashlib.sha256()
    for package in (trimtab_simulator, trimtab_operator.tuner.engine_model):
        root = Path(package.__file__ or "").parent
        for path in sorted(root.rglob("*.py")):
            if path.stem not in UNUSED_MODULES:
                digest.update(path.read_bytes())
    return digest.digest()
