"""Between the resource and the tuner: what the owner asks of it, and the memory that it starts from. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from trimtab_operator.builders.config_map import STATE_KEY
from trimtab_operator.planning.objectives import objectives_of
from trimtab_operator.planning.scheduling_policy import QueuePolicy, asked_order
from trimtab_operator.resource import spec as owner
from trimtab_operator.resource.live_parameters import knobs
from trimtab_operator.resource.quantity import parse_quantity
from trimtab_operator.resource.signed_text import opened, sealed
from trimtab_operator.resource.spec import InferenceDeployment, Spec
from trimtab_operator.tuner.decide import Outcome
from trimtab_operator.tuner.knobs import Knob, Value, typed
from trimtab_operator.tuner.load.season import BUCKETS_PER_DAY, DAY_SECONDS
from trimtab_operator.tuner.scaling.behavior import Behavior, Policy, Rules, Select, Unit
from trimtab_operator.tuner.settings import Bounds, Mode, Scaling, Seasonal, Settings
from trimtab_operator.tuner.state import Memory
from trimtab_operator.tuner.stored import from_json, rebuilt, to_json

SEAL = "tuning"  # what its sealed text is called
SEASONS = {"Daily": Seasonal(), "Weekly": Seasonal(7 * DAY_SECONDS, 7 * BUCKETS_PER_DAY)}
"""What `spec.scaling.forecast.seasonality` says."""


def settings_of(spec: Spec) -> Settings:
    """What `spec` says: mode, promises, bounds and starts of the knobs, and how many replicas there may be. An absent
    bound is the engine's."""
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
    asked = asked_order(spec)
    by_deadline = asked is not None and asked.policy is QueuePolicy.DEADLINE
    objectives = replace(objectives_of(spec.objectives), order_queues=by_deadline)
    return Settings(Mode(spec.tuning.mode), objectives, bounds, starts, scaling_of(spec.scaling))


def scaling_of(asked: owner.Scaling | None) -> Scaling | None:
    """How many replicas there may be, and at what pace; None where their number is the owner's."""
    if asked is None:
        return None
    behavior = asked.behavior or owner.ScalingBehavior()
    return Scaling(
        asked.min_replicas,
        asked.max_replicas,
        Behavior(_pace(behavior.scale_up), _pace(behavior.scale_down)),
        None if asked.forecast is None else SEASONS[asked.forecast.seasonality],
    )


def _pace(asked: owner.ScalingRules | None) -> Rules:
    """One direction. What is left out: no rate limit, and the tuner's own hold."""
    if asked is None:
        return Rules()
    policies = (Policy(Unit(p.type), p.value, float(p.period_seconds)) for p in asked.policies or ())
    window = asked.stabilization_window_seconds
    return Rules(None if window is None else float(window), Select(asked.select_policy or Select.MAX), tuple(policies))


def desired_replicas(deployment: InferenceDeployment, tuned: Outcome) -> int:
    """How many replicas are wanted: the tuner's word with `spec.scaling`, else the spec's. It is asked after the tuner,
    so that what it decides on replicas is heard in the same turn."""
    return deployment.replicas if tuned.replicas is None else tuned.replicas


def standing_replicas(deployment: InferenceDeployment, memory: Memory | None) -> int:
    """How many replicas are wanted as long as the tuner does not say otherwise.

    With `spec.scaling` as many as it asked for last, else as were wanted before `scaling` was set, which the status
    says; of a new resource, and of a lost status, what `spec.replicas` says. Always within the owner's bounds.
    """
    scaling = deployment.spec.scaling
    if scaling is None:
        return deployment.replicas
    count = None if memory is None else memory.scaling.desired
    if count is None:
        before = deployment.status.get("desiredReplicas")
        count = before if isinstance(before, int) and not isinstance(before, bool) else deployment.replicas
    return max(scaling.min_replicas, min(scaling.max_replicas, count))


def with_standing_replicas(deployment: InferenceDeployment, memory: Memory) -> Memory:
    """The memory that a turn begins with: where the tuner has not asked for replicas yet, it begins with those that are
    wanted."""
    if deployment.spec.scaling is None or memory.scaling.desired is not None:
        return memory
    return replace(memory, scaling=replace(memory.scaling, desired=standing_replicas(deployment, memory)))


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
