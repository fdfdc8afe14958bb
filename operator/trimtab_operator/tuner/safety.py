"""Safety rules, applied before all others: bounds, crashes, device memory used by other processes, and engine limits.

They apply immediately, need no evidence window and do not wait for trials. Raises wait for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from trimtab_operator.tuner.moves import Move, Reason
from trimtab_operator.tuner.observation import Observation, ReplicaObservation
from trimtab_operator.tuner.parameters import Parameter, Value, Values, is_same, typed
from trimtab_operator.tuner.samples import Config
from trimtab_operator.tuner.settings import Bounds, Settings
from trimtab_operator.tuner.state import Pin, TunerState

LEAST_FREE_SHARE = 0.005  # of the device: below it, other processes have used up our headroom
WANTED_FREE_SHARE = 0.01
KEEP_CRASHES = 8


def clamp(parameter: Parameter, value: float, *ranges: tuple[float | None, float | None]) -> Value:
    """Return the nearest value that all ranges allow; the last range wins over a contradicting one."""
    for low, high in ranges:
        if high is not None:
            value = min(value, high)
        if low is not None:
            value = max(value, low)
    return typed(parameter, value)


def move_into_bounds(state: TunerState, settings: Settings, observation: Observation) -> list[Move]:
    """Return moves for applied values that the spec's bounds or every engine's limits no longer allow."""
    moves = []
    for parameter, value in state.applied.items():
        bounds = settings.bounds.get(parameter, Bounds())
        inside = clamp(parameter, value, _of_engines(observation, parameter), (bounds.minimum, bounds.maximum))
        if not is_same(inside, value):
            moves.append(Move(Reason.BOUNDS_CHANGED, parameter, value, inside))
    return moves


def _of_engines(observation: Observation, parameter: Parameter) -> tuple[float | None, float | None]:
    """Return the widest range that an engine allows for a count. Shares depend on each engine's memory and are clamped
    per engine.
    """
    fields = [
        s.config.fields[parameter]
        for s in observation.replicas
        if s.config is not None and parameter in s.config.fields
    ]
    if not fields or parameter.is_share:
        return None, None
    return min(field.minimum for field in fields), max(field.maximum for field in fields)


def roll_back_after_crash(
    state: TunerState, observation: Observation, *, now: float, pin_seconds: float
) -> tuple[TunerState, list[Move]]:
    """Return all raised values to their start values after an engine ran out of memory or crashed above them.

    Raises are avoided for `pin_seconds`, and permanently once the crash budget is exhausted. Crashes that happened
    while no operator ran count too: the state records which engines got raised values.
    """
    victims = [seen for seen in observation.replicas if seen.has_crashed or _has_ended_since(state, seen)]
    raised = {parameter: value for parameter, value in state.applied.items() if is_above_start(state, parameter, value)}
    if not victims or not raised:
        return state, []
    evidence = {"crashes": len(state.crashes) + 1, "out_of_memory": float(any(s.was_oom_killed for s in victims))}
    codes = [s.exit_code for s in victims if s.exit_code is not None and not s.was_oom_killed]
    evidence |= {"exit_code": codes[0]} if codes else {}
    moves = [
        Move(Reason.ROLLED_BACK_AFTER_RESTART, parameter, value, state.starts[parameter], evidence)
        for parameter, value in raised.items()
    ]
    pins = tuple(
        Pin(parameter, value, state.starts[parameter], now + pin_seconds) for parameter, value in raised.items()
    )
    crashes = (*state.crashes, now)[-KEEP_CRASHES:]
    return replace(state, crashes=crashes, pins=(*state.pins, *pins), trial=None), moves


def _has_ended_since(state: TunerState, seen: ReplicaObservation) -> bool:
    """Return True if the engine ended after it got values above the start values."""
    return seen.restarts > state.raised.get(seen.instance, seen.restarts)


def raised_engines(state: TunerState, observation: Observation, patches: Mapping[str, Values]) -> dict[str, int]:
    """Return the engines that run, or are about to get, values above the start values: restart count by instance.

    An engine that cannot be read keeps its entry. Without a raised value the result is empty: after a lowered start
    value, engines that still run the old one get the new one at once.
    """
    if not any(is_above_start(state, parameter, value) for parameter, value in state.applied.items()):
        return {}
    found = {}
    for seen in observation.replicas:
        if seen.config is None:
            known = state.raised.get(seen.instance)
            is_same_engine = known == seen.restarts
        else:
            runs = {**seen.config.applied, **patches.get(seen.replica, {})}
            is_same_engine = any(is_above_start(state, parameter, value) for parameter, value in runs.items())
        if seen.instance and is_same_engine:
            found[seen.instance] = seen.restarts
    return found


def is_crash_budget_exhausted(state: TunerState, settings: Settings) -> bool:
    """Return True if engines crashed so often above the start values that nothing is raised above them any more."""
    return len(state.crashes) >= settings.pace.crash_budget


def active_pins(state: TunerState, settings: Settings) -> tuple[Pin, ...]:
    """Return the values to avoid now: harmful ones until they expire, and everything above the start values once the
    crash budget is exhausted.
    """
    if not is_crash_budget_exhausted(state, settings):
        return state.pins
    starts = {parameter: start for parameter, start in state.starts.items() if parameter is not Parameter.WATERMARK}
    return (*state.pins, *(Pin(parameter, start + 1, start, math.inf) for parameter, start in starts.items()))


def is_above_start(state: TunerState, parameter: Parameter, value: Value) -> bool:
    """Return True if a value is above the start value of the spec or the engine, and so may cost memory."""
    start = state.starts.get(parameter)
    return parameter is not Parameter.WATERMARK and start is not None and value > start and not is_same(value, start)


def yield_device_memory(state: TunerState, observation: Observation) -> list[Move]:
    """Lower raised KV memory if the device is nearly full because other processes use more of it."""
    parameter = Parameter.GPU_MEMORY_UTILIZATION
    value, start = state.applied.get(parameter), state.starts.get(parameter)
    if value is None or start is None or value <= start:
        return []
    shares = [_free_share(seen) for seen in observation.trusted]
    free = min((share for share in shares if share is not None), default=None)
    if free is None or free >= LEAST_FREE_SHARE:
        return []
    after = max(float(start), float(typed(parameter, value - (WANTED_FREE_SHARE - free))))
    return [Move(Reason.DEVICE_MEMORY_PRESSURE, parameter, value, after, {"free_share": round(free, 5)})]


def _free_share(seen: ReplicaObservation) -> float | None:
    ledger = seen.ledger
    return None if ledger is None or ledger.free_bytes is None else ledger.free_bytes / ledger.device_bytes


def applicable_values(config: Config, wanted: Values) -> dict[Parameter, Value]:
    """Return the values that one engine should run: live parameters that differ, clamped to its limits."""
    fields: dict[Parameter, Value] = {}
    for parameter, value in wanted.items():
        limits, runs = config.fields.get(parameter), config.applied.get(parameter)
        if limits is None or runs is None or not limits.live:
            continue
        inside = clamp(parameter, value, (limits.minimum, limits.maximum))
        if not is_same(inside, runs):
            fields[parameter] = inside
    return fields
