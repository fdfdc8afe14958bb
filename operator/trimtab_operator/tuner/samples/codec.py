"""JSON format of snapshots, for recordings and replays: versioned, with every type validated when read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.parameters import FieldRange, Parameter, typed
from trimtab_operator.tuner.samples.sample import (
    Config,
    Counters,
    Finished,
    Gauges,
    Histogram,
    Ledger,
    Phase,
    ReplicaSnapshot,
    RequestUpdates,
    Sample,
    Unfinished,
    Work,
)

SNAPSHOTS_VERSION = 1
BY_LABEL = ("preemptions", "blocked_seconds")  # counters that are several, by a label


def to_json(snapshots: tuple[ReplicaSnapshot, ...], *, now: float) -> str:
    """Return all snapshots of one tick as one line."""
    return json.dumps(
        {"version": SNAPSHOTS_VERSION, "now": now, "snapshots": [asdict(snapshot) for snapshot in snapshots]},
        separators=(",", ":"),
        default=_encode,
    )


def _encode(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset) else str(value)


def from_json(text: str) -> tuple[tuple[ReplicaSnapshot, ...], float]:
    """Read snapshots and their time. Raise ValueError for anything that `to_json` did not write."""
    try:
        data = json.loads(text)
        if data["version"] != SNAPSHOTS_VERSION:
            raise ValueError(f"snapshot version {data['version']!r} is not supported; expected {SNAPSHOTS_VERSION}")
        return tuple(_snapshot(entry) for entry in data["snapshots"]), _finite(data["now"])
    except KeyError as error:
        raise ValueError(f"not a recorded snapshot: {error} is missing") from error
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a recorded snapshot: {error}") from error


def _finite(value: Any) -> float:
    """Return a finite time or age."""
    if not math.isfinite(_number(value)):
        raise ValueError(f"{value!r} is not a time")
    return float(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    return value


def _numbers(data: Mapping[str, Any], *but: str) -> Mapping[str, Any]:
    """Validate that every member except `but` is a number or absent."""
    for name, value in data.items():
        if name not in but and value is not None:
            _number(value)
    return data


def _snapshot(data: Mapping[str, Any]) -> ReplicaSnapshot:
    sample, config, ledger = data["sample"], data["config"], data["ledger"]
    return ReplicaSnapshot(
        replica=str(data["replica"]),
        phase=Phase(data["phase"]),
        instance=str(data["instance"]),
        since=_finite(data["since"]),
        sample=None if sample is None else _sample(sample),
        config=None if config is None else _config(config),
        ledger=None if ledger is None else Ledger(**_numbers(ledger)),
        problem=None if data["problem"] is None else str(data["problem"]),
        problem_reason=Reason(data.get("problem_reason", Reason.METRICS_MISSING)),
        was_oom_killed=bool(data["was_oom_killed"]),
        restarts=int(data["restarts"]),
        exit_code=data.get("exit_code"),
    )


def _config(data: Mapping[str, Any]) -> Config:
    return Config(
        generation=int(data["generation"]),
        applied={Parameter(name): typed(Parameter(name), _number(value)) for name, value in data["applied"].items()},
        fields={Parameter(name): FieldRange(**_numbers(limits, "live")) for name, limits in data["fields"].items()},
        max_model_len=data["max_model_len"],
        pipeline_stages=int(data["pipeline_stages"]),
    )


def _sample(data: Mapping[str, Any]) -> Sample:
    counters = dict(data["counters"])
    for kind in ("decode", "prefill"):
        counters[kind] = None if counters[kind] is None else Work(**_numbers(counters[kind]))
    for name in BY_LABEL:
        counters[name] = dict(_numbers(counters[name]))
    _numbers(counters, "decode", "prefill", *BY_LABEL)
    requests = data["requests"]
    return Sample(
        at=_finite(data["at"]),
        counters=Counters(**counters),
        gauges=Gauges(**_numbers(data["gauges"])),
        ttft=_histogram(data["ttft"]),
        itl=_histogram(data["itl"]),
        mean_itl=_histogram(data["mean_itl"]),
        requests=None
        if requests is None
        else RequestUpdates(
            tuple(Finished(**_numbers(row, "reason")) for row in requests["finished"]),
            tuple(Unfinished(**_numbers(row)) for row in requests["unfinished"]),
            int(requests["missed"]),
        ),
        ranks=frozenset((str(name), str(rank)) for name, rank in data.get("ranks", ())),
    )


def _histogram(data: Mapping[str, Any] | None) -> Histogram | None:
    if data is None:
        return None
    edges, counts = tuple(map(_number, data["edges"])), tuple(map(_number, data["counts"]))
    if len(edges) != len(counts):
        raise ValueError("a histogram has different numbers of counts and edges")
    return Histogram(edges, counts, _number(data["total"]))
