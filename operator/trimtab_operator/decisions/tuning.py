"""Between the resource and the tuner: what the owner asks of it, and the memory that it starts from. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from trimtab_operator.builders.config_map import STATE_KEY
from trimtab_operator.decisions.sealed import opened, sealed
from trimtab_operator.resource import spec as owner
from trimtab_operator.resource.knobs import knobs
from trimtab_operator.resource.quantity import parse_quantity, parse_seconds
from trimtab_operator.resource.spec import InferenceDeployment, Spec
from trimtab_operator.tuner.decide import Outcome
from trimtab_operator.tuner.knobs import Knob, Value, typed
from trimtab_operator.tuner.objectives import Itl, ItlKind, Objectives, Ttft
from trimtab_operator.tuner.settings import Bounds, Mode, Settings
from trimtab_operator.tuner.state import Memory
from trimtab_operator.tuner.stored import from_json, rebuilt, to_json

SEAL = "tuning"  # what its sealed text is called


def settings_of(spec: Spec) -> Settings:
    """What `spec` says: mode, promises, and bounds and starts of the knobs. A bound that is absent is the engine's."""
    bounds: dict[Knob, Bounds] = {}
    starts: dict[Knob, Value] = {}
    for knob in knobs(spec):
        name = Knob(knob.field)
        given = getattr(spec.tuning.bounds, knob.field)
        if given is not None:
            bounds[name] = Bounds(_number(name, given.min), _number(name, given.max))
        if knob.start is not None:
            starts[name] = typed(name, float(knob.start))
    if spec.tuning.bounds.watermark is not None:
        bounds[Knob.WATERMARK] = Bounds(None, _number(Knob.WATERMARK, spec.tuning.bounds.watermark.max))
    return Settings(Mode(spec.tuning.mode), objectives_of(spec.objectives), bounds, starts)


def objectives_of(asked: owner.Objectives | None) -> Objectives:
    """The owner's promises; none where nothing is asked for, which the tuner completes with its defaults."""
    if asked is None:
        return Objectives()
    ttft = itl = None
    if asked.ttft is not None:
        per_token = 0.0 if asked.ttft.per_prompt_token is None else parse_seconds(asked.ttft.per_prompt_token)
        ttft = Ttft(parse_seconds(asked.ttft.target), per_token, asked.ttft.percentile / 100)
    if asked.itl is not None:
        itl = Itl(parse_seconds(asked.itl.target), ItlKind(asked.itl.kind.lower()), asked.itl.percentile / 100)
    return Objectives(ttft, itl)


def desired_replicas(deployment: InferenceDeployment, tuned: Outcome) -> int:
    """How many replicas are wanted: the spec's word. It is asked after the tuner, so that one that decides on replicas
    is heard in the same turn."""
    return deployment.replicas


def _number(knob: Knob, value: str | int | None) -> Value | None:
    return None if value is None else typed(knob, float(parse_quantity(value)))


def stored_memory(
    deployment: InferenceDeployment,
    config_maps: Iterable[Mapping[str, Any]],
    *,
    key: str,
    former_key: str | None = None,
) -> Memory:
    """What the ConfigMap remembers; rebuilt from status when it is lost, damaged or signed with neither key."""
    for config_map in config_maps:
        text = (config_map.get("data") or {}).get(STATE_KEY)
        body = opened(text, key=key, kind=SEAL, former_key=former_key)
        memory = None if body is None else from_json(body)
        if memory is not None:
            return memory
    return rebuilt(applied_values(deployment.status), starts=settings_of(deployment.spec).starts)


def remembered_text(memory: Memory, *, key: str) -> str:
    """The lasting part of the memory, signed with `key`, for the ConfigMap."""
    return sealed(to_json(memory), key=key, kind=SEAL)


def applied_values(status: Mapping[str, Any]) -> dict[str, Value]:
    """`status.tuning.applied` as numbers again; what is no number is left out."""
    found: dict[str, Value] = {}
    for name, text in ((status.get("tuning") or {}).get("applied") or {}).items():
        try:
            found[name] = int(text) if re.fullmatch(r"-?\d+", str(text)) else float(text)
        except ValueError:
            continue
    return found
