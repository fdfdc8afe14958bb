"""Conversion between the resource and the tuner: settings, stored state, and the prior of the step cost. Pure.

The prior is the roofline of the layout (`layout/cost.py`) as tuner coefficients. It is only a start: after a few
observations, only coefficients that the load does not exercise stay near it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from trimtab_operator.builders.config_map import STATE_KEY
from trimtab_operator.layout.cost import Hardware, decode_step, prefill_seconds_per_token
from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.layout.gpus import Gpu
from trimtab_operator.planning.objectives import objectives_of
from trimtab_operator.planning.scheduling_policy import SchedulingPolicy, wanted_scheduling
from trimtab_operator.resource import spec as owner
from trimtab_operator.resource.live_parameters import live_parameters
from trimtab_operator.resource.quantity import parse_quantity
from trimtab_operator.resource.signed_text import sign, verify
from trimtab_operator.resource.spec import InferenceDeployment, Parallelism, Spec
from trimtab_operator.tuner.decide import TunerOutput
from trimtab_operator.tuner.engine_model import StepCost
from trimtab_operator.tuner.load.season import BUCKETS_PER_DAY, DAY_SECONDS
from trimtab_operator.tuner.parameters import Parameter, Value, typed
from trimtab_operator.tuner.scaling.behavior import Behavior, Policy, Rules, Select, Unit
from trimtab_operator.tuner.settings import Bounds, Mode, Scaling, Seasonal, Settings
from trimtab_operator.tuner.state import TunerState
from trimtab_operator.tuner.stored import from_json, rebuild_state, to_json

OVERHEAD_SECONDS = 0.003  # per step: scheduling, launching, sampling
SEQUENCE_SECONDS = 20e-6  # host work per sequence and step
BATCH, LONG, CHUNK = 16, 8192, 2048  # roofline points: sequences, context tokens, prompt tokens
SIGNED_KIND = "tuning"  # kind of the signed text
# That of the HorizontalPodAutoscaler: a wrong metric must not take all GPUs of a cluster at once.
DEFAULT_SCALE_UP = (Policy(Unit.PODS, 4, 15.0), Policy(Unit.PERCENT, 100, 15.0))
SEASONS = {"Daily": Seasonal(), "Weekly": Seasonal(7 * DAY_SECONDS, 7 * BUCKETS_PER_DAY)}
"""Values of `spec.scaling.forecast.seasonality`."""


def settings_of(spec: Spec) -> Settings:
    """Return the tuner's settings: mode, objectives, bounds and start values of live parameters, and scaling.

    A missing bound is the engine's.
    """
    bounds: dict[Parameter, Bounds] = {}
    for knob in live_parameters(spec):
        name = Parameter(knob.field)
        given = getattr(spec.tuning.bounds, knob.field)
        if given is not None:
            bounds[name] = Bounds(_number(name, given.min), _number(name, given.max))
    if spec.tuning.bounds.watermark is not None:
        bounds[Parameter.WATERMARK] = Bounds(None, _number(Parameter.WATERMARK, spec.tuning.bounds.watermark.max))
    wanted = wanted_scheduling(spec)
    by_deadline = wanted is not None and wanted.policy is SchedulingPolicy.DEADLINE
    objectives = replace(objectives_of(spec.objectives), order_queues=by_deadline)
    return Settings(Mode(spec.tuning.mode), objectives, bounds, start_values(spec), scaling_of(spec.scaling))


def start_values(spec: Spec) -> dict[Parameter, Value]:
    """Return the start values of live parameters, without those that the engine chooses."""
    names = ((Parameter(parameter.field), parameter.start) for parameter in live_parameters(spec))
    return {name: typed(name, float(start)) for name, start in names if start is not None}


def scaling_of(wanted: owner.Scaling | None) -> Scaling | None:
    """Return the scaling settings; None if the replica count is set by the spec."""
    if wanted is None:
        return None
    behavior = wanted.behavior or owner.ScalingBehavior()
    return Scaling(
        wanted.min_replicas,
        wanted.max_replicas,
        Behavior(_pace(behavior.scale_up, DEFAULT_SCALE_UP), _pace(behavior.scale_down)),
        None if wanted.forecast is None else SEASONS[wanted.forecast.seasonality],
    )


def _pace(wanted: owner.ScalingRules | None, default: tuple[Policy, ...] = ()) -> Rules:
    """Return the rules of one direction, with the default rate limits unless the spec sets others. By default the
    tuner's stabilization window is used.
    """
    if wanted is None:
        return Rules(policies=default)
    policies = tuple(Policy(Unit(p.type), p.value, float(p.period_seconds)) for p in wanted.policies or ())
    window = wanted.stabilization_window_seconds
    return Rules(
        None if window is None else float(window), Select(wanted.select_policy or Select.MAX), policies or default
    )


def desired_replicas(deployment: InferenceDeployment, tuned: TunerOutput) -> int:
    """Return the wanted replica count: the tuner's with `spec.scaling`, else the spec's.

    It is called after the tuner, so that a new count takes effect in the same iteration.
    """
    return deployment.replicas if tuned.replicas is None else tuned.replicas


def current_replicas(deployment: InferenceDeployment, state: TunerState | None) -> int:
    """Return the replica count until the tuner changes it.

    With `spec.scaling` this is the tuner's latest count, else the count in the status before `scaling` was set, else
    `spec.replicas`; always within the spec's bounds.
    """
    scaling = deployment.spec.scaling
    if scaling is None:
        return deployment.replicas
    count = None if state is None else state.scaling.desired
    if count is None:
        before = deployment.status.get("desiredReplicas")
        count = before if isinstance(before, int) and not isinstance(before, bool) else deployment.replicas
    return max(scaling.min_replicas, min(scaling.max_replicas, count))


def with_current_replicas(deployment: InferenceDeployment, state: TunerState) -> TunerState:
    """Return the tuner state with the present replica count if the tuner has not chosen one yet."""
    if deployment.spec.scaling is None or state.scaling.desired is not None:
        return state
    return replace(state, scaling=replace(state.scaling, desired=current_replicas(deployment, state)))


def _number(knob: Parameter, value: str | int | None) -> Value | None:
    return None if value is None else typed(knob, float(parse_quantity(value)))


def load_tuner_state(
    deployment: InferenceDeployment,
    config_maps: Iterable[Mapping[str, Any]],
    *,
    key: str,
    former_key: str | None = None,
) -> TunerState:
    """Return the stored tuner state; rebuilt from the status if it is lost, damaged or not signed with either key."""
    for config_map in config_maps:
        text = (config_map.get("data") or {}).get(STATE_KEY)
        body = verify(text, key=key, kind=SIGNED_KIND, former_key=former_key)
        state = None if body is None else from_json(body)
        if state is not None:
            return state
    return rebuild_state(applied_values(deployment.status), starts=settings_of(deployment.spec).starts)


def dump_tuner_state(state: TunerState, *, key: str) -> str:
    """Return the persistent part of the tuner state, signed with `key`, for the ConfigMap."""
    return sign(to_json(state), key=key, kind=SIGNED_KIND)


def applied_values(status: Mapping[str, Any]) -> dict[str, Value]:
    """Return `status.tuning.applied` as numbers, without values that are not numeric."""
    found: dict[str, Value] = {}
    for name, text in ((status.get("tuning") or {}).get("applied") or {}).items():
        try:
            found[name] = int(text) if re.fullmatch(r"-?\d+", str(text)) else float(text)
        except ValueError:
            continue
    return found


# --- prior of the step cost -------------------------------------------------------------------------------------------


def step_cost_prior(facts: ModelFacts, parallelism: Parallelism, gpu: Gpu) -> StepCost:
    """Return the predicted seconds per step, token, sequence, context token and token pair."""
    hardware = Hardware(gpu=gpu)

    def decoding(context: float) -> float:
        return decode_step(facts, parallelism, hardware, batch=BATCH, context=context).seconds

    def prompt_token(context: float) -> float:
        return prefill_seconds_per_token(facts, parallelism, hardware, chunk=CHUNK, context=context)

    return StepCost(
        per_step=OVERHEAD_SECONDS + decode_step(facts, parallelism, hardware, batch=1, context=0).seconds,
        per_token=prompt_token(0),
        per_sequence=SEQUENCE_SECONDS,
        per_context=(decoding(LONG) - decoding(0)) / (BATCH * LONG),
        per_attended=max(0.0, prompt_token(LONG) - prompt_token(0)) / LONG,
    )
