"""What searches in hindsight have found, kept in the user's cache by the content of what they searched.

A key covers the arrivals, the fleet, the objectives and the simulator's own sources: whatever changes them, searches
anew.
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
from trimtab_simulator.contest import Contest

NOT_SEARCHED = ("report", "results", "trimtab")
"""Modules that no search depends on."""


def folder() -> Path:
    """Where findings are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "trimtab" / "simulator"


def key_of(contest: Contest, search: str) -> str:
    """Names a search over a contest."""
    digest = hashlib.sha256(_sources())
    settings = contest.settings
    told = (search, settings.machine, sorted(settings.parameters.items()), contest.objectives, contest.loop.router)
    digest.update(repr(told).encode())
    counts = (settings.start_replicas, settings.min_replicas, settings.max_replicas, settings.cold_start_seconds)
    shares = getattr(settings.make_blocks, "__name__", "")
    loop = contest.loop
    digest.update(repr((counts, shares, settings.allowance, loop.seed, loop.delay_seconds)).encode())
    digest.update(repr(contest.trace.seconds).encode())
    for arrival in contest.trace.arrivals:
        digest.update(repr(tuple(arrival)).encode())
    return digest.hexdigest()


def recall(key: str) -> dict[str, Any] | None:
    """What was found before; None: nothing, or nothing that can be read."""
    try:
        found = json.loads((folder() / f"{key}.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def remember(key: str, found: dict[str, Any]) -> None:
    """Keep a finding. A cache that cannot be written is no reason to fail."""
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
            if path.stem not in NOT_SEARCHED:
                digest.update(path.read_bytes())
    return digest.digest()
