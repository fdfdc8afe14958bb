"""Looks as JSON, for recordings and replays: written with a version, read back with every type checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from trimtab_operator.tuner.knobs import FieldRange, Knob, typed
from trimtab_operator.tuner.moves import Reason
from trimtab_operator.tuner.samples.sample import (
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
BY_LABEL = ("preemptions", "blocked_seconds")  # counters that are several, by a label


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
        return tuple(_look(entry) for entry in data["looks"]), _finite(data["now"])
    except KeyError as error:
        raise ValueError(f"no looks of ours: {error} is missing") from error
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no looks of ours: {error}") from error


def _finite(value: Any) -> float:
    """A time or an age."""
    if not math.isfinite(_number(value)):
        raise ValueError(f"{value!r} is no time")
    return float(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is no number")
    return value


def _numbers(data: Mapping[str, Any], *but: str) -> Mapping[str, Any]:
    """The same, every member but those named being a number, or absent."""
    for name, value in data.items():
        if name not in but and value is not None:
            _number(value)
    return data


def _look(data: Mapping[str, Any]) -> Look:
    sample, config, ledger = data["sample"], data["config"], data["ledger"]
    return Look(
        replica=str(data["replica"]),
        phase=Phase(data["phase"]),
        instance=str(data["instance"]),
        since=_finite(data["since"]),
        sample=None if sample is None else _sample(sample),
        config=None if config is None else _config(config),
        ledger=None if ledger is None else Ledger(**_numbers(ledger)),
        problem=None if data["problem"] is None else str(data["problem"]),
        problem_reason=Reason(data.get("absence", Reason.METRICS_MISSING)),
        was_oom_killed=bool(data["was_oom_killed"]),
        restarts=int(data["restarts"]),
        exit_code=data.get("exit_code"),
    )


def _config(data: Mapping[str, Any]) -> Config:
    return Config(
        generation=int(data["generation"]),
        applied={Knob(name): typed(Knob(name), _number(value)) for name, value in data["applied"].items()},
        fields={Knob(name): FieldRange(**_numbers(limits, "live")) for name, limits in data["fields"].items()},
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
        else RequestNews(
            tuple(Finished(**_numbers(row, "reason")) for row in requests["finished"]),
            tuple(Unfinished(**_numbers(row)) for row in requests["unfinished"]),
            int(requests["missed"]),
        ),
    )


def _histogram(data: Mapping[str, Any] | None) -> Histogram | None:
    if data is None:
        return None
    edges, counts = tuple(map(_number, data["edges"])), tuple(map(_number, data["counts"]))
    if len(edges) != len(counts):
        raise ValueError("a histogram has not as many counts as edges")
    return Histogram(edges, counts, _number(data["total"]))
