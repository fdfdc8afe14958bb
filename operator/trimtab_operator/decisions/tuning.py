"""Between the resource and the tuner: what the owner asks of it, and the state it starts from. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from trimtab_operator.builders.config_map import STATE_KEY
from trimtab_operator.resource.knobs import knobs
from trimtab_operator.resource.quantity import parse_quantity
from trimtab_operator.resource.spec import InferenceDeployment, Spec
from trimtab_operator.tuner import Bounds, Knob, Mode, Settings, TickResult, TunerState, Value


def settings_of(spec: Spec) -> Settings:
    """Mode, bounds and start values of `spec.tuning` and `spec.engine`. A bound that is absent is the engine's."""
    bounds: dict[Knob, Bounds] = {}
    starts: dict[Knob, Value] = {}
    for knob in knobs(spec):
        name = Knob(knob.field)
        given = getattr(spec.tuning.bounds, knob.field)
        if given is not None:
            bounds[name] = Bounds(_number(name, given.min), _number(name, given.max))
        if knob.start is not None:
            starts[name] = _number(name, str(knob.start)) or 0
    return Settings(mode=Mode(spec.tuning.mode), bounds=bounds, starts=starts)


def desired_replicas(deployment: InferenceDeployment, tuned: TickResult) -> int:
    """How many replicas are wanted: the spec's word. It is asked after the tuner, so that one that decides on replicas
    is heard in the same turn."""
    return deployment.replicas


def _number(knob: Knob, value: str | int | None) -> Value | None:
    if value is None:
        return None
    number = parse_quantity(value)
    return float(number) if knob is Knob.GPU_MEMORY_UTILIZATION else int(number)


def stored_state(deployment: InferenceDeployment, config_maps: Iterable[Mapping[str, Any]]) -> TunerState:
    """What the ConfigMap remembers; rebuilt from status when it is lost or damaged."""
    for config_map in config_maps:
        text = (config_map.get("data") or {}).get(STATE_KEY)
        state = TunerState.from_json(text) if text else None
        if state is not None:
            return state
    return TunerState.rebuilt(applied_values(deployment.status), starts=settings_of(deployment.spec).starts)


def applied_values(status: Mapping[str, Any]) -> dict[str, Value]:
    """`status.tuning.applied` as numbers again; what is no number is left out."""
    found: dict[str, Value] = {}
    for name, text in ((status.get("tuning") or {}).get("applied") or {}).items():
        try:
            found[name] = int(text) if re.fullmatch(r"-?\d+", str(text)) else float(text)
        except ValueError:
            continue
    return found
