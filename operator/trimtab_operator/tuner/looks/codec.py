"""Looks as JSON, for recordings and replays: written with a version, read back with every type checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from trimtab_operator.tuner.knobs import FieldRange, Knob, typed
from trimtab_operator.tuner.looks.look import (
    Config,
    Counters,
    Finished,
    Gauges,
    Histogram,
    Ledger,
    Look,
    Phase,
    RequestNews,
    Sample,
    Unfinished,
    Work,
)

LOOKS_VERSION = 1


def to_json(looks: tuple[Look, ...], *, now: float) -> str:
    """All looks of one tick, on one line."""
    return json.dumps(
        {"version": LOOKS_VERSION, "now": now, "looks": [asdict(look) for look in looks]},
        separators=(",", ":"),
        default=str,
    )


def from_json(text: str) -> tuple[tuple[Look, ...], float]:
    """Looks and their time. Raises ValueError for what `to_json` did not write."""
    try:
        data = json.loads(text)
        if data["version"] != LOOKS_VERSION:
            raise ValueError(f"version {data['version']!r} of looks is not {LOOKS_VERSION}")
        return tuple(_look(entry) for entry in data["looks"]), float(data["now"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no looks of ours: {error}") from error


def _look(data: Mapping[str, Any]) -> Look:
    sample, config, ledger = data["sample"], data["config"], data["ledger"]
    return Look(
        replica=str(data["replica"]),
        phase=Phase(data["phase"]),
        instance=str(data["instance"]),
        since=float(data["since"]),
        sample=None if sample is None else _sample(sample),
        config=None if config is None else _config(config),
        ledger=None if ledger is None else Ledger(**ledger),
        problem=data["problem"],
        was_oom_killed=bool(data["was_oom_killed"]),
        restarts=int(data["restarts"]),
        exit_code=data.get("exit_code"),
    )


def _config(data: Mapping[str, Any]) -> Config:
    return Config(
        generation=int(data["generation"]),
        applied={Knob(name): typed(Knob(name), value) for name, value in data["applied"].items()},
        fields={Knob(name): FieldRange(**limits) for name, limits in data["fields"].items()},
        max_model_len=data["max_model_len"],
        pipeline_stages=int(data["pipeline_stages"]),
    )


def _sample(data: Mapping[str, Any]) -> Sample:
    counters = dict(data["counters"])
    for kind in ("decode", "prefill"):
        counters[kind] = None if counters[kind] is None else Work(**counters[kind])
    requests = data["requests"]
    return Sample(
        at=float(data["at"]),
        counters=Counters(**counters),
        gauges=Gauges(**data["gauges"]),
        ttft=_histogram(data["ttft"]),
        itl=_histogram(data["itl"]),
        mean_itl=_histogram(data["mean_itl"]),
        requests=None
        if requests is None
        else RequestNews(
            tuple(Finished(**row) for row in requests["finished"]),
            tuple(Unfinished(**row) for row in requests["unfinished"]),
            int(requests["missed"]),
        ),
    )


def _histogram(data: Mapping[str, Any] | None) -> Histogram | None:
    if data is None:
        return None
    edges = tuple(math.inf if edge == "Infinity" else float(edge) for edge in data["edges"])
    return Histogram(edges, tuple(float(count) for count in data["counts"]), float(data["total"]))
